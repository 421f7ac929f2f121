"""The names of the specification: its commands as real processes, its functions, and its derived values."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

import maxtext
from maxtext import load_config
from maxtext.cli.forwarding import FORWARDED
from maxtext.configs import pyconfig
from maxtext.configs.derived import derive, with_devices
from maxtext.configs.types import DerivedValues, MaxTextConfig, get_individual_scales
from maxtext.data.batch_size_rampup import batch_size_schedule
from maxtext.data.options import data_options
from tests.flags import flags
from tests.support import program, tiny


def _python(*words, cwd):
  command = [sys.executable, "-m", *words]
  env = os.environ | flags()
  return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=400, check=False)


@pytest.mark.slow
def test_the_commands_of_the_specification_work(tmp_path):
  """As its pages write them, from a folder that has none of the files."""
  small = ["base_emb_dim=64", "base_mlp_dim=64", "base_num_decoder_layers=1", "vocab_size=256", "max_target_length=32",
           "per_device_batch_size=1", "dataset_type=synthetic", "jax_cache_dir="]  # fmt: skip
  asked = {
    "maxtext.trainers.pre_train.train": ["base.yml", "run_name=mine", "steps=2", *small],
    "maxtext.train": ["maxtext/configs/tpu_smoke_test.yml", "run_name=debug_test", "steps=2", "jax_cache_dir="],
    "maxtext.train_compile": ["base.yml", *small, "--json"],
    "maxtext.standalone_dataloader": ["MaxText/configs/base.yml", *small, "--seconds", "0.2"],
    "maxtext.sft_trainer": ["MaxText/configs/sft.yml", "run_name=nothing", "use_sft=True"],
    "maxtext.decode": ["maxtext/configs/inference.yml", "run_name=nothing"],
    "maxtext.inference.decode": ["maxtext/configs/inference.yml", "run_name=nothing"],
  }
  assert asked.keys() == FORWARDED.keys()
  with ThreadPoolExecutor(2) as pool:
    done = dict(zip(asked, pool.map(lambda item: _python(item[0], *item[1], cwd=tmp_path), asked.items()), strict=True))
  trained = done["maxtext.trainers.pre_train.train"]
  assert trained.returncode == 0, trained.stderr
  assert "step 2/2  loss" in trained.stdout
  assert (tmp_path / "runs" / "mine" / "checkpoints" / "2").is_dir()
  smoke = done["maxtext.train"]
  assert (smoke.returncode, "step 2/2  loss" in smoke.stdout) == (0, True), smoke.stderr
  assert done["maxtext.standalone_dataloader"].stdout.startswith("as configured: "), done
  refused = done["maxtext.train_compile"]
  assert (refused.returncode, "compile_topology" in refused.stderr) == (2, True), refused
  without_data = done["maxtext.sft_trainer"]
  assert (without_data.returncode, "needs grain_train_files" in without_data.stderr) == (2, True), without_data
  for untrained in (done["maxtext.decode"], done["maxtext.inference.decode"]):
    assert (untrained.returncode, untrained.stdout) == (2, ""), untrained
    assert len(untrained.stderr.splitlines()) == 1


def test_a_run_is_found_by_its_name(tmp_path, monkeypatch):
  from maxtext.cli.decode import _with_folder

  monkeypatch.chdir(tmp_path)
  (tmp_path / "runs" / "first").mkdir(parents=True)
  words = ["maxtext/configs/inference.yml", "run_name=first", "prompt=a"]
  assert _with_folder(words) == ["runs/first", "prompt=a"]
  assert _with_folder(words[1:]) == ["runs/first", "prompt=a"]
  for other in (["mine.yml", "run_name=first"], ["inference.yml", "run_name=gone"], ["inference.yml"],
                ["run_name=first", "load_parameters_path=x"], []):  # fmt: skip
    assert _with_folder(other) == other


def test_every_forwarding_module_is_in_the_table():
  source = Path(maxtext.__file__).parent
  files = [path for path in source.rglob("*.py") if "import forward\n" in path.read_text()]
  names = {".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__main__") for path in files}
  assert names == FORWARDED.keys()
  page = (Path(__file__).parents[1] / "docs" / "coming-from-maxtext.md").read_text()
  assert [name for name in FORWARDED if f"`python -m {name}" not in page] == []


def test_train_is_a_function_and_not_a_module(tmp_path):
  """Importing the package imports no JAX, and nothing can put the module of `python -m maxtext.train` in its place."""
  code = """
import sys, maxtext
assert "jax" not in sys.modules
from maxtext import train
assert train is maxtext.train and type(train).__name__ == "function", train
try:
  import maxtext.train
except ImportError as error:
  assert "maxtext.train(config)" in str(error), error
else:
  sys.exit("the submodule was imported")
import maxtext.rl.run
assert maxtext.train is maxtext.rl.run.train
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
  assert done.returncode == 0, done.stderr


def test_individual_scales():
  assert [get_individual_scales(2**i) for i in range(5)] == [
    (1, 1, 1, 1), (1, 2, 2, 1), (2, 2, 2, 1), (2, 2, 2, 2), (2, 4, 4, 2),
  ]  # fmt: skip
  with pytest.raises(ValueError, match="power of two"):
    get_individual_scales(3)


def test_initialize_knows_the_devices(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("M_BASE_EMB_DIM", "64")
  words = ["train.py", "base.yml", "run_name=it", "global_parameter_scale=8", "per_device_batch_size=2"]
  config = pyconfig.initialize(words, dataset_type="synthetic", gradient_accumulation_steps=2)
  count = jax.device_count()
  assert (config.emb_dim, config.num_decoder_layers, config.num_query_heads) == (128, 32, 32)
  assert (config.num_target_devices, config.global_batch_size_to_train_on) == (count, 4 * count)
  assert config.micro_batch_size_to_train_on == 2 * count
  assert config.ici_parallelism[config.mesh_axes.index("fsdp")] == count
  assert (config.checkpoint_dir, config.tensorboard_dir) == ("runs/it/checkpoints/", "runs/it/tensorboard/")
  assert all(hasattr(config, key) for key in DerivedValues.model_fields)
  assert config.model_dump().keys() == MaxTextConfig.model_fields.keys()


def test_what_devices_decide_is_not_there_without_them():
  config = tiny(global_parameter_scale=4)
  assert (config.emb_dim, config.using_pipeline_parallelism, config.managed_mldiagnostics_dir) == (96, False, None)
  for key in ("num_target_devices", "global_batch_size_to_load", "checkpoint_dir"):
    with pytest.raises(AttributeError, match=rf"config\.{key} follows from devices or a run_name"):
      getattr(config, key)
  known = with_devices(config, devices=4)
  assert (known.global_batch_size_to_load, known.context_parallel_size, known.num_diloco_replicas) == (32, 1, 1)
  assert not hasattr(known, "checkpoint_dir"), "a run without a name has no folder yet"
  assert program(config).config.num_target_devices == 1
  assert MaxTextConfig().emb_dim is None, "as specified, before keys were resolved"
  assert load_config(**{"dataset_type": "synthetic", "steps": 3}) == load_config(steps=3, dataset_type="synthetic")


def test_derived_values_of_a_growing_batch_are_those_of_the_feed():
  keys = {"dataset_type": "tfds", "enable_rampup_batch_size": True, "per_device_batch_size_start": 2,
          "per_device_batch_size_increment": 3, "global_rampup_samples": 100}  # fmt: skip
  config = tiny(**keys)
  sizes, values = batch_size_schedule(data_options(config).rampup, 16), derive(config, devices=2)
  assert values.rampup_end_step == sizes.starts[-1]
  assert values.global_batch_size_to_load_start == sizes.rows[0]
  assert values.global_batch_size_to_load_increment == sizes.rows[1] - sizes.rows[0]
  assert values.rampup_samples_per_increment_to_load == 50
