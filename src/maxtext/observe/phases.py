"""Divides the time of a run's process among phases, of which it is in exactly one at any time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal["start_up", "restore", "compile", "step", "data_wait", "evaluation", "checkpoint_save", "other"]

PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseClock:
  """The seconds of each phase since it was made. It begins with `start_up`.

  Only `step` is productive. A monotonic clock is read, so a change of the system's time changes nothing.
  """

  def __init__(self) -> None:
    self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    self._phase: Phase = "start_up"
    self._since = time.monotonic()

  def enter(self, phase: Phase) -> Phase:
    """Ends the current phase and returns it."""
    now, before = time.monotonic(), self._phase
    self._seconds[before] += now - self._since
    self._phase, self._since = phase, now
    return before

  @contextmanager
  def within(self, phase: Phase) -> Iterator[None]:
    """This phase inside the block, and the one before it afterwards."""
    before = self.enter(phase)
    try:
      yield
    finally:
      self.enter(before)

  def move(self, seconds: float, source: Phase, target: Phase) -> None:
    """Counts seconds of the source for the target, where that is known only later."""
    self._seconds[source] -= seconds
    self._seconds[target] += seconds

  def seconds(self) -> dict[Phase, float]:
    """Of each phase until now. Their sum is the age of the clock."""
    self.enter(self._phase)
    return dict(self._seconds)
