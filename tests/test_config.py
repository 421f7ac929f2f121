"""A run's configuration: layers, refusals, and what it costs to load."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.checkpoint.inspect import chosen
from maxtext.cli.main import main
from maxtext.configs.derived import derive
from maxtext.configs.loader import canonical_model_name, model_names, parse_assignments, values_and_origins
from maxtext.configs.readers import readers_of
from maxtext.configs.renamed_keys import RENAMED_KEYS
from maxtext.configs.types import DecoderBlockType, MaxTextConfig
from maxtext.configs.values import default_of
from maxtext.models.catalogue import entry
from tests.support import TINY, program, tiny

PARAMETERS = json.loads((Path(__file__).parent / "data" / "parameters.json").read_text())


def test_later_layers_win(tmp_path):
  (tmp_path / "base.yml").write_text("steps: 5\nlearning_rate: 0.5\ndataset_type: synthetic\n")
  (tmp_path / "mine.yml").write_text("base_config: base.yml\nlearning_rate: 0.25\nmodel_name: llama2-7b\n")
  config = load_config(tmp_path / "mine.yml", steps=7)
  assert (config.steps, config.learning_rate, config.base_emb_dim) == (7, 0.25, 4096)
  assert config.logical_axis_rules, "base.yml is the first layer"
  with pytest.raises(Exception, match="frozen"):
    config.steps = 8


def test_base_yml_is_the_base_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  package = Path(maxtext.__file__).parent / "configs"
  plain = load_config(dataset_type="synthetic")
  for name in ("base.yml", "maxtext/configs/base.yml", "src/MaxText/config/base.yaml", package / "base.yml"):
    assert load_config(name, dataset_type="synthetic") == plain
  for name in ("maxtext/configs/models/llama2-7b.yml", package / "models" / "llama2-7b.yml"):
    assert load_config(name, dataset_type="synthetic") == load_config("llama2-7b", dataset_type="synthetic")
  with pytest.raises(ConfigError, match=r"Cannot read configs/gone\.yml"):
    load_config("configs/gone.yml")
  with pytest.raises(ConfigError, match=r"Cannot read elsewhere/base\.yml"):
    load_config("elsewhere/base.yml")


def test_base_yml_does_not_beat_rules_and_models(tmp_path, monkeypatch):
  """Neither ours nor a copy of it that somebody edited."""
  monkeypatch.chdir(tmp_path)
  wanted = load_config("llama2-7b", custom_mesh_and_rule="fsdp", dataset_type="synthetic")
  assert wanted.logical_axis_rules != load_config(dataset_type="synthetic").logical_axis_rules
  named = {"custom_mesh_and_rule": "fsdp", "model_name": "llama2-7b"}
  assert load_config("base.yml", **named, dataset_type="synthetic") == wanted
  ours = (Path(maxtext.__file__).parent / "configs" / "base.yml").read_text()
  (tmp_path / "base.yml").write_text(f"{ours}\nsteps: 7\nbase_emb_dim: 64\ndataset_type: synthetic\n")
  (tmp_path / "mine.yml").write_text("base_config: base.yml\nlog_period: 3\n")
  assert load_config("base.yml", **named) == wanted.model_copy(update={"steps": 7})
  assert load_config("mine.yml", **named) == wanted.model_copy(update={"steps": 7, "log_period": 3})


def test_rules_of_a_user_change_the_table_by_name(tmp_path):
  base = load_config(dataset_type="synthetic").logical_axis_rules
  (tmp_path / "mine.yml").write_text(
    "dataset_type: synthetic\nlogical_axis_rules: [[vocab, [tensor]], [norm, [fsdp]]]\n"
  )
  changed = load_config(tmp_path / "mine.yml", logical_axis_rules=[["norm", []], ["mlp", "fsdp"]]).logical_axis_rules
  assert dict(changed) == dict(base) | {"vocab": ["tensor"], "norm": [], "mlp": "fsdp"}
  assert [name for name, _ in changed] == [name for name, _ in base]
  whole = load_config(tmp_path / "mine.yml", override_logical_axis_rules="true").logical_axis_rules
  assert whole == [["vocab", ["tensor"]], ["norm", ["fsdp"]]]
  over = load_config(custom_mesh_and_rule="fsdp", dataset_type="synthetic", logical_axis_rules=[["mlp", ["fsdp"]]])
  fsdp = load_config(custom_mesh_and_rule="fsdp", dataset_type="synthetic")
  assert dict(over.logical_axis_rules) == dict(fsdp.logical_axis_rules) | {"mlp": ["fsdp"]}
  values = {key: entry["value"] for key, entry in values_and_origins(fsdp, {}).items()}
  assert load_config(**chosen(values)).logical_axis_rules == fsdp.logical_axis_rules
  for odd in ("x", [1], [[]], [["norm"]], None, [["norm", []], ["norm", ["fsdp"]]]):
    with pytest.raises(ConfigError, match="logical_axis_rules"):
      program(tiny(logical_axis_rules=odd))


@pytest.mark.parametrize("name", PARAMETERS)
def test_named_models_have_their_parameters(name):
  found = entry(name)
  assert {"total": found.parameters, "active": found.active_parameters} == PARAMETERS[name]
  assert found.converts == (name != "deepseek-custom"), "nobody has published weights of that one"
  assert found.family == load_config(name, dataset_type="synthetic").decoder_block.value


def test_models_are_listed_and_drawn(capsys):
  assert main(["models", "gemma3-4b", "--json"]) == 0
  assert json.loads(capsys.readouterr().out) == [
    {
      "name": "gemma3-4b",
      "family": "gemma3",
      "parameters": 3880099328,
      "active_parameters": 3880099328,
      "context": 131072,
      "converts": True,
      "same_as": "",
    }
  ]
  assert main(["models", "gemma3-4b"]) == 0
  drawn = capsys.readouterr().out
  assert "layers 0..29, 5 rounds of\n  5 x\n" in drawn
  assert "layers 30..33\n  4 x\n" in drawn
  assert main(["models", "gemma3-5b"]) == 2
  assert "Did you mean 'gemma3-4b'" in capsys.readouterr().err


def test_names_of_one_model_say_so(capsys):
  """The specification names variants of execution that do not differ here."""
  same = {name: canonical_model_name(name) for name in model_names()}
  assert same["deepseek3-671b-2dfsdp"] == "deepseek3-671b"
  assert {same["deepseek3-671b"], same["deepseek3-671b-batchsplit"], same["gemma3-4b"]} == {""}
  assert main(["models", "deepseek3-671b-2dfsdp"]) == 0
  assert "\nthe same as deepseek3-671b, under another name\n" in capsys.readouterr().out


def test_every_name_is_known():
  assert sorted(model_names()) == sorted(PARAMETERS)


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
  "no list": (
    {"mlp_activations": "silu,linear"},
    "mlp_activations=silu,linear: input should be a valid list, such as [silu,linear]",
  ),
  "wrong type": ({"steps": "many"}, "steps=many: input should be a valid integer"),
  "out of bounds": ({"learning_rate": -1}, "learning_rate=-1: input should be greater than or equal to 0."),
  "unknown model": ({"model_name": "lama2-7b"}, "model_name=lama2-7b is not a known model. Did you mean 'llama2-7b'?"),
  "changed model": (
    {"model_name": "llama2-7b", "head_dim": 64},
    "head_dim=64 contradicts model_name=llama2-7b, which has head_dim=128. Add override_model_config=true",
  ),
  "profiler of older pages": (
    {"enable_profiler": True},
    "'enable_profiler' is not a key. It is a key of older versions: write profiler=xplane.",
  ),
  "layers of older pages": (
    {"num_layers": 2},
    "'num_layers' is not a key. It is a key of older versions: write base_num_dec",
  ),
  "batch of older pages": ({"global_batch_size": 2}, "of older versions: write per_device_batch_size"),
  "heads of older pages": ({"num_heads": 2}, "write base_num_query_heads and base_num_kv_heads"),
  "width of older pages": ({"emb_dim": 2}, "emb_dim=2 is not supported: it is computed from base_emb_dim"),
  "mesh of older pages": ({"ici_parallelism": [2]}, "write ici_data_parallelism, ici_fsdp_parallelism and so on."),
  "Pathways": ({"enable_single_controller": True}, "enable_single_controller=True is not supported: it needs Pathways"),
  "Pathways data": ({"colocated_python_data_input": True}, "not supported: it needs Pathways"),
  "scale": ({"global_parameter_scale": 3}, "global_parameter_scale=3 must be a power of two"),
  "kept in a bucket": (
    {"base_output_directory": "s3://a/b"},
    "base_output_directory=s3://a/b is in a store that Orbax",
  ),
  "read from a bucket": (
    {"load_parameters_path": "s3://a/b"},
    "load_parameters_path=s3://a/b is in a store that Orbax",
  ),
  "scaled model": (
    {"model_name": "llama2-7b", "global_parameter_scale": 2},
    "global_parameter_scale=2 contradicts model_name=llama2-7b",
  ),
  "heads": ({"base_num_kv_heads": 3}, "base_num_query_heads=4 is not a multiple of base_num_kv_heads=3"),
  "remat": ({"remat_policy": "ful"}, "'ful' must be one of full, minimal"),
  "base_config": ({"base_config": "x.yml"}, "base_config=x.yml belongs in a YAML file"),
  "moment": ({"mu_dtype": "int8"}, "mu_dtype=int8 must be one of bfloat16, float32, float16, or empty."),
  "tiling": ({"num_vocab_tiling": 5}, "num_vocab_tiling=5 must divide max_target_length=32."),
  "window": ({"attention_type": "local_sliding"}, "attention_type=local_sliding needs sliding_window_size above 0"),
  "positions": ({"trainable_position_size": 8}, "max_target_length=32 is more than trainable_position_size=8."),
  "kernel": ({"attention": "flsh"}, "Did you mean 'flash'?"),
  "nothing to grow": (
    {"dataset_type": "tfds", "enable_rampup_batch_size": True, "per_device_batch_size_start": 8},
    "must be above 0 and below per_device_batch_size=8",
  ),
  "activation": ({"mlp_activations": ["silu", "silu"]}, "mlp_activations=['silu', 'silu'] must be one of"),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(change, message):
  model = {} if "model_name" in change else TINY
  with pytest.raises(ConfigError) as error:
    load_config(**(model | change))
  assert message in str(error.value)


def test_what_is_always_so_may_be_asked_for():
  asked = {"float32_logits": True, "float32_qk_product": True, "use_jax_splash": True, "enable_nnx": True,
           "remove_size_one_mesh_axis_from_type": False, "shardy": True, "enable_autocheckpoint": True}  # fmt: skip
  config = load_config(**(TINY | asked), strict=True)
  assert all(getattr(config, key) == value for key, value in asked.items())
  with pytest.raises(ConfigError, match="shardy=False is not supported"):
    tiny(shardy=False)


def test_hints_name_keys_that_are_there():
  for older, instead in RENAMED_KEYS.items():
    assert older not in MaxTextConfig.model_fields
    named = re.findall(r"[a-z]\w*_\w+|\bdtype|\battention|\bquantization|\bprofiler", instead)
    assert named or "leave it out" in instead, older
    assert not set(named) - MaxTextConfig.model_fields.keys(), older


# Of heads and hidden widths, of the residual width, and of depth.
SCALES = {1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (4, 2, 2), 64: (4, 4, 4)}


@pytest.mark.parametrize("scale", SCALES)
def test_global_parameter_scale(scale):
  """The weights of the layers grow by the scale, and equal those of a model whose sizes are written out."""
  inner, width, depth = SCALES[scale]
  sizes = {"base_mlp_dim": inner, "base_num_query_heads": inner, "base_num_kv_heads": inner, "base_emb_dim": width,
           "base_num_decoder_layers": depth}  # fmt: skip
  written = {key: TINY[key] * factor for key, factor in sizes.items()}
  shapes, expected, base = (
    {path: value.shape for path, value in program(tiny(**change)).state.params.items()}
    for change in ({"global_parameter_scale": scale}, written, {})
  )
  assert shapes == expected
  grown, before = (
    sum(math.prod(shape) for path, shape in found.items() if path.startswith("groups/") and path.endswith("/weight"))
    for found in (shapes, base)
  )
  assert grown == scale * before > 0
  assert derive(tiny(global_parameter_scale=scale), 8).emb_dim == written["base_emb_dim"]


PLACEMENT_MISTAKES = {
  "key of another family": ({"global_head_dim": 16}, "global_head_dim=16 has no effect here, on decoder_block=llama2"),
  "window without effect": ({"sliding_window_size": 8}, "sliding_window_size=8 has no effect here"),
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


ODD = (0, -1, -7, 2**70, float("nan"), float("inf"), "many", None, [1])


@pytest.mark.parametrize("key", NUMBERS)
def test_odd_numbers_build_or_are_refused(key):
  """Whatever a number is set to, the answer is a model or one message, never a traceback."""
  for value in ODD:
    try:
      config = load_config(**(TINY | {key: value}))
      if config.per_device_batch_size * config.gradient_accumulation_steps < 2**20:
        program(config, devices=8)
    except ConfigError:
      pass
    except Exception as error:
      error.add_note(f"{key}={value}")
      raise


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


def test_nothing_but_its_file_knows_a_family():
  """A family's name stands in its own file, in the specification's list of names, and in the models' YAML."""
  source = Path(maxtext.__file__).parent
  name = re.compile(rf"\b({'|'.join(block.value for block in DecoderBlockType)})\b", re.IGNORECASE)
  allowed = {source / "configs" / name for name in ("keys.py", "types/enums.py", "types/model.py", "types/run.py")}
  for path in set(source.rglob("*.py")) - allowed:
    if path.parent != source / "models/families":
      assert not name.findall(path.read_text()), path


def test_configuration_costs_no_jax():
  code = (
    "import sys, maxtext.cli.main as m; m.main(['config', 'show', 'llama2-7b', 'dataset_type=synthetic']);"
    "sys.exit('jax' in sys.modules)"
  )
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_text_on_a_command_line_is_taken_as_it_is():
  words = ["prompt=def f(x): # why", "prompt=12", 'prompt="a\\tb"', "prompt= the", "run_name=first", "steps=1e3"]
  assert [parse_assignments([word]) for word in words] == [
    {"prompt": "def f(x): # why"},
    {"prompt": "12"},
    {"prompt": "a\tb"},
    {"prompt": " the"},
    {"run_name": "first"},
    {"steps": "1e3"},
  ]


@pytest.mark.parametrize("name", ["default", "deepseek3-671b", "gemma3-4b", "gpt-oss-20b"])
def test_the_values_of_a_run_make_its_configuration_again(name):
  """Also where a model's own key was set back to what it is without a model."""
  own = {key: default_of(key) for key in ("n_routing_groups", "topk_routing_group", "final_logits_soft_cap")}
  config = load_config(name, dataset_type="synthetic", override_model_config=True, **own)
  recorded = json.dumps(values_and_origins(config, {}), default=str)
  values = {key: entry["value"] for key, entry in json.loads(recorded).items()}
  assert load_config(**chosen(values)) == config


def test_a_run_outlives_its_file_of_rules(tmp_path):
  file = tmp_path / "rules.yml"
  file.write_text("mesh_axes: [data, fsdp]\n")
  config = load_config(custom_mesh_and_rule=str(file), dataset_type="synthetic")
  values = {key: entry["value"] for key, entry in values_and_origins(config, {}).items()}
  file.unlink()
  assert load_config(**chosen(values)).mesh_axes == ["data", "fsdp"]
