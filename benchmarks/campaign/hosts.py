"""Hosts of an elastic run that are lost, replaced and taken back, with packed documents of a mixture; and, to compare
with, processes of a run that is started again as a whole.

A host is lost when its agent is killed, and its processes with it; `maxtext launch` starts another agent in its place.
A portion is one run. At its end the tokens of every step must be those of a run that nothing disturbs: no document is
lost or repeated.
"""

import os
import queue
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.campaign.child import WrongError
from benchmarks.campaign.packed import MAXTEXT, STEP, PackedRuns, environment
from benchmarks.campaign.results import Count

_AS_A_WHOLE = "4 processes, restarted as a whole"
TARGETS, INPUTS = {"4 hosts": (4, True), "8 hosts": (8, True), _AS_A_WHOLE: (4, False)}, False
_LOSSES = 3  # of a run
_PATIENCE = 240.0
_STARTING_ALL = re.compile(r"maxtext: starting all")
_GOING_ON = re.compile(r"Going on with (\d+) of \d+ hosts")


class Campaign:
  """Runs of so many hosts, elastic or not; `following` is the number of the next."""

  def __init__(self, target: tuple[int, bool], folder: Path) -> None:
    self._runs = PackedRuns(folder)
    self._hosts, self._elastic = target

  def portion(self, count: Count) -> None:
    """One run. `seconds` of `count` are those from a loss to the next step."""
    (number,) = count.following or [0]
    rng, name = random.Random(number), f"run{number}"
    run = _Run(self._launch(name))
    try:
      run.wait_for(STEP)
      for _ in range(_LOSSES):
        lost = time.monotonic()
        os.kill(rng.choice(_children(run.process.pid)), signal.SIGKILL)
        if not self._elastic:
          run.wait_for(_STARTING_ALL)
          run.wait_for(STEP)
          count.seconds.append(round(time.monotonic() - lost, 1))
          count.add("lost, and all were started again")
          continue
        run.wait_for(_GOING_ON, lambda found: int(found[1]) < self._hosts)
        run.wait_for(STEP)
        count.seconds.append(round(time.monotonic() - lost, 1))
        count.add("lost, and the others went on")
        run.wait_for(_GOING_ON, lambda found: int(found[1]) == self._hosts)
        run.wait_for(STEP)
        count.add("back, and all went on")
    finally:
      code = run.end()
    if code != 128 + signal.SIGTERM:
      raise WrongError(f"{name} ended with {code}: {run.text[-3000:]}")
    self._runs.expect_undisturbed(name)
    count.following = [number + 1]

  def _launch(self, name: str) -> subprocess.Popen[str]:
    words = self._runs.train(name, self._hosts, 100_000)
    elastic = ["elastic_enabled=true", "elastic_min_slice_count=1", "elastic_max_retries=100"]
    flags, keys = ([], elastic) if self._elastic else (["--restarts", "100"], [])
    command = [*MAXTEXT, "launch", "--processes", str(self._hosts), *flags, "--", *words, *keys]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())


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
