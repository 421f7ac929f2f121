"""A run's configuration: layers, refusals, and what it costs to load."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.configs.explain import readers_of
from maxtext.configs.loader import model_names, parse_assignments
from maxtext.configs.types import MaxTextConfig
from maxtext.models.build import FAMILIES
from tests.support import TINY, program, tiny

PARAMETERS = {
  "default": 1104218112,
  "llama2-7b": 6738415616,
  "llama2-13b": 13015864320,
  "llama2-70b": 68976648192,
  "llama3-8b": 8030261248,
  "llama3-70b": 70553706496,
  "llama3.1-8b": 8030261248,
  "llama3.1-8b-Instruct": 8030261248,
  "llama3.1-70b": 70553706496,
  "llama3.1-70b-Instruct": 70553706496,
  "llama3.1-405b": 405853388800,
  "llama3.3-70b": 70553706496,
}


def test_later_layers_win(tmp_path):
  (tmp_path / "base.yml").write_text("steps: 5\nlearning_rate: 0.5\ndataset_type: synthetic\n")
  (tmp_path / "mine.yml").write_text("base_config: base.yml\nlearning_rate: 0.25\nmodel_name: llama2-7b\n")
  config = load_config(tmp_path / "mine.yml", steps=7)
  assert (config.steps, config.learning_rate, config.base_emb_dim) == (7, 0.25, 4096)
  assert config.logical_axis_rules, "base.yml is the first layer"
  with pytest.raises(Exception, match="frozen"):
    config.steps = 8


@pytest.mark.parametrize("name", PARAMETERS)
def test_named_models_have_their_parameters(name):
  config = load_config(name, dataset_type="synthetic", per_device_batch_size=1)
  assert program(config).model.size == PARAMETERS[name]


def test_every_available_model_is_listed():
  available = []
  for name in model_names():
    try:
      available.append(load_config(name, dataset_type="synthetic").model_name)
    except ConfigError as error:
      assert "family is not implemented yet" in str(error)  # noqa: PT017
  assert sorted(available) == sorted(PARAMETERS)


def test_words_of_a_command_line():
  assert parse_assignments(["a=1", "b=1e-3", "c=[x, y]", "d=", "e=true", "f=a=b"]) == {
    "a": 1,
    "b": "1e-3",
    "c": ["x", "y"],
    "d": "",
    "e": True,
    "f": "a=b",
  }
  assert load_config(dataset_type="synthetic", learning_rate="1e-3").learning_rate == 1e-3


MISTAKES = {
  "unknown key": ({"stepps": 3}, "'stepps' is not a key. Did you mean 'steps'?"),
  "wrong type": ({"steps": "many"}, "steps=many: input should be a valid integer"),
  "out of bounds": ({"learning_rate": -1}, "learning_rate=-1: input should be greater than or equal to 0."),
  "unknown model": ({"model_name": "lama2-7b"}, "model_name=lama2-7b is not a known model. Did you mean 'llama2-7b'?"),
  "changed model": (
    {"model_name": "llama2-7b", "head_dim": 64},
    "head_dim=64 contradicts model_name=llama2-7b, which has head_dim=128. Add override_model_config=true",
  ),
  "heads": ({"base_num_kv_heads": 3}, "base_num_query_heads=4 is not a multiple of base_num_kv_heads=3"),
  "remat": ({"remat_policy": "ful"}, "'ful' must be one of full, minimal"),
  "remat without effect": (
    {"query_proj": "offload"},
    "query_proj=offload is refused: it has no effect without remat_policy=custom.",
  ),
  "rope without effect": ({"rope_type": "default"}, "rope_factor=8 is refused: it has no effect without a rope_type"),
  "base_config": ({"base_config": "x.yml"}, "base_config=x.yml belongs in a YAML file"),
  "moment": ({"mu_dtype": "int8"}, "mu_dtype=int8 must be one of bfloat16, float32, float16, or empty."),
  "tiling": ({"num_vocab_tiling": 5}, "num_vocab_tiling=5 must divide max_target_length=32."),
  "window": ({"sliding_window_size": 8}, "set attention_type=local_sliding and a window above 0"),
  "kernel": ({"attention": "flsh"}, "Did you mean 'flash'?"),
  "no data yet": ({"dataset_type": "tfds"}, "write dataset_type=synthetic"),
  "activation": ({"mlp_activations": ["silu", "silu"]}, "mlp_activations=['silu', 'silu'] must be one of"),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(change, message):
  model = {} if "model_name" in change else TINY
  with pytest.raises(ConfigError) as error:
    load_config(**(model | change))
  assert message in str(error.value)


PLACEMENT_MISTAKES = {
  "mesh": ({"ici_tensor_parallelism": 3}, "does not multiply to the 8 devices per slice there are."),
  "two fills": ({"ici_data_parallelism": -1}, "at most one is -1"),
  "batch": ({"per_device_batch_size": 0.3}, "= 2.4 sequences, which is not a whole number above 0."),
  "batch split": ({"per_device_batch_size": 0.5}, "cannot be split over fsdp=8, 8 groups"),
  "kernel": ({"attention": "cudnn_flash_jax"}, "attention=cudnn_flash_jax does not run on cpu devices"),
  "remat turns": ({"remat_policy": "full,full,minimal"}, "repeats 2 layers, which is not a multiple of 3."),
  "absent axis": (
    {"mesh_axes": ["data", "fsdp"], "ici_tensor_parallelism": 4},
    "ici_tensor_parallelism=4 has no axis in mesh_axes=['data', 'fsdp']: set it to 1.",
  ),
  "batch axes": ({"per_device_batch_size": 1, "input_data_sharding_logical_axes": []}, "must name two dimensions"),
}


@pytest.mark.parametrize(("change", "message"), PLACEMENT_MISTAKES.values(), ids=PLACEMENT_MISTAKES.keys())
def test_placement_mistakes_are_named(change, message):
  with pytest.raises(ConfigError) as error:
    program(tiny(**change), devices=8)
  assert message in str(error.value)


NUMBERS = [
  key
  for key, info in MaxTextConfig.model_fields.items()
  if info.annotation in (int, float, int | float) and readers_of(key)
]


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, -7, 2**70, float("nan"), float("inf"), "many", None, [1]])
def test_odd_numbers_build_or_are_refused(key, value):
  """Whatever a number is set to, the answer is a model or one message, never a traceback."""
  with contextlib.suppress(ConfigError):
    config = load_config(**(TINY | {key: value}))
    if config.per_device_batch_size * config.gradient_accumulation_steps < 2**20:
      program(config, devices=8)


FILES = {
  "no mapping": ("[1, 2]", "must hold 'key: value' lines"),
  "not YAML": ("a: [", "is not valid YAML"),
  "not text": (b"\xff\xfe\x00", "is not valid YAML"),
  "key twice": ("steps: 1\nsteps: 2\n", "'steps' stands twice"),
  "key that is no word": ("1: 2\n", "'1' is not a key."),
  "its own base": ("base_config: it.yml\n", "leads back to itself"),
  "base that is not there": ("base_config: gone.yml\n", "Cannot read"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES.keys())
def test_files_with_mistakes_are_named(content, message, tmp_path):
  path = tmp_path / "it.yml"
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(ConfigError) as error:
    load_config(path)
  assert message in str(error.value)


def test_nothing_but_models_knows_a_family():
  source = Path(maxtext.__file__).parent
  names = {m.__name__.rsplit(".", 1)[1] for m in FAMILIES.values()}
  for path in source.rglob("*.py"):
    if path.relative_to(source).parts[0] not in ("models", "configs"):
      text = path.read_text().lower()
      assert not [n for n in names if n in text], path


def test_configuration_costs_no_jax():
  code = (
    "import sys, maxtext.cli.main as m; m.main(['config', 'show', 'llama2-7b', 'dataset_type=synthetic']);"
    "sys.exit('jax' in sys.modules)"
  )
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
