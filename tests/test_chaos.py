"""Runs that are killed, anywhere and again and again, beside one that is not."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from maxtext.checkpoint.files import read
from maxtext.checkpoint.location import locate, steps_in
from maxtext.checkpoint.metadata import CheckpointMetadata
from maxtext.checkpoint.options import array_storage
from maxtext.distributed.supervisor import supervise
from maxtext.observe.goodput_journal import read_goodput
from tests.chaos_worker import ROWS
from tests.corpora import write_corpus
from tests.flags import flags
from tests.support import TINY, tiny

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.mesh]
STEPS, DEVICES = 60, 4  # a kill costs at most some four steps, and twenty must fit
STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True, scope="module")
def leave_nothing_behind():
  yield
  for process in STARTED:
    if process.poll() is None:
      kill(process)


class Run:
  """A run in a folder of its own, started as often as it takes."""

  def __init__(self, folder: Path, corpus: Path, steps: int = STEPS) -> None:
    self.folder, self.corpus, self.steps = folder, corpus, steps
    self.checkpoints = folder / "run" / "checkpoints"
    self.log = folder.with_suffix(".log")

  def start(self, processes: int) -> subprocess.Popen:
    words = [str(processes), str(DEVICES // processes), str(self.folder), str(self.corpus), str(self.steps)]
    with open(self.log, "a") as log:
      command = [sys.executable, "-m", "tests.chaos_worker", *words]
      process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    STARTED.append(process)
    return process

  def finish(self, processes: int) -> None:
    assert self.start(processes).wait(timeout=300) == 0, self.log.read_text()[-3000:]

  def unfinished(self) -> list[Path]:
    return list(self.checkpoints.glob("*.orbax-checkpoint-tmp*"))

  def lines(self) -> int:
    return self.log.read_text().count("  loss ") if self.log.exists() else 0

  def history(self) -> list[tuple]:
    rows = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in rows]

  def parameters(self) -> dict[str, np.ndarray]:
    folder = locate(str(self.checkpoints))
    record = CheckpointMetadata.read(folder)
    assert record.step == STEPS
    return read(
      array_storage(tiny()), folder, dict.fromkeys(n for n in record.arrays if not n.startswith("data/")), record
    )

  def batches(self) -> dict[tuple[int, int], set[tuple]]:
    """For each batch and row, everything that any process ever saw there."""
    seen: dict[tuple[int, int], set[tuple]] = {}
    for file in self.folder.glob("batches-*.jsonl"):
      for line in file.read_text().splitlines():
        if line.endswith("}"):  # a kill may cut the last one
          row = json.loads(line)
          seen.setdefault((row["batch"], row["row"]), set()).add((row["hash"], *row["documents"]))
    return seen


def kill(process: subprocess.Popen) -> None:
  """The whole run, at once: the supervisor and the processes that it started."""
  os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def in_start_up(run: Run, process: subprocess.Popen, rng: random.Random, start_up: float) -> None:
  """At most until its first step: where the machine was busier when `start_up` was taken, a start is over sooner."""
  deadline, before = time.monotonic() + rng.uniform(0, start_up), run.lines()
  while time.monotonic() < deadline and run.lines() == before and process.poll() is None:
    time.sleep(0.01)


def in_a_save(run: Run, process: subprocess.Popen, rng: random.Random, start_up: float) -> None:
  left = set(run.unfinished())
  while not set(run.unfinished()) - left and process.poll() is None:
    time.sleep(0.002)
  time.sleep(rng.uniform(0, 0.03))


def in_a_step(run: Run, process: subprocess.Popen, rng: random.Random, start_up: float) -> None:
  wanted = run.lines() + rng.randint(1, 4)
  while run.lines() < wanted and process.poll() is None:
    time.sleep(0.01)
  time.sleep(rng.uniform(0, 0.1))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return write_corpus(tmp_path_factory.mktemp("chaos") / "corpus", (37, 1, 50, 12))


@pytest.fixture(scope="module")
def whole(corpus):
  """The run that nothing interrupts, on two processes; and how long one takes to its first step after that."""
  run, timed = (Run(corpus.parent / name, corpus) for name in ("whole", "timed"))
  run.finish(2)
  process, start = timed.start(2), time.monotonic()
  while not timed.lines():
    assert process.poll() is None, timed.log.read_text()[-3000:]
    time.sleep(0.05)
  kill(process)
  return run, time.monotonic() - start


def documents(run: Run) -> list[int]:
  """Of every batch of the run: what the documents in it begin with, or the pieces of those that were cut."""
  seen = run.batches()
  return [first for batch in range(1, STEPS + 1) for row in range(ROWS) for first in min(seen[batch, row])[1:]]


@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_killed_again_and_again_the_history_is_the_same(whole, corpus, times):
  expected, start_up = whole
  run, rng = Run(corpus.parent / f"killed{times}", corpus), random.Random(11)
  moments = ([in_start_up, in_a_save, in_a_step] * times)[:times]
  rng.shuffle(moments)
  interrupted, kills = 0, 0
  for moment in moments:
    process = run.start(2)
    moment(run, process, rng, start_up)
    if process.poll() is not None:
      break
    kill(process)
    kills += 1
    interrupted += bool(run.unfinished())
  run.finish(2)
  assert kills == times, "the run was to be longer than its kills"
  assert run.history() == expected.history(), "losses, gradient norms and token counts, bit for bit"
  ours, theirs = run.parameters(), expected.parameters()
  assert ours.keys() == theirs.keys()
  assert all(np.array_equal(ours[name], theirs[name]) for name in ours), "parameters and optimizer, bit for bit"
  lost, repeated = compare_documents(run, expected)
  print(f"\n{kills} kills, {interrupted} saves interrupted, documents lost or repeated ({lost}, {repeated})")
  assert (lost, repeated) == (0, 0)
  assert interrupted >= times // 4
  assert_time_adds_up(run.folder / "run", times)


def assert_time_adds_up(folder: Path, kills: int) -> None:
  """Of what the journal's first start began with, to its last line, every second is accounted for."""
  files = sorted((folder / "journal").iterdir(), key=lambda file: int(file.stem))
  began = json.loads(files[0].read_text())["began_wall"]
  found = read_goodput(folder)
  assert 1 < found.starts <= kills + 1
  assert found.total == pytest.approx(files[-1].stat().st_mtime - began, abs=0.5)
  assert min(found.seconds.values()) >= 0
  assert found.seconds["lost_steps"] > 0
  assert 0 < found.goodput < 1


def compare_documents(run: Run, expected: Run) -> tuple[int, int]:
  """Every batch as it was, whoever made it and however often; then what the history as a whole read."""
  whole, killed = expected.batches(), run.batches()
  wrong = [place for place, seen in killed.items() if place in whole and seen != whole[place]]
  assert not wrong, f"batches that differ: {wrong[:5]}"
  ours, theirs = Counter(documents(run)), Counter(documents(expected))
  return (theirs - ours).total(), (ours - theirs).total()


def test_host_counts_change_between_kills(whole, corpus):
  """1, 2, 4, 2, 1 processes over the same four devices."""
  expected, start_up = whole
  run, rng = Run(corpus.parent / "moved", corpus), random.Random(5)
  interrupted = 0
  for processes, moment in ((1, in_a_step), (2, in_a_save), (4, in_a_step), (2, in_a_save)):
    process = run.start(processes)
    moment(run, process, rng, start_up)
    assert process.poll() is None, run.log.read_text()[-3000:]
    kill(process)
    interrupted += bool(run.unfinished())
  run.finish(1)
  lost, repeated = compare_documents(run, expected)
  ours, theirs = np.array(run.history()), np.array(expected.history())
  np.testing.assert_array_equal(ours, theirs, "losses, gradient norms and token counts, bit for bit")
  print(f"\n4 kills, {interrupted} saves interrupted, documents lost or repeated ({lost}, {repeated})")
  assert (lost, repeated) == (0, 0)


@pytest.mark.nightly
def test_one_replica_reads_and_sends_to_the_other(tmp_path):
  keys = TINY | {"steps": 3, "ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "per_device_batch_size": 2,
                 "enable_checkpointing": True, "base_output_directory": tmp_path, "run_name": "run",
                 "checkpoint_period": 2}  # fmt: skip

  def launch(**changes):
    words = [f"{key}={value}" for key, value in (keys | changes).items()]
    command = [
      sys.executable,
      "-m",
      "maxtext.cli",
      "launch",
      "--processes",
      "2",
      "--devices",
      "2",
      "--",
      "train",
      *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

  assert launch().returncode == 0
  metrics = tmp_path / "run" / "metrics.jsonl"
  loss = json.loads(metrics.read_text().splitlines()[-1])["loss"]
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "3")
  wrong = launch(enable_single_replica_ckpt_restoring=True, ici_data_parallelism=1, ici_fsdp_parallelism=4)
  assert wrong.returncode == 2
  assert "the mesh has 1 along 'data'" in wrong.stdout
  done = launch(enable_single_replica_ckpt_restoring=True)
  assert done.returncode == 0, done.stdout
  assert "resuming from" in done.stdout
  assert json.loads(metrics.read_text().splitlines()[-1])["loss"] == loss


def test_a_save_that_fails_on_one_process_fails_on_all_and_the_run_goes_on(tmp_path):
  """Process 1 cannot write step 4; the step before it stays, and nobody waits for the one that failed."""
  steps = tmp_path / "run" / "checkpoints"
  keys = TINY | {"steps": 5, "ici_fsdp_parallelism": 4, "per_device_batch_size": 2, "base_num_decoder_layers": 1,
                 "enable_checkpointing": True, "base_output_directory": tmp_path, "run_name": "run",
                 "checkpoint_period": 2, "max_num_checkpoints_to_keep": 1,
                 "save_checkpoint_on_completion": False}  # fmt: skip
  words = ["limited", "4", str(steps / "2"), *(f"{key}={value}" for key, value in keys.items())]
  said = io.StringIO()
  environment = flags(devices=2)
  started = time.monotonic()
  with ThreadPoolExecutor(1) as thread:  # the supervisor would take SIGTERM from the main one
    command = [sys.executable, "-m", "tests.run_worker", *words]
    code = thread.submit(supervise, command, 2, environment=environment, out=said).result()
  assert code == 0, said.getvalue()[-3000:]
  assert time.monotonic() - started < 300, "Orbax alone lets the others wait for ten minutes"
  assert re.search(
    r"\[0\] maxtext: the checkpoint of step 4 failed: .*\(process 1\); the last good one is step 2\.\n", said.getvalue()
  )
  assert [path.name for path in steps.iterdir()] == ["2"]
  record = CheckpointMetadata.read(epath.Path(steps / "2"))
  assert read(array_storage(tiny()), epath.Path(steps / "2"), dict.fromkeys(record.arrays), record), "it is whole"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_told_to_end_all_processes_save_the_same_step(corpus, number):
  """The supervisor is told; the processes agree on the step."""
  run = Run(corpus.parent / f"told{number}", corpus, steps=2000)  # it must not end by itself
  process = run.start(2)
  while run.lines() < 3:
    assert process.poll() is None, run.log.read_text()[-3000:]
    time.sleep(0.05)
  os.kill(process.pid, number)
  assert process.wait(timeout=120) == 128 + number, run.log.read_text()[-3000:]
  steps = steps_in(epath.Path(run.checkpoints))
  assert steps[-1] == run.history()[-1][0] < 2000
  saved = re.search(rf"\[0\] maxtext: step {steps[-1]} was saved (\d+\.\d) s after SIGTERM\.\n", run.log.read_text())
  assert saved
  assert float(saved[1]) > 0
  assert not re.search(r"Traceback", run.log.read_text())
