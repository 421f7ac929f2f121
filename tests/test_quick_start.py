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
STEPS = 16


def commands(number: int = 0) -> list[list[str]]:
  """What one of README's blocks of commands has after the installation."""
  start = README.read_text().split("## Quick start\n")[1]
  block = re.findall(r"```\n(.*?)```", start, re.DOTALL)[number]
  lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith(("$ maxtext ", "$ python -c"))]
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
    while len(losses_of(tmp_path / "runs" / "again")) < 5:
      assert interrupted.poll() is None
      time.sleep(0.1)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(60) == 130
  assert "resuming from" in run(again, tmp_path)
  assert losses_of(tmp_path / "runs" / "again") == losses, "interrupted and resumed, it is the same run"


@pytest.mark.slow
def test_from_one_text_file_to_samples_of_it(tmp_path):
  """README's second block, word for word, but for fewer steps."""
  write, prepare, train, decode = commands(1)
  assert write[-2:] == [">", "input.txt"]
  (tmp_path / "input.txt").write_text(run([sys.executable, *write[1:-2]], tmp_path))
  said = run(prepare, tmp_path)
  assert re.search(r"^data/input: \d+ documents, [\d,]+ tokens of 2,048 kinds", said, re.MULTILINE)
  assert re.search(
    r"^data/input: \d documents? with [\d,]+ tokens \(\d\.\d%\) held out for evaluation$", said, re.MULTILINE
  )
  said = run([*train, "steps=12", "eval_interval=6"], tmp_path)
  folder = tmp_path / "runs" / "mine"
  metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  losses = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
  assert losses.keys() == {6, 12}
  assert 4 < losses[12] < losses[6] < 8
  samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
  assert [(line["step"], line["prompt"]) for line in samples] == [(6, "The"), (12, "The")]
  assert all(f'sample at step {line["step"]}: "The" -> ' in said for line in samples)
  assert run(decode, tmp_path).startswith("The")
