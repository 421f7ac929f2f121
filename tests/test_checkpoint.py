"""Checkpoints in one process: what comes back is what was saved, or the run says why not."""

import errno
import gc
import io
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import maxtext
from maxtext import ConfigError, load_config
from maxtext.checkpoint import storage
from maxtext.checkpoint.checksum import added, checksums, nonfinite, nonfinite_names
from maxtext.checkpoint.files import _groups, contents, handlers, read
from maxtext.checkpoint.inspect import served_keys
from maxtext.checkpoint.location import steps_in
from maxtext.checkpoint.metadata import CheckpointMetadata, Criterion
from maxtext.checkpoint.notes import NonfiniteNote
from maxtext.checkpoint.options import array_storage, checkpoint_options, restore_options
from maxtext.checkpoint.restore import load_parameters, load_state, quarantine_blamed, resume
from maxtext.checkpoint.storage import is_storage_failure
from maxtext.checkpoint.tokenizer import keep_tokenizer, open_tokenizer
from maxtext.checkpoint.tree import like, named
from maxtext.checkpoint.writer import Writer
from maxtext.cli.main import main
from maxtext.configs.errors import RunError
from maxtext.data.options import data_options, tokenizer_options
from maxtext.data.tokenizers import load_tokenizer
from maxtext.distributed.interrupt import Interrupt
from maxtext.distributed.supervisor import supervise
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.guard import LossGuard
from maxtext.training.callbacks.save import Save
from maxtext.training.loop import run_loop
from maxtext.training.resume import RunCheckpoints
from tests.flags import flags
from tests.support import TINY, History, program, tiny
from tests.vocabularies import sentence_piece

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
  state = maxtext.train(tiny(**(SPLIT | keys | changes)), callbacks=[history, *callbacks])
  return state, history.losses


def said(capsys):
  return capsys.readouterr().out


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
  """The callback that saves, as the loop calls it, with a state that stays the same; the others may ask its writer."""
  config = tiny(**SPLIT | {"enable_checkpointing": True} | changes)
  writer, guard = Writer(checkpoint_options(config), epath.Path(folder), {}), LossGuard(on_nan=True, on_inf=True)
  save = Save(writer, Interrupt(), guard, config.save_checkpoint_on_completion, Criterion(), lambda step, state: None)
  for callback in callbacks:
    callback.writer = writer
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
  said = capsys.readouterr().out
  assert "resuming from" in said
  assert "resuming with other values than it was saved with: checkpoint_period 2 -> 100\n" in said, (
    "and of no other key"
  )
  assert equal(state, whole[0])
  np.testing.assert_array_equal(np.concatenate([half[2], losses]), whole[1])
  lines = [json.loads(line) for line in (copy / "run" / "metrics.jsonl").read_text().splitlines()]
  assert [line["step"] for line in lines] == list(range(1, 15)), "no step stands twice"
  again, none = run_in(copy, checkpoint_period=100)
  assert "other values" not in capsys.readouterr().out
  assert equal(again, state)
  assert len(none) == 0, "a finished run has nothing to do"


def test_a_start_that_fails_leaves_the_record_of_the_run(copy):
  kept = {name: (copy / "run" / name).read_text() for name in ("config.json", "run.json")}
  with pytest.raises(ConfigError, match=r"has float32\[128, 48\] for params/embedding/table, and this run wants"):
    run_in(copy, base_emb_dim=64)
  assert {name: (copy / "run" / name).read_text() for name in kept} == kept
  with pytest.raises(ConfigError, match="is no checkpoint"):
    run_in(copy, run_name="new", load_full_state_path=str(copy / "nothing"))
  assert not (copy / "new").exists(), "nothing is left of a run that never was"


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
  found = resume(restore_options(config), epath.Path(half[0] / "run" / "checkpoints"), p.state)
  assert equal(found.state, half[1])
  for name, leaf in named(found.state).items():
    assert leaf.sharding == named(p.state)[name].sharding
  run_loop(p.step, found.state, p.feed(found.position), range(4, 14), [history])
  np.testing.assert_allclose(history.losses, whole[1][4:], rtol=1e-6)


def test_another_run_starts_from_a_state_and_never_touches_it(half, split, copy):
  def start(path):
    return RunCheckpoints(tiny(**SPLIT | {"load_full_state_path": str(path)}), "other", {}).restore_or_init(split)

  path = copy / "run"
  before = len(list(path.rglob("*")))
  state, feed = start(path)
  assert equal(state, half[1])
  assert int(next(feed).iterator_state()["batches"]) == 5
  largest(path / "checkpoints" / "4").unlink()
  with pytest.raises(RunError, match=r"load_full_state_path=.* is damaged"):
    start(path)
  assert len(list(path.rglob("*"))) == before - 1
  with pytest.raises(ConfigError, match=r"nothing is no checkpoint"):
    start(copy / "nothing")


def test_its_own_checkpoint_comes_before_the_named_ones(half, split, copy, tmp_path):
  keys = {"enable_checkpointing": True, "base_output_directory": str(copy), "run_name": "run"}
  other = tiny(**SPLIT | keys | {"load_full_state_path": str(half[0] / "run" / "checkpoints" / "2")})
  assert int(RunCheckpoints(other, "run", {}).restore_or_init(split)[0].step) == 4
  assert int(RunCheckpoints(other, "new", {}).restore_or_init(split)[0].step) == 2


RECORDS = ("4/record/record.json", "4/record/checksums-0.json")


def largest(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.chaos
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.nightly)])
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
      found = resume(restore_options(config), epath.Path(folder), abstract)
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


FAULTS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The next FAULT_COUNT reads of files under FAULT_PATH fail with FAULT_ERRNO. */
static int fails(int fd) {
  static long left = -1;
  char link[64], name[4096];
  if (left < 0) left = atol(getenv("FAULT_COUNT"));
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, name, sizeof name - 1);
  if (size <= 0 || !left) return 0;
  name[size] = 0;
  if (!strstr(name, getenv("FAULT_PATH"))) return 0;
  left--;
  errno = atoi(getenv("FAULT_ERRNO"));
  return 1;
}
#define FAULTY(NAME, TAKES, PASSES) \\
  ssize_t NAME TAKES { \\
    static ssize_t (*real) TAKES; \\
    if (!real) real = dlsym(RTLD_NEXT, #NAME); \\
    return fails(fd) ? -1 : real PASSES; \\
  }
FAULTY(read, (int fd, void *to, size_t size), (fd, to, size))
FAULTY(pread, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
FAULTY(pread64, (int fd, void *to, size_t size, off64_t at), (fd, to, size, at))
"""
STARTS = """
import sys
from etils import epath
from maxtext.checkpoint import storage
from maxtext.checkpoint.options import restore_options
from maxtext.checkpoint.restore import resume
from maxtext.logs import setup_logging
from tests.support import program, tiny

setup_logging()
storage.DELAYS = (0.01, 0.02)
config = tiny(per_device_batch_size=8, steps=14)
try:
  found = resume(restore_options(config), epath.Path(sys.argv[1]), program(config).state)
except storage.StorageError as error:
  sys.exit(f"maxtext: {error}")
print(f"resuming from {found.folder.name}")
"""


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize(("number", "path", "count"), [(errno.ETIMEDOUT, "4/state/d/", 1), (errno.EIO, "4/state", 999)])
def test_a_disk_that_does_not_answer_is_asked_again_and_nothing_is_renamed(copy, number, path, count):
  """The reads of a real process fail below Python and TensorStore: once, or always."""
  if not (compiler := shutil.which("cc")):
    pytest.skip("what makes reads fail needs a C compiler")
  (copy / "faults.c").write_text(FAULTS)
  subprocess.run([compiler, "-shared", "-fPIC", "-o", copy / "faults.so", copy / "faults.c", "-ldl"], check=True)
  checkpoints = copy / "run" / "checkpoints"
  env = os.environ | flags(devices=1) | {
    "LD_PRELOAD": str(copy / "faults.so"), "FAULT_ERRNO": str(number), "FAULT_PATH": path, "FAULT_COUNT": str(count),
  }  # fmt: skip
  command = [sys.executable, "-c", STARTS, str(checkpoints)]
  done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
  assert f"{os.strerror(number)}" in done.stdout, done.stderr
  assert "trying again in 0.01 s" in done.stdout
  if count == 1:
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "resuming from 4"), done.stderr
  else:
    assert done.returncode == 1
    assert "4 cannot be read: " in done.stderr
    assert "Nothing was changed" in done.stderr
  assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "4"]


@pytest.mark.parametrize("file", [*RECORDS, "4/state/_METADATA", "checkpoints"])
@pytest.mark.parametrize("times", [1, 99])
def test_files_that_cannot_be_read_for_a_while(copy, split, monkeypatch, capsys, file, times):
  """The same of what Python reads itself: etils, below everything of ours, raises as a network's file system does."""
  monkeypatch.setattr(storage, "DELAYS", (0.01, 0.02))
  checkpoints, left = epath.Path(copy / "run" / "checkpoints"), [times]

  def failing(real):
    def call(self, path, *args, **kwargs):
      if str(path).endswith(file) and left[0]:
        left[0] -= 1
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
      return real(self, path, *args, **kwargs)

    return call

  backend = type(epath.backend.os_backend)
  for name in ("open", "listdir"):
    monkeypatch.setattr(backend, name, failing(getattr(backend, name)))
  if times == 1:
    assert resume(restore_options(tiny(**SPLIT)), checkpoints, split.state).folder.name == "4"
  else:
    with pytest.raises(RunError, match=r"cannot be read: .*Connection timed out.* Nothing was changed; start again"):
      resume(restore_options(tiny(**SPLIT)), checkpoints, split.state)
  assert "Connection timed out" in said(capsys)
  monkeypatch.undo()
  assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "4"]


SAYS = {
  "UNKNOWN: Error reading \"a\": Input/output error [os_error_code='5'] [tensorstore_spec=...]": True,
  "FAILED_PRECONDITION: Failed to read: Device or resource busy [os_error_code='16']": True,
  "UNAVAILABLE: Error reading gs://bucket/a: retries exhausted": True,
  "PERMISSION_DENIED: Error opening local file": True,
  "NOT_FOUND: No such file or directory [os_error_code='2']": False,
  "FAILED_PRECONDITION: Truncated Zstd-compressed stream; at byte 24": False,
  "DATA_LOSS: Error decoding shard index: Digest mismatch": False,
  "OUT_OF_RANGE: Error reading Byte range [0, 432)": False,
  "Expecting value: line 1 column 1 (char 0)": False,
}


@pytest.mark.parametrize(("text", "unanswered"), SAYS.items())
def test_what_tensorstore_says_of_storage_and_of_files(text, unanswered):
  assert is_storage_failure(ValueError(text)) is unanswered


def test_where_no_step_is_good_nothing_is_touched(half, copy, split):
  checkpoints = copy / "run" / "checkpoints"
  for step in ("2", "4"):
    (checkpoints / step / "record" / "record.json").unlink()
  with pytest.raises(RunError, match=r"none of the 2 checkpoints .* 4 is damaged: record/record.json is missing"):
    resume(restore_options(tiny(**SPLIT)), epath.Path(checkpoints), split.state)
  assert steps_in(epath.Path(checkpoints)) == [2, 4]


def test_arrays_are_read_in_groups_of_a_size():
  assert _groups({"a": 5, "b": 3, "c": 4, "d": 20}, most=8) == [["b", "c"], ["a"], ["d"]]


def test_one_bit_changes_a_checksum(half):
  record = CheckpointMetadata.read(epath.Path(half[0] / "run" / "checkpoints" / "4"))
  arrays = read(
    array_storage(tiny()), epath.Path(half[0] / "run" / "checkpoints" / "4"), dict.fromkeys(record.arrays), record
  )
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
  record = CheckpointMetadata.read(epath.Path(tmp_path / "out"))
  gate = "groups/0/layers/0{}/feed_forward/gate/weight"
  apart = "force_unroll" in keys
  shape = record.arrays["params/" + gate.format(".1" if apart else "")].shape
  assert shape == {(): (48, 2, 80), ("force_unroll",): (48, 80)}.get(
    tuple(keys), (2, 48, 80) if keys.get("param_scan_axis") == 0 else (48, 80, 2)
  )
  assert all(name.startswith("params/") for name in record.arrays)
  p = program(tiny(**SPLIT), 8)
  found = load_parameters(restore_options(tiny()), "load_parameters_path", str(tmp_path / "out"), p.state.params)
  assert equal(found, half[1].params)
  assert all(found[n].sharding == p.state.params[n].sharding for n in found)
  capsys.readouterr()
  assert main(["checkpoint", "export-params", str(half[0] / "run"), str(tmp_path / "out")]) == 2
  assert "is there already" in capsys.readouterr().err


def test_a_run_starts_with_other_parameters(half, split):
  config = tiny(**SPLIT | {"load_parameters_path": str(half[0] / "run")})
  state, feed = RunCheckpoints(config, "other", {}).restore_or_init(split)
  assert equal(state.params, half[1].params)
  assert equal(state.opt_state, split.init().opt_state)
  assert int(state.step) == int(next(feed).iterator_state()["batches"]) - 1 == 0


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
  found = load_state(restore_options(tiny()), "load_full_state_path", "gs://bucket/run", split.state)
  assert equal(found.state, half[1])
  assert load_config(**TINY, load_full_state_path="gs://bucket/run")
  assert main(["checkpoint", "inspect", "gs://bucket/run"]) == 0
  assert "step 4, schema" in capsys.readouterr().out
  with pytest.raises(ConfigError, match="gs://bucket/other is no checkpoint"):
    load_state(restore_options(tiny()), "load_full_state_path", "gs://bucket/other", split.state)


def test_a_tokenizer_is_kept_in_a_bucket(half, bucket, tmp_path):
  """And brought from there to where libraries can read it."""
  bucket.put(f"{half[0]}/run/checkpoints", "bucket/kept/checkpoints", recursive=True)
  keys = {"tokenizer_path": str(sentence_piece(tmp_path / "source")), "vocab_size": 400, "dataset_type": "grain"}
  assert keep_tokenizer(data_options(tiny(**keys)), "", "gs://bucket/kept") is None
  assert "tokenizer_path" not in served_keys("gs://bucket/kept", {})
  for path in ("gs://bucket/kept", "gs://bucket/kept/checkpoints/4"):
    with open_tokenizer(data_options(tiny(vocab_size=400)), path) as tokenizer:
      assert tokenizer.identity == load_tokenizer(tokenizer_options(tiny(**keys))).identity


@pytest.mark.slow
def test_a_run_lives_in_a_bucket(bucket, tmp_path, monkeypatch, capsys):
  """Begun, and gone on past a save that never ended: as if nothing had been."""
  monkeypatch.chdir(tmp_path)
  mesh = {"ici_fsdp_parallelism": 1, "ici_data_parallelism": 8, "sharding_tolerance": 1.0, "steps": 8}
  mesh["opt_type"] = "sgd"  # every array is a request for each device
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
  assert f"resuming from gs://{steps}/4" in said
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
  assert lines[1] == "step 4, schema 3, layers stacked on dimension 0"
  rows = {line.split()[0]: line.split()[1:] for line in lines[3:]}
  assert rows["params/embedding/table"] == ["float32[128,", "48]", "24,576"]
  assert rows["data/batches"] == ["int32[]", "4"]
  record = CheckpointMetadata.read(epath.Path(half[0] / "run" / "checkpoints" / "4"))
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
    ({}, [4], "4/state/ocdbt.process_0/d/*", 1, 38),
    ({"checkpoint_storage_target_data_file_size_bytes": 4096}, [4], "4/state/ocdbt.process_0/d/*", 40, 999),
  ],
)
def test_keys_of_what_is_kept(half, tmp_path, keys, steps, pattern, least, most):
  drive(tmp_path, half[1], **keys)
  assert steps_in(epath.Path(tmp_path)) == steps
  assert least <= len(list(tmp_path.glob(pattern))) <= most
  config = tiny(**SPLIT | {"enable_checkpointing": True} | keys)
  assert equal(resume(restore_options(config), epath.Path(tmp_path), half[1]).state, half[1])


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
def test_a_save_that_fails_is_reported_and_the_run_goes_on(half, tmp_path, capsys, caplog):
  """Files may not grow beyond 16 kB while step 4 is saved in the background; the next one works again."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)

  class Limit(Callback):
    def due(self, step):
      return True

    def on_update(self, step, state, position, figures):
      while step == 3 and not (tmp_path / "2").exists():
        time.sleep(0.01)
      if step == 4:
        self.writer.wait()  # a second is not enough for it to fail where both cores are busy
      resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]) if step == 3 else before)

  try:
    drive(tmp_path, half[1], Limit(), steps=range(7), checkpoint_period=2, max_num_checkpoints_to_keep=1)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  said = capsys.readouterr().out
  assert re.search(r"maxtext: the checkpoint of step 4 failed: .*File too large.*; the last good one is step 2\.", said)
  assert not [record for record in caplog.records if record.exc_info], "which is said once, and without a traceback"
  assert steps_in(epath.Path(tmp_path)) == [7]


@pytest.fixture
def events(monkeypatch):
  """What the operating system is asked for, in order: files and folders synced, and folders renamed."""
  found, fsync, rename = [], os.fsync, os.rename

  def noted_fsync(descriptor):
    found.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync(descriptor)

  def noted_rename(source, target, **kwargs):
    found.append(("rename", str(target)))
    rename(source, target, **kwargs)

  monkeypatch.setattr(os, "fsync", noted_fsync)
  monkeypatch.setattr(os, "rename", noted_rename)
  return found


def test_a_step_is_on_the_disk_before_it_counts(half, tmp_path, events):
  drive(tmp_path, half[1], steps=range(2), checkpoint_period=2)
  renamed = events.index(("rename", str(tmp_path / "2")))
  before = {path for kind, path in events[:renamed] if kind == "sync"}
  for file in ("record/record.json", "record/checksums-0.json", "state/_METADATA", "state/manifest.ocdbt"):
    assert any(re.search(rf"/2\.orbax-checkpoint-tmp[^/]*/{file}$", path) for path in before), file
  assert any(re.search(r"/2\.orbax-checkpoint-tmp[^/]*$", path) for path in before), "the names in the folder"
  assert ("sync", str(tmp_path)) in events[renamed:], "and its own"


def test_failures_in_a_row_are_said_loudly(half, tmp_path, capsys):
  """Files may not grow until step 8; then all is well again."""
  folder = tmp_path / "steps"

  class Mend(Callback):
    def due(self, step):
      return step == 8

    def on_update(self, step, state, position, figures):
      resource.setrlimit(resource.RLIMIT_FSIZE, before)

  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
  try:
    drive(folder, half[1], Mend(), steps=range(10), checkpoint_period=2, async_checkpointing=False)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  heard = capsys.readouterr()
  assert re.findall(r"the checkpoint of step (\d+) failed", heard.out) == ["2", "4", "6", "8"]
  assert re.findall(r"WARNING: (\d) checkpoints in a row have failed\. .* costs (\d) steps", heard.err) == [
    ("3", "6"),
    ("4", "8"),
  ]
  assert steps_in(epath.Path(folder)) == [10]


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
    assert equal(resume(restore_options(tiny()), epath.Path(tmp_path), half[1]).state, half[1])
    (tmp_path / "rubbish").unlink()
    drive(tmp_path, half[1], steps=range(2, 4), **keys)
    assert steps_in(epath.Path(tmp_path)) == [4]
  finally:
    subprocess.run(["umount", str(tmp_path)], check=True)


TOO_FAST = {"learning_rate": 1e38, "checkpoint_period": 1, "max_num_checkpoints_to_keep": 1, "steps": 5}


def not_finite_in(folder):
  with pytest.raises(RunError, match="the gradient norm is not a number at step"):
    run_in(folder, **TOO_FAST)


@pytest.mark.slow
def test_a_run_whose_first_steps_end_in_nan_starts_anew(tmp_path, capsys):
  """After step 1 parameters are huge and finite, as is the loss, but not the gradients: no restart gets further."""
  not_finite_in(tmp_path)
  assert steps_in(epath.Path(tmp_path / "run" / "checkpoints")) == [1]
  assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["grad_norm"] is None
  capsys.readouterr()
  _, losses = run_in(tmp_path, **TOO_FAST | {"learning_rate": 1e-3})
  assert (
    "maxtext: step 2 was not finite (grad_norm nan), and step 1 led to it: it is now 1.nonfinite; there is no "
    in (capsys.readouterr().out)
  )
  assert len(losses) == 5
  assert np.isfinite(losses).all()
  assert steps_in(epath.Path(tmp_path / "run" / "checkpoints")) == [5]


@pytest.mark.slow
def test_a_run_that_is_told_to_go_on_past_nan_keeps_its_last_finite_step(tmp_path, capsys):
  """Two good steps, three that are not, with one checkpoint kept; then two restarts, the first of which fails again."""
  checkpoints = epath.Path(tmp_path / "run" / "checkpoints")
  good = TOO_FAST | {"learning_rate": 1e-3}
  run_in(tmp_path, EndAfter(2), **good)
  with pytest.raises(RunError, match="the run ended at step 5, and its last state could not be saved"):
    run_in(tmp_path, **TOO_FAST, abort_on_nan_loss=False)
  assert re.search(r"the checkpoint of step 4 failed: .* is not finite; the last good one is step 3\.", said(capsys))
  assert steps_in(checkpoints) == [2, 3]
  not_finite_in(tmp_path)
  assert "step 4 was not finite (grad_norm nan), and step 3 led to it: it is now 3.nonfinite; the" in said(capsys)
  _, losses = run_in(tmp_path, **good)
  lines = said(capsys)
  assert "it is now 3.nonfinite; the last good checkpoint is step 2.\n" in lines
  assert f"resuming from {checkpoints / '2'}\n" in lines
  assert len(losses) == 3
  assert np.isfinite(losses).all()
  assert sorted(path.name for path in checkpoints.iterdir()) == ["3.nonfinite", "5"]


def spoilt(state, value=np.nan):
  """A state with one number in the optimizer's that is not finite."""
  name = next(n for n in named(state) if n.startswith("opt_state/") and named(state)[n].ndim > 1)
  return like(state, named(state) | {name: named(state)[name].at[(0,) * named(state)[name].ndim].set(value)})


@pytest.mark.parametrize("in_background", [True, False])
def test_a_state_that_is_not_finite_is_never_a_step(half, tmp_path, capsys, in_background):
  config = tiny(**SPLIT, enable_checkpointing=True, max_num_checkpoints_to_keep=1, async_checkpointing=in_background)
  writer = Writer(checkpoint_options(config), epath.Path(tmp_path), {})
  for step, state in enumerate((half[1], spoilt(half[1]), spoilt(half[1], -np.inf)), 1):
    writer.save(step, state, {})
  writer.wait()
  assert (writer.last, steps_in(epath.Path(tmp_path))) == (1, [1])
  assert re.findall(r"step (\d) failed: opt_state/\S+ is not finite; the last good one is step 1", said(capsys)) == [
    *"23"
  ]
  assert NonfiniteNote.read(epath.Path(tmp_path)).step == 2
  writer.trim()
  assert steps_in(epath.Path(tmp_path)) == [1]
  writer.save(4, half[1], {})
  writer.close()
  assert [path.name for path in sorted(tmp_path.iterdir())] == ["1", "4"], "the note is out of date"


@pytest.mark.slow
@pytest.mark.mesh
def test_what_is_not_finite_on_one_process_is_kept_by_none(tmp_path):
  heard = io.StringIO()
  with ThreadPoolExecutor(1) as thread:  # the supervisor would take SIGTERM from the main one
    command = [sys.executable, "-m", "tests.save_worker", str(tmp_path / "steps")]
    code = thread.submit(supervise, command, 2, environment=flags(devices=1), out=heard).result()
  assert code == 0, heard.getvalue()[-3000:]
  for process in (0, 1):
    for step, last in ((1, 1), (2, 1), (3, 3)):
      assert f"[{process}] after step {step} the last is {last}\n" in heard.getvalue()
  assert "step 2 failed: params is not finite (process 1); the last good one is step 1." in heard.getvalue()
  assert steps_in(epath.Path(tmp_path / "steps")) == [1, 3]


def test_an_older_step_that_is_not_finite_is_set_aside(half, copy, split, capsys):
  """As older releases saved it."""
  checkpoints = epath.Path(copy / "run" / "checkpoints")
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers(array_storage(tiny())))) as writer:
    writer.save(checkpoints / "6", args=contents(array_storage(tiny()), named(spoilt(half[1])), 6, 0, {}))
  assert resume(restore_options(tiny(**SPLIT)), checkpoints, split.state).folder.name == "4"
  assert re.search(r"6 is nonfinite: opt_state/\S+ is not finite\. It is now 6\.nonfinite\.", said(capsys))
  with pytest.raises(RunError, match=r"load_full_state_path=.* holds no state to resume from: opt_state"):
    load_state(restore_options(tiny(**SPLIT)), "load_full_state_path", str(checkpoints / "6.nonfinite"), split.state)


def test_the_only_step_that_a_run_went_on_from_is_not_given_up(copy, capsys):
  """Starting anew would be a surprise after so much work."""
  checkpoints = epath.Path(copy / "run" / "checkpoints")
  shutil.rmtree(checkpoints / "2")
  NonfiniteNote(5, "loss nan", blamed=4, began=4).write(checkpoints)
  with pytest.raises(RunError, match=r"step 5 was not finite \(loss nan\), and .*4, which led to it, is the only"):
    quarantine_blamed(checkpoints)
  assert steps_in(checkpoints) == [4]
  NonfiniteNote(7, "loss nan", blamed=6, began=4).write(checkpoints)
  assert quarantine_blamed(checkpoints) == 6
  assert said(capsys) == "maxtext: step 7 was not finite (loss nan); what is kept is from before it.\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "int8", "bool"])
def test_numbers_that_are_not_finite_are_found_with_the_checksums(dtype):
  arrays = {"a": jnp.zeros((3, 4), dtype), "b": jnp.ones((3, 4), dtype)}
  assert list(nonfinite(checksums(arrays))) == [False, False]
  spoils = (np.nan,) if dtype == "float8_e4m3fn" else (np.nan, np.inf, -np.inf)  # which has no infinities
  for value in spoils if "float" in dtype else ():
    bad = arrays | {"b": arrays["b"].at[2, 3].set(value)}
    assert list(nonfinite(checksums(bad))) == [False, True]
    assert nonfinite_names(bad) == ["b"]


FIGURES = {
  "finite": ({"loss": 1.0, "grad_norm": 2.0}, ""),
  "loss": ({"loss": np.nan, "grad_norm": np.nan}, "the loss is not a number at step 3; abort_on_nan_loss=false"),
  "infinite loss": ({"loss": np.inf, "grad_norm": 1.0}, "the loss is infinite at step 3; abort_on_inf_loss=false"),
  "gradients": ({"loss": 1.0, "grad_norm": np.nan}, "the gradient norm is not a number at step 3; abort_on_nan_loss="),
  "infinite": ({"loss": 1.0, "grad_norm": np.inf}, "the gradient norm is infinite at step 3; abort_on_inf_loss=false"),
  "left out": ({"loss": 1.0, "grad_norm": np.nan, "skipped_steps": 1.0}, ""),
}


@pytest.mark.parametrize(("figures", "message"), FIGURES.values(), ids=FIGURES.keys())
def test_a_step_whose_figures_are_not_finite_ends_the_run(figures, message):
  if message:
    with pytest.raises(RunError) as error:
      LossGuard(on_nan=True, on_inf=True).on_step(3, figures)
    assert str(error.value).startswith(message)
  else:
    LossGuard(on_nan=True, on_inf=True).on_step(3, figures)
  on_nan = "number" not in message
  LossGuard(on_nan=on_nan, on_inf=not on_nan).on_step(3, figures)


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
