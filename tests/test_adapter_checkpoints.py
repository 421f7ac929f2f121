"""Checkpoints of LoRA runs: adapters alone, with the fingerprint of the base that they were trained on."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file

import maxtext
from maxtext import ConfigError
from maxtext.checkpoint.inspect import describe
from maxtext.checkpoint.location import locate
from maxtext.checkpoint.metadata import CheckpointMetadata
from maxtext.checkpoint.options import restore_options
from maxtext.checkpoint.restore import resume
from maxtext.inference.resolve import resolve_model
from maxtext.layers.lora import LoraMatmul, adapted_module, is_adapter
from maxtext.weights.base import load_base
from maxtext.weights.load import load_weights
from maxtext.weights.resolve import resolve_source
from tests.support import TINY, program, tiny
from tests.test_lora import checkpoint

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "learning_rate": 3e-2, "warmup_steps_fraction": 0.0}
RUN = LORA | {
  "steps": 4, "learning_rate_schedule_steps": 4, "per_device_batch_size": 1, "enable_checkpointing": True,
  "checkpoint_period": 2, "enable_tensorboard": False
}  # fmt: skip
LAYOUTS = {"checkpoint": "orbax", "folder": "safetensors"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
  """One base as parameters and as a Hugging Face folder."""
  path = tmp_path_factory.mktemp("bases")
  params, _ = jax.jit(program(tiny()).model.init)(0)
  checkpoint(path / "checkpoint", tiny(), params)
  maxtext.convert(path / "checkpoint", path / "folder", to="huggingface", dataset_type="synthetic")
  return path


def keys_of(bases, kind, folder, **changes):
  path = {"load_parameters_path": str(bases / kind), "source_checkpoint_layout": LAYOUTS[kind]}
  return RUN | path | {"base_output_directory": str(folder), "run_name": "run"} | changes


def train(bases, kind, folder, **changes):
  return maxtext.train(tiny(**keys_of(bases, kind, folder, **changes)))


def arrays(state):
  return {name: np.asarray(value) for name, value in (state.params | state.buffers).items()}


def same(found, expected):
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(np.asarray(found[name]), value, err_msg=name)


def size(folder):
  return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def metadata(run):
  return CheckpointMetadata.read(locate(str(run)))


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request, bases, tmp_path_factory):
  """A run of four steps from each kind of base, with steps 2 and 4."""
  folder = tmp_path_factory.mktemp("trained")
  return request.param, folder / "run", arrays(train(bases, request.param, folder))


def test_a_checkpoint_holds_adapters_alone(bases, trained):
  kind, run, state = trained
  found = metadata(run)
  assert all(is_adapter(path) for path in found.parameters), sorted(found.parameters)
  assert found.base.path == str(bases / kind)
  assert found.base.arrays.keys() == {name for name in state if not is_adapter(name)}
  base = sum(value.nbytes for name, value in state.items() if not is_adapter(name))
  held = sum(array.bytes for array in found.arrays.values())
  assert held < 3.1 * sum(value.nbytes for name, value in state.items() if is_adapter(name)), "with two moments"
  text = describe(str(run))
  assert f"base: {bases / kind}\n" in text
  assert f"{base:,} bytes, fingerprint {found.base.fingerprint}" in text


def test_both_kinds_of_one_base_have_one_fingerprint(bases, trained):
  _, run, _ = trained
  config = tiny(load_parameters_path=str(bases / "checkpoint"))
  model = program(config, 4).model
  from maxtext.weights.base import describe_base

  found = describe_base(str(bases / "checkpoint"), load_weights(config, model, model.params))
  assert found.fingerprint == metadata(run).base.fingerprint, "on four devices and on eight"


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(bases, trained, tmp_path):
  kind, run, expected = trained
  shutil.copytree(run, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
  same(arrays(train(bases, kind, tmp_path)), expected)


@pytest.mark.parametrize("mesh", [{"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}, {"scan_layers": False}])
def test_another_mesh_goes_on_from_the_same_state(mesh, bases, trained):
  kind, run, expected = trained
  config = tiny(**keys_of(bases, kind, run.parent, **mesh))
  p = program(config, 4)
  load = lambda *args: load_base(config, p.model, *args)  # noqa: E731
  same(arrays(resume(restore_options(config), epath.Path(run / "checkpoints"), p.state, load).state), expected)


def test_what_reads_a_run_finds_its_base(trained, tmp_path):
  _, run, expected = trained
  config = resolve_model(str(run), {})
  model = program(config).model
  same(load_weights(config, model, model.params | model.buffers), expected)
  lora, whole = LoraMatmul(scale=2.0), {name: value for name, value in expected.items() if not is_adapter(name)}
  for module in {adapted_module(name) for name in expected if is_adapter(name)}:
    weight, adapter = f"{module}/weight", (expected[path] for path in lora.paths(module))
    whole[weight] = lora.merge(whole[weight], model.contracted[weight][0], *adapter)
  config = resolve_source(str(maxtext.convert(run, tmp_path / "merged")), {"dtype": "float32"}).config
  model = program(config).model
  same(load_weights(config, model, model.params), whole)
  adapter = load_file(maxtext.convert(run, tmp_path / "peft", to="peft") / "adapter_model.safetensors")
  assert adapter["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 80)
  exported = tmp_path / "exported"
  subprocess.run(
    [sys.executable, "-m", "maxtext.cli", "checkpoint", "export-params", str(run), str(exported), "force_unroll=true"],
    check=True,
  )
  config = resolve_model(str(exported), {})
  same(load_weights(config, model := program(config).model, model.params | model.buffers), expected)
  text = (tmp_path / "merged" / "config.json").read_text()
  assert "lora" not in text


def test_evaluation_finds_the_base(bases, trained, tmp_path):
  _, run, _ = trained
  found = maxtext.evaluate(run, eval_steps=1)["loss"]
  whole = maxtext.convert(run, tmp_path / "merged")
  keys = {key: (TINY | RUN)[key] for key in ("max_target_length", "per_device_batch_size", "dtype", "jax_cache_dir")}
  expected = maxtext.evaluate(whole, eval_steps=1, dataset_type="synthetic", **keys)["loss"]
  assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_run_from_adapters_names_the_base_of_both(bases, trained, tmp_path):
  _, run, expected = trained
  first = shutil.copytree(run, tmp_path / "first")
  keys = {key: RUN[key] for key in ("steps", "enable_checkpointing", "checkpoint_period", "per_device_batch_size")}
  own = keys | {"base_output_directory": str(tmp_path), "run_name": "second", "dataset_type": "synthetic"}
  config = resolve_source(str(first), own | {"max_target_length": 32, "jax_cache_dir": ""}).config
  whole = arrays(maxtext.train(config))
  assert metadata(tmp_path / "second").base == metadata(run).base
  for name, value in expected.items():
    assert np.array_equal(whole[name], value) == (not is_adapter(name)), name
  shutil.rmtree(first)
  shutil.rmtree(tmp_path / "second" / "checkpoints" / "4")
  same(arrays(maxtext.train(config)), whole)
  config = config.model_copy(update={
    "load_full_state_path": str(run), "load_parameters_path": "", "run_name": "third", "steps": 5,
  })  # fmt: skip
  maxtext.train(config)
  assert metadata(tmp_path / "third").base == metadata(run).base


def test_a_base_that_is_gone_or_another_is_named(bases, trained, tmp_path):
  kind, run, expected = trained
  own = tmp_path / "bases"
  shutil.copytree(bases / kind, own / kind)
  train(own, kind, tmp_path, steps=2)
  run = tmp_path / "run"
  moved = (own / kind).rename(tmp_path / "moved")
  gone = rf"checkpoints/2 holds LoRA adapters, and their base {own / kind} is gone: put it back there, or a link to it"
  for read in (
    lambda: train(own, kind, tmp_path),
    lambda: maxtext.convert(run, tmp_path / "merged"),
    lambda: maxtext.evaluate(run, eval_steps=1),
    lambda: load_weights(config := resolve_model(str(run), {}), m := program(config).model, m.params | m.buffers),
  ):
    with pytest.raises(ConfigError, match=gone):
      read()
  maxtext.convert(run, tmp_path / "peft", to="peft")
  state = train(own, kind, tmp_path, steps=3, load_parameters_path=str(moved))
  assert metadata(run).base.path == str(moved)
  same(
    {n: v for n, v in arrays(state).items() if not is_adapter(n)},
    {n: v for n, v in expected.items() if not is_adapter(n)},
  )
  shutil.rmtree(moved)
  others, _ = jax.jit(program(tiny()).model.init)(1)
  checkpoint(moved, tiny(), others)
  if kind == "folder":
    maxtext.convert(moved, tmp_path / "again", dataset_type="synthetic")
    shutil.rmtree(moved)
    (tmp_path / "again").rename(moved)
  for read in (lambda: train(own, kind, tmp_path), lambda: maxtext.convert(run, tmp_path / "merged")):
    with pytest.raises(ConfigError, match=rf"{moved} is not the base .*3 were trained on: .* and \d+ more differ"):
      read()
  assert not (tmp_path / "merged").exists()


def test_a_base_that_no_folder_has_is_kept(bases, tmp_path):
  state = arrays(maxtext.train(tiny(**RUN | {"base_output_directory": str(tmp_path), "run_name": "run", "steps": 1})))
  found = metadata(tmp_path / "run")
  assert found.base is None
  assert set(found.parameters) == set(state), "another release of JAX may make other values of the seed"
