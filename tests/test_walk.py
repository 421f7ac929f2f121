"""The commands of the walks' pages, in order: with few steps and little text, and as they stand."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


# What some programs take last: questions, or pictures.
SHORT = {
  "examples/walk/measure.py": ["4"],
  "examples/vision/measure.py": ["--pictures", "2"],
  "examples/vision/shapes.py": ["400"],
}


def commands(page):
  blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
  return [shlex.split(line) for block in blocks for line in block.replace("\\\n", "").splitlines()]


def shortened(words):
  """Three steps, four questions, and the pages of this repository for a text."""
  if short := SHORT.get(words[1]):
    return [*words, *short]
  words = [re.sub(r"^(steps|num_batches)=.*", r"\1=3", word) for word in words]
  words = [re.sub(r"^eval_interval=\d+", "eval_interval=3", word) for word in words]
  if "--stdlib" not in words:
    return words
  at = words.index("--stdlib")
  return [*words[:at], "--from", str(ROOT / "docs"), "--suffix", ".md", "--to", "data/stdlib", *words[at + 1 :]]


def walk(folder, change=lambda words: words, flags="", page="walk.md"):
  """What each command printed, by its first words."""
  (folder / "examples").symlink_to(ROOT / "examples")
  environment = os.environ | {"XLA_FLAGS": flags, "PATH": f"{BIN}:{os.environ['PATH']}"}
  said = []
  for words in map(change, commands(page)):
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=3600, check=False)
    assert done.returncode == 0, (words, done.stderr)
    said.append((words, done.stdout))
  return said


def rates(said):
  """{run: {form: answers that have it}}, of a hundred."""
  found = {}
  for words, text in said:
    if "examples/walk/measure.py" in words:
      found[words[2]] = {form: int(count) for form, count in re.findall(r"^(\w+) +(\d+) of \d+$", text, re.MULTILINE)}
  return found


def last(folder, name, metric="eval_loss"):
  lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
  return [found for found in map(json.loads, lines) if metric in found][-1][metric]


@pytest.mark.slow
def test_every_command_works(tmp_path):
  said = walk(tmp_path, shortened, "--xla_backend_optimization_level=1")
  assert rates(said).keys() == {"runs/base", "runs/chat", "runs/aligned"}
  for name in ("base", "chat", "aligned", "student", "alone"):
    assert last(tmp_path, name) > 0
  assert "held-out loss" in (tmp_path / "curves.svg").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(10_000)
def test_the_walk_arrives(tmp_path):
  found = rates(walk(tmp_path))
  base, chat, aligned = (found[f"runs/{name}"] for name in ("base", "chat", "aligned"))
  assert base["signature"] + base["description"] < 20
  assert min(chat["signature"], chat["description"]) > 80
  assert chat["preferred"] < 20
  assert aligned["preferred"] > 40
  assert aligned["signature"] > 80
  assert last(tmp_path, "student") < last(tmp_path, "alone")


@pytest.mark.nightly
def test_every_command_of_reinforcement_learning_works(tmp_path):
  walk(tmp_path, shortened, "--xla_backend_optimization_level=1", "rl-walk.md")
  for name in ("sums", "sums-lag", "products"):
    assert 0 <= last(tmp_path, name, "eval_pass_rate") <= 1
  for name in ("sums", "products"):
    assert "held-out pass rate" in (tmp_path / f"{name}.svg").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_rewards_teach_what_the_page_says(tmp_path):
  said = walk(tmp_path, page="rl-walk.md")
  before = [float(rate) for _, text in said for rate in re.findall(r"first update: pass_rate ([\d.]+)", text)]
  assert len(before) == 3
  assert max(before) < 0.4, "the test shows nothing"
  for name in ("sums", "sums-lag", "products"):
    assert last(tmp_path, name, "eval_pass_rate") >= 0.8
  assert last(tmp_path, "products", "turns") > 1.9, "the calculator is called"


def answered(said):
  """(right answers, questions, percent of right answers with another picture)."""
  (text,) = [text for words, text in said if "examples/vision/measure.py" in words]
  return tuple(map(int, re.search(r"^all +(\d+) of (\d+) +with another picture (\d+)%", text, re.MULTILINE).groups()))


@pytest.mark.nightly
def test_every_command_of_the_pictures_works(tmp_path):
  assert answered(walk(tmp_path, shortened, "--xla_backend_optimization_level=1", "vision-walk.md"))[1] == 5
  assert (tmp_path / "answers.png").stat().st_size > 1000


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_the_model_sees_as_the_page_says(tmp_path):
  right, asked, swapped = answered(walk(tmp_path, page="vision-walk.md"))
  assert right >= 0.9 * asked
  assert swapped < 40
