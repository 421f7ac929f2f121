"""Checkpoints of LoRA runs: adapters alone, with the fingerprint of the base that they were trained on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file

import maxtext
from maxtext import LLM, ConfigError, SamplingParams
from maxtext.checkpoint.inspect import describe
from maxtext.checkpoint.location import locate, steps_in
from maxtext.checkpoint.metadata import CheckpointMetadata
from maxtext.checkpoint.options import restore_options
from maxtext.checkpoint.restore import resume
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.inference.resolve import resolve_model
from maxtext.layers.lora import LoraMatmul, adapted_module, is_adapter
from maxtext.training.callbacks.base import Callback
from maxtext.weights.base import describe_base, load_base
from maxtext.weights.load import load_weights
from maxtext.weights.resolve import resolve_source
from tests.flags import flags
from tests.support import TINY, program, tiny
from tests.test_lora import checkpoint
from tests.test_sft import folder as sft_data
from tests.test_sft import sft_keys

__all__ = ["sft_data"]  # a fixture

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
  found = describe_base(str(bases / "checkpoint"), load_weights(config, model, model.params))
  assert found.fingerprint == metadata(run).base.fingerprint, "on four devices and on eight"


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(bases, trained, tmp_path):
  kind, run, expected = trained
  shutil.copytree(run, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
  same(arrays(train(bases, kind, tmp_path)), expected)


@pytest.mark.parametrize(
  "mesh",
  [
    {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    pytest.param({"scan_layers": False}, marks=pytest.mark.nightly),
  ],
)
def test_another_mesh_goes_on_from_the_same_state(mesh, bases, trained):
  kind, run, expected = trained
  config = tiny(**keys_of(bases, kind, run.parent, **mesh))
  p = program(config, 4)
  load = lambda *args: load_base(config, p.model, *args)  # noqa: E731
  same(arrays(resume(restore_options(config), epath.Path(run / "checkpoints"), p.state, load).state), expected)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.chaos
def test_killed_between_saves_it_ends_with_the_same_bits(bases, trained, tmp_path):
  kind, _, expected = trained
  words = [f"{key}={value}" for key, value in (TINY | keys_of(bases, kind, tmp_path)).items()]
  command = [sys.executable, "-m", "tests.run_worker", "killed", "3", str(tmp_path / "run" / "checkpoints" / "2")]
  done = subprocess.run([*command, *words], env=os.environ | flags(8), timeout=300, check=False)
  assert done.returncode == -signal.SIGKILL
  assert steps_in(epath.Path(tmp_path / "run" / "checkpoints")) == [2]
  same(arrays(train(bases, kind, tmp_path)), expected)


class FillDisk(Callback):
  """Leaves a full disk before the second save."""

  def __init__(self, folder):
    self._folder = folder

  def due(self, step):
    return step == 3

  def on_update(self, step, state, position, figures):
    while not (self._folder / "2").exists():
      time.sleep(0.01)
    (self._folder / "rubbish").write_bytes(b"x" * (shutil.disk_usage(self._folder).free - 8192))


@pytest.mark.nightly
@pytest.mark.chaos
def test_a_full_disk_costs_one_save(bases, trained, tmp_path):
  kind, _, expected = trained
  if kind != "folder":
    pytest.skip("once is enough")
  steps = tmp_path / "run" / "checkpoints"
  steps.mkdir(parents=True)
  if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(steps)], check=False).returncode:
    pytest.skip("a small disk needs the right to mount one")
  try:
    config = tiny(**keys_of(bases, kind, tmp_path))
    with pytest.raises(RunError, match=r"ended at step 4, and its last state could not be saved"):
      maxtext.train(config, callbacks=[FillDisk(steps)])
    assert steps_in(epath.Path(steps)) == [2]
    (steps / "rubbish").unlink()
    same(arrays(maxtext.train(config)), expected)
  finally:
    subprocess.run(["umount", str(steps)], check=True)


@pytest.mark.nightly
@pytest.mark.mesh
def test_two_processes_and_then_one(bases, tmp_path):
  """Each process reads its part of the base, and both add up its fingerprint."""
  keys = TINY | keys_of(bases, "folder", tmp_path, ici_fsdp_parallelism=4, per_device_batch_size=2)
  words = [f"{key}={value}" for key, value in keys.items()]

  def train_on(processes, devices):
    launch = ["launch", "--processes", str(processes), "--devices", str(devices), "--"]
    done = subprocess.run(
      [sys.executable, "-m", "maxtext.cli", *launch, "train", *words],
      env=os.environ | flags(devices), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, [line["loss"] for line in lines], metadata(run).base

  _, expected, base = train_on(2, 2)
  assert base.checksums == checksums_of_base(bases)
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
  said, losses, again = train_on(1, 4)
  assert "resuming from" in said
  assert (losses, again) == (expected, base)


def checksums_of_base(bases):
  config = tiny(load_parameters_path=str(bases / "checkpoint"))
  model = program(config).model
  return describe_base(str(bases / "checkpoint"), load_weights(config, model, model.params)).checksums


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_student_of_adapters_names_its_base_unless_its_teacher_changed_it(copied, bases, tmp_path):
  teacher = {"load_parameters_path": str(bases / "checkpoint")}
  keys = keys_of(bases, "folder", tmp_path, teacher_overrides=teacher, steps=2)
  paths = {"groups/0/layers/0/mixer/query": "groups/0/layers/0/mixer/query"} if copied else {}
  state = maxtext.train(tiny(**keys, distill_weights_copy_map=paths))
  found = metadata(tmp_path / "run")
  assert (found.base is None) == copied
  assert all(map(is_adapter, state.params))
  assert all(is_adapter(path) for path in found.parameters) == (not copied)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_commands_from_fine_tuning_to_a_server(sft_data, tmp_path, monkeypatch, capsys):
  """Decode finds the base, and what the server answers from adapters alone is what merged weights answer."""
  monkeypatch.chdir(tmp_path)
  sizes = [f"{key}={value}" for key, value in sft_keys(sft_data, per_device_batch_size=1).items()]
  own = ["enable_checkpointing=true", f"base_output_directory={tmp_path}/runs", "enable_tensorboard=false"]
  assert main(["train", *sizes, *own, "run_name=base", "use_sft=false", "dataset_type=synthetic", "steps=1"]) == 0
  kept = [word for word in sizes if word.split("=")[0] not in MODEL_KEYS]
  words = [*kept, *own, "run_name=chat", "steps=3", "lora_rank=4", "learning_rate=0.05"]
  assert main(["sft", "runs/base", *words]) == 0
  assert all(map(is_adapter, metadata("runs/chat").parameters))
  assert main(["convert", "to-hf", "runs/chat", "merged"]) == 0
  capsys.readouterr()
  asked = ["max_prefill_predict_length=64", "max_target_length=96", "jax_cache_dir=", "dtype=float32", "prompt=the one"]
  texts = []
  for source in ("runs/chat", "runs/base"):
    assert main(["decode", source, *asked, "decode_sampling_strategy=greedy", "--max-tokens", "8"]) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0] != texts[1]
  keys = {"max_prefill_predict_length": 64, "max_target_length": 96, "jax_cache_dir": "", "dtype": "float32"}
  expected = LLM("merged", **keys).generate(["the one"], SamplingParams(temperature=0.0, max_tokens=8))[0].text
  process = subprocess.Popen(
    [sys.executable, "-m", "maxtext.cli", "serve", "runs/chat", *asked[:-1], "per_device_batch_size=1", "--port=0"],
    stdout=subprocess.PIPE, text=True, env=os.environ | flags(),
  )  # fmt: skip
  try:
    address = re.search(r"http://\S+", process.stdout.readline())[0]
    question = {"model": "chat", "prompt": "the one", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
      f"{address}/v1/completions", json.dumps(question).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
      assert json.loads(answer.read())["choices"][0]["text"] == expected
  finally:
    process.kill()
    process.wait()


MODEL_KEYS = (
  "vocab_size", "base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads",
  "head_dim", "normalization_layer_epsilon", "rope_type", "rope_max_timescale", "rope_factor",
  "original_max_position_embeddings", "base_output_directory", "enable_checkpointing", "enable_tensorboard", "use_sft",
)  # fmt: skip


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"lora_alpha": 4.0}, r"lora_alpha=4\.0 contradicts .*, whose adapters were trained with 8\.0: leave it out"),
    pytest.param({"use_rslora": True}, "use_rslora=True contradicts .* trained with False", marks=pytest.mark.nightly),
    pytest.param({"use_dora": True}, "use_dora=True contradicts .* trained with False", marks=pytest.mark.nightly),
    pytest.param(
      {"lora_rank": 2},
      "lora_rank=2 contradicts .* with 4: leave it out. New adapters start from merged",
      marks=pytest.mark.nightly,
    ),
  ],
)
def test_other_keys_than_adapters_were_trained_with_are_named(keys, message, bases, trained, tmp_path):
  kind, run, _ = trained
  given = {"dataset_type": "synthetic", "per_device_batch_size": 1, "max_target_length": 32, "jax_cache_dir": ""}
  config = resolve_source(str(run), given | keys).config
  with pytest.raises(ConfigError, match=message):
    load_weights(config, model := program(config).model, model.params | model.buffers)
  shutil.copytree(run, tmp_path / "run")
  with pytest.raises(ConfigError, match=message):
    train(bases, kind, tmp_path, **keys | {"steps": 5})


class StopError(Exception):
  """Ends a conversion in the middle."""


def stop(count, all_count, size, all_size):
  if 2 * size > all_size:
    raise StopError


@pytest.mark.slow
def test_a_merge_at_another_strength_does_not_go_on_with_the_first(trained, tmp_path):
  _, run, _ = trained
  with pytest.raises(StopError):
    maxtext.convert(run, tmp_path / "merged", shard_gigabytes=2e-5, progress=stop)
  with pytest.raises(ConfigError, match="was begun from something else"):
    maxtext.convert(run, tmp_path / "merged", shard_gigabytes=2e-5, lora_alpha=4.0)
  parts = maxtext.convert(run, tmp_path / "merged", shard_gigabytes=2e-5)
  whole = maxtext.convert(run, tmp_path / "whole", shard_gigabytes=2e-5)
  for file in whole.glob("*.safetensors"):
    assert file.read_bytes() == (parts / file.name).read_bytes(), file.name


@pytest.mark.nightly
def test_local_checkpoints_hold_everything_and_the_next_one_names_the_base(bases, trained, tmp_path):
  kind, run, expected = trained
  local = {
    "enable_emergency_checkpoint": True, "local_checkpoint_directory": str(tmp_path / "local"),
    "local_checkpoint_period": 1,
  }  # fmt: skip
  train(bases, kind, tmp_path, steps=3, save_checkpoint_on_completion=False, **local)
  assert steps_in(epath.Path(tmp_path / "run" / "checkpoints")) == [2]
  same(arrays(train(bases, kind, tmp_path, **local)), expected)
  assert metadata(tmp_path / "run").base == metadata(run).base
  assert all(map(is_adapter, metadata(tmp_path / "run").parameters))
