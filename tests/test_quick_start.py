"""README's quick start, word for word, but for fewer steps."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"
HERE = Path(sys.executable).parent
STEPS = 24


def commands() -> list[list[str]]:
  """What README's first block of commands has after its installation."""
  block = re.search(r"## Quick start\n.*?```\n(.*?)```", README.read_text(), re.DOTALL)[1]
  lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ maxtext ")]
  return [shlex.split(line) for line in lines]


def environment(folder):
  cache = str(folder / "cache")
  return os.environ | {"XLA_FLAGS": "", "PATH": f"{HERE}:{os.environ['PATH']}", "M_JAX_CACHE_DIR": cache}


def run(words, folder):
  done = subprocess.run(
    words, capture_output=True, text=True, cwd=folder, env=environment(folder), timeout=600, check=False
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def losses_of(folder):
  file = folder / "metrics.jsonl"
  return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_from_text_to_a_falling_loss(tmp_path):
  prepare, train = commands()
  assert (prepare[:3], train[:2]) == (["maxtext", "data", "prepare"], ["maxtext", "train"])
  said = run(prepare, tmp_path)
  assert re.search(r"^data/stdlib: \d+ documents, [\d,]+ tokens of 4,096 kinds", said, re.MULTILINE)
  said = run([*train, f"steps={STEPS}"], tmp_path)
  losses = losses_of(tmp_path / "runs" / "first")
  assert len(losses) == STEPS
  assert 8 < losses[0] < 9, "nothing is known at first: about ln 4096"
  assert np.mean(losses[-5:]) < losses[0] - 1
  assert said.splitlines()[-1] == "report: runs/first/report.html"

  again = [*train[:-1], "run_name=again", f"steps={STEPS}"]
  with subprocess.Popen(again, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL) as interrupted:
    while len(losses_of(tmp_path / "runs" / "again")) < 8:
      assert interrupted.poll() is None
      time.sleep(0.1)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(60) == 130
  assert "resuming from" in run(again, tmp_path)
  assert losses_of(tmp_path / "runs" / "again") == losses, "interrupted and resumed, it is the same run"
