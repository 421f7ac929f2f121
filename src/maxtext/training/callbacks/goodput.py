"""The run's journal, and what it says among the metrics of a run that goes on."""

import time
from collections import deque
from pathlib import Path
from statistics import median

from etils import epath

from maxtext.observe.goodput_journal import GoodputJournal, read_goodput
from maxtext.training.callbacks.base import Callback

_RECENT_STEPS = 1000


class KeepJournal(Callback):
  """Keeps the journal of this start."""

  def __init__(self, journal: GoodputJournal) -> None:
    self._journal = journal

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    self._journal.finished(step)

  def close(self) -> None:
    self._journal.close()


class MonitorGoodput(Callback):
  """Adds goodput, and the share of every other kind of time, to the metrics, every so many seconds."""

  def __init__(self, folder: Path, store: epath.Path | None, interval: float) -> None:
    self._folder, self._store, self._interval, self._due = folder, store, interval, 0.0

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    if time.monotonic() < self._due or (found := read_goodput(self._folder, self._store)) is None:
      return
    self._due = time.monotonic() + self._interval
    metrics["goodput"] = found.goodput
    metrics |= {f"badput_{kind}": spent / found.total for kind, spent in found.seconds.items() if kind != "step"}


class MonitorStepTime(Callback):
  """Adds how much longer than the median of recent steps a step took, every so many seconds."""

  def __init__(self, interval: float) -> None:
    self._interval, self._due = interval, 0.0
    self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    if self._recent and time.monotonic() >= self._due:
      self._due = time.monotonic() + self._interval
      metrics["step_time_deviation_seconds"] = metrics["step_time_seconds"] - median(self._recent)
    self._recent.append(metrics["step_time_seconds"])
