"""README's quick start, word for word, but for fewer steps."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"
HERE = Path(sys.executable).parent


def commands() -> list[list[str]]:
  """What README's first block of commands has after its installation."""
  block = re.search(r"## Quick start\n.*?```\n(.*?)```", README.read_text(), re.DOTALL)[1]
  lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ maxtext ")]
  return [shlex.split(line) for line in lines]


def run(words, folder):
  env = os.environ | {"XLA_FLAGS": "", "PATH": f"{HERE}:{os.environ['PATH']}"}
  done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=env, timeout=600, check=False)
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
def test_from_text_to_a_falling_loss(tmp_path):
  prepare, train = commands()
  assert (prepare[:3], train[:2]) == (["maxtext", "data", "prepare"], ["maxtext", "train"])
  said = run(prepare, tmp_path)
  assert re.search(r"^data/stdlib: \d+ documents, [\d,]+ tokens of 4,096 kinds", said, re.MULTILINE)
  said = run([*train, "steps=40", "jax_cache_dir="], tmp_path)
  lines = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
  losses = [json.loads(line)["loss"] for line in lines]
  assert len(losses) == 40
  assert 8 < losses[0] < 9, "nothing is known at first: about ln 4096"
  assert np.mean(losses[-5:]) < losses[0] - 2
  assert said.splitlines()[-1] == "report: runs/first/report.html"
