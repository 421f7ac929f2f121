"""Being asked to end: Ctrl-C, SIGTERM or a preemption notice, agreed between the processes of a run."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Interrupt:
  """Listens from `listen` to `close`. The first signal asks the run to end well, a second Ctrl-C ends it at once.

  JAX's preemption service finds the step at which all processes stop: it takes SIGTERM as the notice, so a Ctrl-C is
  passed on to it as one. A process alone needs no such thing.
  """

  def __init__(self) -> None:
    self.signal: signal.Signals | None = None  # what came first
    self._before: dict[int, Any] = {}

  def listen(self) -> None:
    """Starts; before, a signal does what it always does. Only a program's main thread can."""
    if self._before or threading.current_thread() is not threading.main_thread():
      return
    listened = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
    self._before = {number: signal.signal(number, self._received) for number in listened}

  def agreed(self, step: int) -> bool:
    """Whether all processes end after this step; every process asks after every step."""
    if jax.process_count() == 1:
      return self.signal is not None
    if not multihost_utils.reached_preemption_sync_point(step):
      return False
    self.signal = self.signal or signal.SIGTERM
    return True

  def close(self) -> None:
    """Stops listening."""
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before = {}

  def _received(self, number: int, frame: FrameType | None) -> None:
    if self.signal is not None and number == signal.SIGINT:
      print("maxtext: stopped at once.", file=sys.stderr, flush=True)
      os._exit(128 + number)
    if self.signal is None and jax.process_index() == 0:
      print("maxtext: ending after this step, with a checkpoint; once more ends at once.", file=sys.stderr, flush=True)
    self.signal = self.signal or signal.Signals(number)
    if jax.process_count() > 1:
      os.kill(os.getpid(), signal.SIGTERM)
