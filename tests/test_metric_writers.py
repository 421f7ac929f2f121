"""Figures on their way out: nothing that happens to them ends a run, holds it up, or makes a file unreadable."""

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress

import pytest
from etils import epath

import maxtext
from maxtext import ConfigError
from maxtext.observe.metric_writers import (
  ConsoleWriter,
  FaultTolerantWriter,
  JsonLinesWriter,
  ObjectStoreWriter,
  PrometheusWriter,
)
from maxtext.observe.report import write_report
from maxtext.training.callbacks.base import Callback
from tests.flags import flags
from tests.support import TINY, tiny


@pytest.fixture
def small_disk(tmp_path):
  if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False).returncode:
    pytest.skip("a small disk needs the right to mount one")
  yield tmp_path
  subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(disk):
  """To the last byte: a file may still grow within its last page."""
  with open(disk / "rubbish", "ab", buffering=0) as file:
    for size in (2**20, 4096, 1):
      try:
        while file.write(b"x" * size):
          pass
      except OSError:
        continue


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_console_on_a_full_disk_ends_nothing():
  full = open("/dev/full", "w")  # noqa: SIM115
  ConsoleWriter(1, range(3), full).write(1, {"loss": 1.0})
  with suppress(OSError):
    full.close()


class Full(Callback):
  """The disk is full from one step to another."""

  def __init__(self, disk, steps):
    self._disk, self._steps = disk, steps

  def on_step(self, step, figures):
    if step == self._steps.start:
      fill(self._disk)
    if step == self._steps.stop:
      (self._disk / "rubbish").unlink()


def steps_in(path):
  return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def events_in(folder):
  from tensorboardX.proto.event_pb2 import Event

  (path,) = folder.iterdir()
  data, found = path.read_bytes(), []
  while data:
    (size,) = struct.unpack("<Q", data[:8])
    found.append(Event.FromString(data[12 : 12 + size]).step)
    data = data[16 + size :]
  return found


@pytest.mark.chaos
def test_a_full_disk_delays_figures_and_nothing_else(small_disk, capsys):
  """Full for 40 steps, and then all figures are there, in order; full again, a run of the same name starts and ends."""
  keys = {"run_name": "run", "base_output_directory": str(small_disk), "per_device_batch_size": 1}
  state = maxtext.train(tiny(**keys, steps=60), callbacks=[Full(small_disk, range(10, 50))])
  assert int(state.step) == 60
  run = small_disk / "run"
  assert steps_in(run / "metrics.jsonl") == list(range(1, 61))
  assert events_in(run / "tensorboard") == [0, *range(1, 61)]
  said = capsys.readouterr().out
  for name in ("metrics.jsonl", "tensorboard"):
    assert said.count(f"{run}/{name} cannot be written: No space left on device.") == 1
  assert said.splitlines()[-1] == f"report: {run}/report.html"

  config = (run / "config.json").read_text()
  fill(small_disk)
  state = maxtext.train(tiny(**keys, steps=70))
  assert int(state.step) == 70
  assert "run.json and config.json cannot be written" in capsys.readouterr().out
  assert (run / "config.json").read_text() == config, "what cannot be replaced stays whole"


@pytest.mark.slow
@pytest.mark.chaos
def test_a_disk_too_small_for_a_checkpoint_is_said_in_a_few_lines(tmp_path):
  """Orbax logs each exception four times, with tracebacks through all its threads."""
  disk = tmp_path / "disk"
  disk.mkdir()
  if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], check=False).returncode:
    pytest.skip("a small disk needs the right to mount one")
  keys = TINY | {"steps": 4, "checkpoint_period": 2, "enable_checkpointing": True, "run_name": "run"}
  keys |= {"base_output_directory": disk, "enable_tensorboard": False}
  words = [sys.executable, "-m", "maxtext.cli", "train", *(f"{key}={value}" for key, value in keys.items())]
  try:
    done = subprocess.run(
      words, capture_output=True, text=True, env=os.environ | flags(), timeout=600, check=False, cwd=tmp_path
    )
  finally:
    subprocess.run(["umount", str(disk)], check=True)
  assert done.returncode == 1, done.stderr
  assert done.stderr.splitlines()[-1] == "maxtext: the run ended at step 4, and its last state could not be saved."
  assert len(done.stderr.splitlines()) < 5, done.stderr
  assert re.search(r"maxtext: the checkpoint of step 2 failed: .*No space left on device", done.stdout)


def test_torn_lines_are_skipped(tmp_path):
  """By a run that goes on after step 3, and by the report."""
  file = tmp_path / "metrics.jsonl"
  lines = [
    '{"step": 1, "loss": 5.0}\n',
    '{"step": 2, "lo\n',
    "[3]\n",
    '{"step": 3, "loss": "x"}\n',
    '{"step": 4, "loss"',
  ]
  file.write_bytes("".join(lines).encode() + b"\xff\xfe: 1}")
  write_report([tmp_path], tmp_path / "report.html")
  assert "<dt>Loss</dt><dd>5.0000<" in (tmp_path / "report.html").read_text()
  sink = JsonLinesWriter(file, after=3)
  sink.write(4, {"loss": 4.0})
  sink.write(5, {"loss": 3.0})
  sink.close()
  *before, fourth, fifth = file.read_text().splitlines(keepends=True)
  assert before == lines[:4]
  assert json.loads(fourth) == {"step": 4, "started": pytest.approx(time.time(), abs=60), "loss": 4.0}
  assert fifth == '{"step": 5, "loss": 3.0}\n'
  file.write_text("\n\x00\x00\n")
  write_report([tmp_path], tmp_path / "report.html")
  with pytest.raises(ConfigError, match=r"metrics_file=.*/metrics.jsonl/deeper cannot be written: "):
    JsonLinesWriter(file / "deeper")


def test_a_port_in_use_is_waited_for(capsys):
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    sink = FaultTolerantWriter(PrometheusWriter(port), f"prometheus_port={port}")
    sink.write(1, {"loss": 2.0})
    sink.write(2, {"loss": 1.5})
  said = capsys.readouterr().out
  assert re.fullmatch(rf"maxtext: prometheus_port={port} cannot be written: Address already in use\. .*\n", said)
  sink.write(3, {"loss": 1.25})
  found = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
  sink.close()
  assert re.search(r"^maxtext_loss 1\.25$", found, re.M)


def stored(folder):
  return {path.name: [json.loads(line)["step"] for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_a_store_that_hangs_holds_nothing_up(tmp_path, capsys):
  """A pipe that nobody reads stands where the first file will be: whoever opens it waits for ever."""
  os.mkfifo(tmp_path / "from-step-000000001.jsonl")
  took = []

  def run():
    start = time.monotonic()
    sink = FaultTolerantWriter(ObjectStoreWriter(epath.Path(tmp_path), 2, patience=0.5), "the store")
    for step in range(1, 6):
      sink.write(step, {"loss": 1.0})
    took.append(time.monotonic() - start)
    sink.close()
    took.append(time.monotonic() - start)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(20)
  assert len(took) == 2, "still waiting"
  assert took[0] < 0.5 < took[1] < 5
  assert "the store misses the last metrics: the store did not answer for 0.5 seconds." in capsys.readouterr().out


def test_a_store_that_fails_gets_all_figures_later(tmp_path, capsys):
  folder = tmp_path / "metrics"
  folder.write_text("no folder")
  sink = FaultTolerantWriter(ObjectStoreWriter(epath.Path(folder), 2), "the store")
  for step in range(1, 5):
    sink.write(step, {"loss": 1.0})
    time.sleep(0.05)
  folder.unlink()
  folder.mkdir()
  for step in range(5, 8):
    sink.write(step, {"loss": 1.0})
  sink.close()
  assert sorted(step for steps in stored(folder).values() for step in steps) == list(range(1, 8))
  assert capsys.readouterr().out.count("the store cannot be written") == 1
  (folder / "from-step-000000005.jsonl").write_text('{"step": 5}\n{"step"\n')
  sink = ObjectStoreWriter(epath.Path(folder), 2, after=5)
  sink.write(6, {"loss": 1.0})
  sink.close()
  assert sorted(step for steps in stored(folder).values() for step in steps)[-2:] == [5, 6]
  shutil.rmtree(folder)
