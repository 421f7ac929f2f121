"""Checkpoints in one process: what comes back is what was saved, or the run says why not."""

import gc
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from etils import epath

import maxtext
from maxtext import ConfigError, load_config
from maxtext.checkpoint.checksum import added, checksums
from maxtext.checkpoint.files import _groups, read
from maxtext.checkpoint.location import steps_in
from maxtext.checkpoint.record import Record
from maxtext.checkpoint.restore import load_parameters, load_state, resume
from maxtext.checkpoint.tree import named
from maxtext.checkpoint.writer import Writer
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.mesh.interrupt import Interrupt
from maxtext.train.callbacks.base import Callback
from maxtext.train.callbacks.guard import LossGuard
from maxtext.train.callbacks.save import Save
from maxtext.train.kept import Kept
from maxtext.train.loop import run_loop
from tests.support import TINY, History, program, tiny

SPLIT = {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1, "steps": 14}
MAXTEXT = str(Path(sys.executable).with_name("maxtext"))


@pytest.fixture(autouse=True)
def nothing_left(caplog):
  """Orbax logs a failed save with its frames, whose coroutines complain when they are collected; if that happens while
  Python 3.11 parses a module, the parser fails. So no frames are kept, and what is left is collected here."""
  caplog.set_level(logging.CRITICAL + 1, "absl")
  yield
  gc.collect()


class EndAfter(Callback):
  """Ends the run at a step, as a lost machine would, but for the file that the test needs."""

  def __init__(self, step):
    self._step = step

  def due(self, step):
    return step == self._step

  def on_update(self, step, state, position, figures):
    return True


def run_in(folder, *callbacks, **changes):
  history = History()
  keys = {"enable_checkpointing": True, "base_output_directory": str(folder), "run_name": "run"}
  state = maxtext.train(tiny(**(SPLIT | keys | changes)), [history, *callbacks])
  return state, history.losses


def equal(one, other):
  one, other = named(one), named(other)
  return one.keys() == other.keys() and all(np.array_equal(np.asarray(one[n]), np.asarray(other[n])) for n in one)


@pytest.fixture(scope="module")
def split():
  """The program on eight devices, compiled once."""
  return program(tiny(**SPLIT), 8)


@pytest.fixture(scope="module")
def whole(split):
  """A run that nothing interrupts."""
  history = History()
  return run_loop(split.step, split.init(), split.feed(), range(14), [history]), history.losses


def drive(folder, state, *callbacks, steps=range(4), **changes):
  """The callback that saves, as the loop calls it, with a state that stays the same."""
  config = tiny(**SPLIT | {"enable_checkpointing": True} | changes)
  writer, guard = Writer(config, epath.Path(folder), {}), LossGuard(on_nan=True, on_inf=True)
  save = Save(writer, Interrupt(), guard, config.save_checkpoint_on_completion)
  rest = state, lambda: {"batches": np.array(1)}
  try:
    for step in steps:
      for callback in (save, *callbacks):
        if callback.due(step + 1):
          callback.on_update(step + 1, *rest, {"loss": 1.0})
    save.on_end(steps.stop, *rest)
  finally:
    save.close()


@pytest.fixture(scope="module")
def half(tmp_path_factory):
  """The folder of the same run, ended after four steps, with steps 2 and 4; and the state it ended with."""
  folder = tmp_path_factory.mktemp("half")
  state, losses = run_in(folder, EndAfter(4), checkpoint_period=2)
  assert steps_in(epath.Path(folder / "run" / "checkpoints")) == [2, 4]
  return folder, state, losses


@pytest.fixture
def copy(half, tmp_path):
  """A copy of that folder, to spoil."""
  shutil.copytree(half[0] / "run", tmp_path / "run")
  return tmp_path


def test_a_run_of_the_same_name_goes_on_bit_for_bit(whole, half, copy, capsys):
  state, losses = run_in(copy, checkpoint_period=100)
  assert "goes on from" in capsys.readouterr().out
  assert equal(state, whole[0])
  np.testing.assert_array_equal(np.concatenate([half[2], losses]), whole[1])
  lines = [json.loads(line) for line in (copy / "run" / "metrics.jsonl").read_text().splitlines()]
  assert [line["step"] for line in lines] == list(range(1, 15)), "no step stands twice"
  again, none = run_in(copy)
  assert equal(again, state)
  assert len(none) == 0, "a finished run has nothing to do"


MESHES = {
  "fsdp 2 x tensor 4": ({"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4}, 8),
  "data 8": ({"ici_fsdp_parallelism": 1, "ici_data_parallelism": 8}, 8),
  "one device": ({"ici_fsdp_parallelism": 1, "per_device_batch_size": 8}, 1),
  "unrolled": ({"scan_layers": False}, 8),
}
QUICK = "fsdp 2 x tensor 4"


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", [QUICK, *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES if m != QUICK)])
def test_another_mesh_goes_on_from_the_same_state(whole, half, mesh):
  changes, devices = MESHES[mesh]
  config = tiny(**(SPLIT | changes))
  p, history = program(config, devices), History()
  found = resume(config, epath.Path(half[0] / "run" / "checkpoints"), p.state)
  assert equal(found.state, half[1])
  for name, leaf in named(found.state).items():
    assert leaf.sharding == named(p.state)[name].sharding
  run_loop(p.step, found.state, p.feed(found.position), range(4, 14), [history])
  np.testing.assert_allclose(history.losses, whole[1][4:], rtol=1e-6)


def test_another_run_starts_from_a_state_and_never_touches_it(half, split, copy):
  def start(path):
    return Kept(tiny(**SPLIT | {"load_full_state_path": str(path)}), "other", {}).start(split)

  path = copy / "run"
  before = len(list(path.rglob("*")))
  state, feed = start(path)
  assert equal(state, half[1])
  assert int(next(feed).position()["batches"]) == 5
  largest(path / "checkpoints" / "4").unlink()
  with pytest.raises(RunError, match=r"load_full_state_path=.* is damaged"):
    start(path)
  assert len(list(path.rglob("*"))) == before - 1
  with pytest.raises(ConfigError, match=r"nothing is no checkpoint"):
    start(copy / "nothing")


def test_its_own_checkpoint_comes_before_the_named_ones(half, split, copy, tmp_path):
  keys = {"enable_checkpointing": True, "base_output_directory": str(copy), "run_name": "run"}
  other = tiny(**SPLIT | keys | {"load_full_state_path": str(half[0] / "run" / "checkpoints" / "2")})
  assert int(Kept(other, "run", {}).start(split)[0].step) == 4
  assert int(Kept(other, "new", {}).start(split)[0].step) == 2


RECORDS = ("4/record/record.json", "4/record/checksums-0.json")


def largest(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.chaos
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_whatever_is_damaged_nothing_wrong_comes_back(half, tmp_path, capsys, everything):
  """Files of the latest step, truncated, deleted or with flipped bits: it is as saved, or the step before is."""
  config = tiny(**SPLIT)
  abstract = program(config, 8).state
  checkpoints = half[0] / "run" / "checkpoints"
  files = sorted(p.relative_to(checkpoints) for p in (checkpoints / "4").rglob("*") if p.is_file())
  needed = {largest(checkpoints / "4").relative_to(checkpoints), *map(Path, RECORDS)}
  rng, aside = random.Random(0), set()
  for number, file in enumerate(files if everything else needed):
    for how in ("truncated", "deleted", "flipped"):
      folder = tmp_path / f"{number}{how}"
      shutil.copytree(checkpoints, folder)
      content = bytearray((folder / file).read_bytes())
      if how == "flipped":
        for place in range(rng.randrange(32), len(content), max(1, len(content) // 32)):
          content[place] ^= 1 << rng.randrange(8)
      (folder / file).write_bytes(content[: len(content) // 2] if how == "truncated" else content)
      if how == "deleted":
        (folder / file).unlink()
      found = resume(config, epath.Path(folder), abstract)
      said = capsys.readouterr().out
      if found.folder.name == "4":
        assert equal(found.state, half[1]), (file, how)
      else:
        aside.add((file, how))
        assert found.folder.name == "2"
        assert re.search(r"4 is damaged: .* It is now 4.damaged\.", said), (file, how)
        assert (folder / "4.damaged").exists()
      shutil.rmtree(folder)
  assert aside >= {(file, how) for file in needed for how in ("truncated", "deleted", "flipped")}


def test_where_no_step_is_good_nothing_is_touched(half, copy, split):
  checkpoints = copy / "run" / "checkpoints"
  for step in ("2", "4"):
    (checkpoints / step / "record" / "record.json").unlink()
  with pytest.raises(RunError, match=r"none of the 2 checkpoints .* 4 is damaged: record/record.json is missing"):
    resume(tiny(**SPLIT), epath.Path(checkpoints), split.state)
  assert steps_in(epath.Path(checkpoints)) == [2, 4]


def test_arrays_are_read_in_groups_of_a_size():
  assert _groups({"a": 5, "b": 3, "c": 4, "d": 20}, most=8) == [["b", "c"], ["a"], ["d"]]


def test_one_bit_changes_a_checksum(half):
  record = Record.read(epath.Path(half[0] / "run" / "checkpoints" / "4"))
  arrays = read(tiny(), epath.Path(half[0] / "run" / "checkpoints" / "4"), dict.fromkeys(record.arrays), record)
  before = added(checksums(arrays))
  for place, name in enumerate(sorted(arrays)):
    spoilt = arrays[name].copy()
    spoilt.reshape(-1).view(np.uint8)[-1] ^= 1
    after = added(checksums(arrays | {name: spoilt}))
    assert list(np.flatnonzero(before != after)) == [place]


def test_another_model_is_a_mistake_and_not_damage(copy):
  with pytest.raises(ConfigError, match=r"checkpoints/4 has .* Keys that differ: .*base_mlp_dim=80 there, 88 here"):
    run_in(copy, base_mlp_dim=88)
  assert steps_in(epath.Path(copy / "run" / "checkpoints")) == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"force_unroll": "true"}, {"param_scan_axis": 0}, {"param_scan_axis": 2}])
def test_parameters_alone(half, tmp_path, keys, capsys):
  words = [f"{key}={value}" for key, value in keys.items()]
  assert main(["checkpoint", "export-params", str(half[0] / "run"), str(tmp_path / "out"), *words]) == 0
  record = Record.read(epath.Path(tmp_path / "out"))
  gate = "groups/0/layers/0{}/feed_forward/gate/weight"
  apart = "force_unroll" in keys
  shape = record.arrays["params/" + gate.format(".1" if apart else "")].shape
  assert shape == {(): (48, 2, 80), ("force_unroll",): (48, 80)}.get(
    tuple(keys), (2, 48, 80) if keys.get("param_scan_axis") == 0 else (48, 80, 2)
  )
  assert all(name.startswith("params/") for name in record.arrays)
  p = program(tiny(**SPLIT), 8)
  found = load_parameters(tiny(), "load_parameters_path", str(tmp_path / "out"), p.state.params)
  assert equal(found, half[1].params)
  assert all(found[n].sharding == p.state.params[n].sharding for n in found)
  capsys.readouterr()
  assert main(["checkpoint", "export-params", str(half[0] / "run"), str(tmp_path / "out")]) == 2
  assert "is there already" in capsys.readouterr().err


def test_a_run_starts_with_other_parameters(half, split):
  config = tiny(**SPLIT | {"load_parameters_path": str(half[0] / "run")})
  state, feed = Kept(config, "other", {}).start(split)
  assert equal(state.params, half[1].params)
  assert equal(state.opt_state, split.init().opt_state)
  assert int(state.step) == int(next(feed).position()["batches"]) - 1 == 0


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
  """An object store on loopback, of which gcsfs and TensorStore are told by the environment."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would ask Google what kind of bucket this is
    for name in ("gcsfs", "gcp_storage_emulator"):
      pytest.importorskip(name, reason="extras gcs and dev")
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  words = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=bucket"]
  log = tmp_path_factory.mktemp("store") / "server.log"
  with open(log, "w") as out:
    server = subprocess.Popen([sys.executable, "-um", "gcp_storage_emulator", *words], stdout=out, stderr=out)
  while "All services started" not in log.read_text():
    assert server.poll() is None, log.read_text()
    time.sleep(0.05)
  address = f"http://127.0.0.1:{port}"
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
      patch.setenv(name, address)
    patch.setitem(fsspec.config.conf, "gcs", {"token": "anon", "endpoint_url": address})
    yield fsspec.filesystem("gcs")
  server.kill()
  server.wait()


def test_a_run_starts_from_a_bucket(half, split, bucket, capsys):
  bucket.put(f"{half[0]}/run/checkpoints", "bucket/run/checkpoints", recursive=True)
  found = load_state(tiny(), "load_full_state_path", "gs://bucket/run", split.state)
  assert equal(found.state, half[1])
  assert load_config(**TINY, load_full_state_path="gs://bucket/run")
  assert main(["checkpoint", "inspect", "gs://bucket/run"]) == 0
  assert "step 4, schema" in capsys.readouterr().out
  with pytest.raises(ConfigError, match="gs://bucket/other is no checkpoint"):
    load_state(tiny(), "load_full_state_path", "gs://bucket/other", split.state)


@pytest.mark.slow
def test_a_run_lives_in_a_bucket(bucket, tmp_path, monkeypatch, capsys):
  """Begun, and gone on past a save that never ended: as if nothing had been."""
  monkeypatch.chdir(tmp_path)
  mesh = {"ici_fsdp_parallelism": 1, "ici_data_parallelism": 8, "sharding_tolerance": 1.0, "steps": 8}
  reference = run_in(tmp_path, **mesh, enable_checkpointing=False)
  keys = mesh | {"run_name": "stored", "profiler": "xplane", "profiler_steps": 1}
  keys |= {"gcs_metrics": True, "save_config_to_gcs": True, "log_period": 3}
  keys["checkpoint_storage_use_ocdbt"] = False  # its one manifest is written on conditions, which this server ignores
  _, losses = run_in("gs://bucket/runs", EndAfter(4), **keys)
  steps = "bucket/runs/stored/checkpoints"
  bucket.copy(f"{steps}/4/state/_METADATA", f"{steps}/6/state/_METADATA")
  bucket.invalidate_cache()
  state, later = run_in("gs://bucket/runs", **keys)
  said = capsys.readouterr().out
  assert f"gs://{steps}/6 was never finished" in said
  assert f"goes on from gs://{steps}/4" in said
  assert np.array_equal(np.concatenate([losses, later]), reference[1])
  assert equal(state, reference[0])
  bucket.invalidate_cache()
  stored = [line for path in sorted(bucket.glob("bucket/runs/stored/metrics/*")) for line in bucket.open(path, "rt")]
  assert [json.loads(line)["step"] for line in stored] == list(range(1, 9))
  assert json.loads(bucket.cat("bucket/runs/stored/config.json"))["steps"]["value"] == 8
  assert any(path.endswith(".xplane.pb") for path in bucket.find("bucket/runs/stored/profile"))
  assert (tmp_path / "runs/stored/report.html").exists()


def test_inspect_needs_no_jax(half):
  code = (
    "import sys; from maxtext.cli.main import main; main(['checkpoint', 'inspect', sys.argv[1]]); "
    "assert not {'jax', 'orbax', 'numpy'} & set(sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", code, half[0] / "run"], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[1] == "step 4, schema 1, layers stacked on dimension 0"
  rows = {line.split()[0]: line.split()[1:] for line in lines[3:]}
  assert rows["params/embedding/table"] == ["float32[128,", "48]", "24,576"]
  assert rows["data/batches"] == ["int32[]", "4"]
  record = Record.read(epath.Path(half[0] / "run" / "checkpoints" / "4"))
  assert record.config["checkpoint_period"]["value"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
  ("keys", "steps", "pattern", "least", "most"),
  [
    ({"checkpoint_period": 1, "max_num_checkpoints_to_keep": 2}, [3, 4], "4/state/manifest.ocdbt", 1, 1),
    ({"checkpoint_period": 3, "async_checkpointing": False}, [3, 4], "4/state/**/zarr.json", 0, 0),
    ({"checkpoint_period": 3, "save_checkpoint_on_completion": False}, [3], "*", 1, 1),
    (
      {"checkpoint_period": 2, "max_num_checkpoints_to_keep": 1, "checkpoint_todelete_subdir": "old"},
      [4],
      "old/2/state/manifest.ocdbt",
      1,
      1,
    ),
    ({"checkpoint_storage_use_ocdbt": False}, [4], "4/state/params.embedding.table/zarr.json", 1, 1),
    (
      {"checkpoint_storage_use_ocdbt": False, "checkpoint_storage_use_zarr3": False},
      [4],
      "4/state/params.embedding.table/.zarray",
      1,
      1,
    ),
    ({}, [4], "4/state/ocdbt.process_0/d/*", 1, 20),
    ({"checkpoint_storage_target_data_file_size_bytes": 4096}, [4], "4/state/ocdbt.process_0/d/*", 40, 999),
  ],
)
def test_keys_of_what_is_kept(half, tmp_path, keys, steps, pattern, least, most):
  drive(tmp_path, half[1], **keys)
  assert steps_in(epath.Path(tmp_path)) == steps
  assert least <= len(list(tmp_path.glob(pattern))) <= most
  config = tiny(**SPLIT | {"enable_checkpointing": True} | keys)
  assert equal(resume(config, epath.Path(tmp_path), half[1]).state, half[1])


def test_continuous_saves_follow_each_other(half, tmp_path):
  class Slow(Callback):
    def due(self, step):
      return True

    def on_update(self, step, state, position, figures):
      time.sleep(0.2)

  drive(tmp_path, half[1], Slow(), steps=range(14), enable_continuous_checkpointing=True)
  steps = steps_in(epath.Path(tmp_path))
  assert len(steps) >= 3
  assert (steps[0], steps[-1]) == (1, 14)


@pytest.mark.chaos
def test_a_save_that_fails_is_reported_and_the_run_goes_on(half, tmp_path, capsys):
  """Files may not grow beyond 16 kB while step 4 is saved in the background; the next one works again."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)

  class Limit(Callback):
    def due(self, step):
      return True

    def on_update(self, step, state, position, figures):
      while step == 3 and not (tmp_path / "2").exists():
        time.sleep(0.01)
      time.sleep(1 if step == 4 else 0)
      resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]) if step == 3 else before)

  try:
    drive(tmp_path, half[1], Limit(), steps=range(7), checkpoint_period=2, max_num_checkpoints_to_keep=1)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  said = capsys.readouterr().out
  assert re.search(r"maxtext: the checkpoint of step 4 failed: .*File too large.*; the last good one is step 2\.", said)
  assert steps_in(epath.Path(tmp_path)) == [7]


@pytest.mark.chaos
def test_a_full_disk_keeps_the_last_good_step(half, tmp_path, capsys):
  if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], check=False).returncode:
    pytest.skip("a small disk needs the right to mount one")

  class Fill(Callback):
    def due(self, step):
      return True

    def on_update(self, step, state, position, figures):
      if step == 3:
        (tmp_path / "rubbish").write_bytes(b"x" * (shutil.disk_usage(tmp_path).free - 100_000))

  keys = {"checkpoint_period": 2, "max_num_checkpoints_to_keep": 1, "async_checkpointing": False}
  try:
    with pytest.raises(RunError, match=r"ended at step 4, and its last state could not be saved"):
      drive(tmp_path, half[1], Fill(), **keys)
    said = capsys.readouterr().out
    assert re.search(r"the checkpoint of step 4 failed: .*RESOURCE_EXHAUSTED.* is step 2", said)
    assert [p.name for p in tmp_path.iterdir() if p.name != "rubbish"] == ["2"], "a failed save leaves nothing behind"
    assert equal(resume(tiny(), epath.Path(tmp_path), half[1]).state, half[1])
    (tmp_path / "rubbish").unlink()
    drive(tmp_path, half[1], steps=range(2, 4), **keys)
    assert steps_in(epath.Path(tmp_path)) == [4]
  finally:
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_end_a_run_saves_first(tmp_path, number, code):
  keys = TINY | {"steps": 100000, "run_name": "run", "base_output_directory": tmp_path, "enable_checkpointing": True}
  command = [MAXTEXT, "train", *(f"{key}={value}" for key, value in keys.items())]
  env = os.environ | {"PYTHONUNBUFFERED": "1"}
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
    for line in process.stdout:
      if line.startswith("step      2"):
        break
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
  assert process.returncode == code, errors
  assert "ending after this step, with a checkpoint" in errors
  steps = steps_in(epath.Path(tmp_path / "run" / "checkpoints"))
  assert len(steps) == 1
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  assert json.loads(lines[-1])["step"] == steps[0]
