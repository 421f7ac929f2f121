"""One run per name: who holds it, who takes over, and what a run that has lost it can still do."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from etils import epath

import maxtext
from maxtext.checkpoint.location import steps_in
from maxtext.configs.errors import RunError
from maxtext.distributed import lease as leases
from maxtext.distributed.lease import FILE, Lease, LeaseLostError
from maxtext.training.callbacks.base import Callback
from tests.flags import flags
from tests.support import TINY, tiny

TINY_RUN = {"base_num_decoder_layers": 1, "per_device_batch_size": 2, "enable_checkpointing": True, "run_name": "run",
            "enable_tensorboard": False}  # fmt: skip


def contents(folder):
  return json.loads((folder / FILE).read_text())


def elsewhere(folder, **changes):
  """A lease as a run on another host leaves it."""
  about = {"term": 9, "holder": "f" * 32, "host": "far", "pid": 7, "pid_started": "1", "machine": "another",
           "since": "2020-01-01 00:00:00 +0000", "beat": 3, "time": time.time() - 60}  # fmt: skip
  folder.mkdir(parents=True, exist_ok=True)
  (folder / FILE).write_text(json.dumps(about | changes))


@pytest.fixture
def folder(tmp_path):
  return epath.Path(tmp_path / "run")


def quick(folder) -> Lease:
  return Lease(folder, "run", beat_seconds=0.05, stale_seconds=0.5)


def test_file_systems_without_links(folder, monkeypatch):
  def link(*_):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(os, "link", link)
  first, second = quick(folder), quick(folder)
  first.acquire()
  assert contents(folder)["term"] == 1
  with pytest.raises(RunError, match="is held by the run of process"):
    second.acquire()
  first.release()


def test_held_beating_and_released(folder):
  lease = quick(folder)
  lease.acquire()
  first = contents(folder)
  assert (first["pid"], first["term"]) == (os.getpid(), 1)
  deadline = time.monotonic() + 20
  while contents(folder)["beat"] < 2:
    assert time.monotonic() < deadline
    time.sleep(0.02)
  lease.check()
  lease.release()
  assert list(folder.iterdir()) == []


def test_a_second_run_on_this_machine_is_refused(folder, monkeypatch):
  monkeypatch.setattr(leases, "_ENDING_SECONDS", 0.2)
  first = quick(folder)
  first.acquire()
  with pytest.raises(RunError, match=rf"run_name=run is held by the run of process {os.getpid()} on \S+ since 20"):
    quick(folder).acquire()
  first.check()
  first.release()


def test_of_two_starts_that_find_a_lease_abandoned_one_takes_it(folder, monkeypatch):
  """The first takes it between the moment in which the second reads it and that in which it writes."""
  monkeypatch.setattr(leases, "_ENDING_SECONDS", 0.2)
  elsewhere(folder, time=0.0)
  first, second = quick(folder), quick(folder)
  wait = second._wait_for_holder

  def overtaken(found):
    wait(found)
    if found.term == 9:
      first.acquire()

  monkeypatch.setattr(second, "_wait_for_holder", overtaken)
  with pytest.raises(RunError, match=rf"run_name=run is held by the run of process {os.getpid()} on"):
    second.acquire()
  first.check()
  assert contents(folder)["term"] == 10
  first.release()
  assert list(folder.iterdir()) == []


def test_a_killed_run_is_taken_over_at_once(folder):
  script = (
    "import os, sys; from etils import epath; from maxtext.distributed.lease import Lease\n"
    "Lease(epath.Path(sys.argv[1]), 'run').acquire(); os.kill(os.getpid(), 9)"
  )
  assert subprocess.run([sys.executable, "-c", script, folder], check=False).returncode == -9
  assert contents(folder)["term"] == 1
  second, start = Lease(folder, "run"), time.monotonic()
  second.acquire()
  assert time.monotonic() - start < 1, "nothing is waited for"
  assert contents(folder)["term"] == 2
  second.release()


@pytest.mark.parametrize("lives", [True, False])
def test_a_run_on_another_host_is_watched(folder, lives):
  elsewhere(folder)
  if lives:
    command = f'sleep 0.2; sed -i \'s/"beat": [0-9]*/"beat": 77/\' {folder / FILE}'
    subprocess.Popen(["sh", "-c", command])
    with pytest.raises(RunError, match="run_name=run is held by the run of process 7 on far since"):
      quick(folder).acquire()
  else:
    lease = quick(folder)
    lease.acquire()
    assert contents(folder)["term"] == 10
    lease.release()


def test_one_that_was_forgotten_is_not_watched(folder):
  elsewhere(folder, time=time.time() - 86400)
  lease, start = Lease(folder, "run"), time.monotonic()
  lease.acquire()
  assert time.monotonic() - start < 1
  lease.release()


def test_whoever_lost_it_knows_and_does_not_write_over_the_other(folder, capfd):
  lease = Lease(folder, "run", beat_seconds=0.5)
  lease.acquire()
  elsewhere(folder, term=2)
  with pytest.raises(LeaseLostError, match=r"this run has lost its lease: run_name=run is held by .* on far"):
    lease.check()
  deadline = time.monotonic() + 20
  while "has lost its lease" not in capfd.readouterr().err:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  lease.release()
  assert contents(folder)["host"] == "far"


def test_a_holder_that_is_written_over_by_one_who_lost_takes_it_back(folder):
  lease = Lease(folder, "run", beat_seconds=0.5)
  lease.acquire()
  elsewhere(folder, term=0)
  deadline = time.monotonic() + 20
  while contents(folder)["host"] == "far":
    assert time.monotonic() < deadline
    time.sleep(0.02)
  lease.check()
  lease.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"term": 1}'])
def test_what_is_no_lease_holds_nobody_up(folder, text):
  folder.mkdir()
  (folder / FILE).write_text(text)
  lease = quick(folder)
  lease.acquire()
  lease.check()
  lease.release()


class Taken(Callback):
  """Another run takes over after a step."""

  def __init__(self, folder, step):
    self._folder, self._step = folder, step

  def on_step(self, step, figures):
    if step == self._step:
      while not steps_in(self._folder / "checkpoints"):  # the save of the step before may be in the background
        time.sleep(0.01)
      elsewhere(self._folder, term=contents(self._folder)["term"] + 1)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_of_a_run_that_lost_its_lease_does_not_count(folder, background):
  keys = TINY_RUN | {"steps": 9, "checkpoint_period": 2, "async_checkpointing": background}
  config = tiny(**keys, base_output_directory=str(folder.parent))
  with pytest.raises(RunError, match=r"this run has lost its lease: .* Nothing more is saved"):
    maxtext.train(config, callbacks=[Taken(folder, 3)])
  assert steps_in(folder / "checkpoints") == [2]
  assert contents(folder)["host"] == "far", "it is left to whoever holds it"


def start(folder, *words):
  keys = TINY | TINY_RUN | {"base_output_directory": folder.parent}
  command = [sys.executable, "-m", "maxtext.cli", "train", *(f"{k}={v}" for k, v in keys.items()), *words]
  env = os.environ | flags()
  return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.chaos
def test_two_runs_of_one_name(folder):
  """The second is refused while the first runs, and goes on at once when that is killed."""
  first = start(folder, "steps=100000", "checkpoint_period=5")
  try:
    deadline = time.monotonic() + 300
    while not steps_in(folder / "checkpoints"):
      assert first.poll() is None
      assert time.monotonic() < deadline
      time.sleep(0.1)
    before = contents(folder)["holder"]
    second, _ = (process := start(folder, "steps=100000")).communicate(timeout=300)
    assert process.returncode == 1
    assert f"maxtext: run_name=run is held by the run of process {first.pid} on " in second
    assert contents(folder)["holder"] == before
    first.send_signal(signal.SIGKILL)
    first.wait()
    step = steps_in(folder / "checkpoints")[-1]
    said, _ = (process := start(folder, f"steps={step + 1}")).communicate(timeout=300)
    assert process.returncode == 0, said
    assert f"resuming from {folder}/checkpoints/{step}" in said
    assert not (folder / FILE).exists()
  finally:
    first.kill()
    first.communicate()
