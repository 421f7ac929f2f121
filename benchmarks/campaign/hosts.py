"""Hosts of an elastic run that are lost, replaced and taken back, with packed documents of a mixture.

A host is lost when its agent is killed, and its processes with it; `maxtext launch` starts another agent in its place.
A portion is one run. At its end the tokens of every step must be those of a run that nothing disturbs: no document is
lost or repeated.
"""

import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.campaign.child import WrongError
from benchmarks.campaign.results import Count
from benchmarks.campaign.targets import MODEL
from tests.corpora import write_corpus

TARGETS, INPUTS = {"4 hosts": 4, "8 hosts": 8}, False
_LOSSES = 3  # of a run
_ROWS = 24  # of a batch; they divide among any number of hosts, or are filled up
_PATIENCE = 240.0
_STEP = re.compile(r"^(?:\[\d+\] )?step (\d+)/")
_GOING_ON = re.compile(r"Going on with (\d+) of \d+ hosts")


class Campaign:
  """Runs of so many hosts; `following` is the number of the next."""

  def __init__(self, hosts: int, folder: Path) -> None:
    self._hosts, self._folder = hosts, folder
    corpora = [write_corpus(folder / f"corpus{n}", (37, 1, 50, 12), seed=n) for n in range(2)]
    self._mixture = ";".join(f"{corpus},{weight}" for corpus, weight in zip(corpora, (0.7, 0.3), strict=True))

  def portion(self, count: Count) -> None:
    """One run. `seconds` of `count` are those from a loss to the next step."""
    (number,) = count.following or [0]
    rng, name = random.Random(number), f"run{number}"
    run = _Run(self._launch(name))
    try:
      run.wait_for(_STEP)
      for _ in range(_LOSSES):
        lost = time.monotonic()
        os.kill(rng.choice(_children(run.process.pid)), signal.SIGKILL)
        run.wait_for(_GOING_ON, lambda found: int(found[1]) < self._hosts)
        run.wait_for(_STEP)
        count.seconds.append(round(time.monotonic() - lost, 1))
        count.add("lost, and the others went on")
        run.wait_for(_GOING_ON, lambda found: int(found[1]) == self._hosts)
        run.wait_for(_STEP)
        count.add("back, and all went on")
    finally:
      code = run.end()
    if code != 128 + signal.SIGTERM:
      raise WrongError(f"{name} ended with {code}: {run.text[-3000:]}")
    ours = self._tokens(name)
    subprocess.run(self._train(f"{name}-whole", 1, len(ours)), check=True, capture_output=True, env=_environment())
    if ours != self._tokens(f"{name}-whole"):
      raise WrongError(f"{name}: the tokens of its steps are not those of a run that nothing disturbs")
    count.following = [number + 1]

  def _train(self, name: str, hosts: int, steps: int) -> list[str]:
    data = {"dataset_type": "grain", "tokenize_train_data": False, "tokenizer_path": "", "num_epoch": 10_000}
    keys = MODEL | data | {
      "vocab_size": 1024, "grain_train_files": self._mixture, "per_device_batch_size": _ROWS / hosts, "steps": steps,
      "base_output_directory": self._folder, "run_name": name, "ici_fsdp_parallelism": -1, "checkpoint_period": 5,
      "jax_cache_dir": self._folder / "compiled",
    }  # fmt: skip
    return [sys.executable, "-m", "maxtext.cli", "train", *(f"{key}={value}" for key, value in keys.items())]

  def _launch(self, name: str) -> subprocess.Popen[str]:
    words = self._train(name, self._hosts, 100_000)[3:]
    elastic = ["elastic_enabled=true", "elastic_min_slice_count=1", "elastic_max_retries=100"]
    command = [sys.executable, "-m", "maxtext.cli", "launch", "--processes", str(self._hosts), "--", *words, *elastic]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment())

  def _tokens(self, name: str) -> list[tuple[int, float]]:
    lines = (self._folder / name / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["tokens"]) for row in map(json.loads, lines)]


class _Run:
  """A process, and what it prints as it comes."""

  def __init__(self, process: subprocess.Popen[str]) -> None:
    self.process, self.text = process, ""
    self._lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=self._read, daemon=True).start()

  def wait_for(self, pattern: re.Pattern[str], holds: Callable[[re.Match[str]], bool] = lambda _: True) -> None:
    """Until a line has it that comes after this call, and after those that were waited for."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and self.process.poll() is None:
      try:
        found = pattern.search(self._lines.get(timeout=0.2))
      except queue.Empty:
        continue
      if found and holds(found):
        return
    raise WrongError(f"no {pattern.pattern} within {_PATIENCE:g} s: {self.text[-3000:]}")

  def end(self) -> int:
    self.process.terminate()
    try:
      return self.process.wait(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
      self.process.kill()
      return self.process.wait()

  def _read(self) -> None:
    for line in self.process.stdout or ():
      self.text += line
      self._lines.put(line)


def _children(pid: int) -> list[int]:
  return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _environment() -> dict[str, str]:
  """Without the library that this process has loaded, and with one device for each process."""
  return {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "XLA_FLAGS")}
