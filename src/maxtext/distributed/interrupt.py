"""Being asked to end: Ctrl-C, SIGTERM or a preemption notice, agreed between the processes of a run."""

import ctypes
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from maxtext.distributed.multihost import once, problems_of_all
from maxtext.logs import ON_STDERR

_LOG = logging.getLogger(__name__)

# What a preempted machine of the large clouds has between notice and end, and Kubernetes' default between SIGTERM and
# SIGKILL.
NOTICE_SECONDS = 30.0


class Interrupt:
  """Listens from `listen` to `close`. The first signal asks the run to end well, a second Ctrl-C ends it at once.

  JAX's preemption service finds the moment at which all processes stop: its own handler of SIGTERM takes the notice, so
  ours notes the time and passes a SIGTERM on to it. A process alone needs no such thing.
  """

  def __init__(self) -> None:
    self.signal: signal.Signals | None = None  # what came first
    self.when_late: Callable[[], None] = lambda: None  # called NOTICE_SECONDS after it, on a process that got it
    self._noticed: float | None = None
    self._agreed = False
    self._asked = itertools.count(1)
    self._before: dict[int, Any] = {}
    self._native: ctypes.Array[ctypes.c_char] | None = None
    self._told, self._closed = threading.Event(), threading.Event()
    self._watch: threading.Thread | None = None

  def listen(self, *numbers: signal.Signals) -> None:
    """Starts; before, a signal does what it always does. Only a program's main thread can."""
    if threading.current_thread() is not threading.main_thread():
      return
    if self._watch is None:  # not in the handler: a signal may come while the main thread is starting another thread
      self._watch = threading.Thread(target=self._wait_until_late, name="notice", daemon=True)
      self._watch.start()
    for number in numbers:
      if number not in self._before:
        if number == signal.SIGTERM and jax.process_count() > 1:
          self._native = _native_action(number)
        self._before[number] = signal.signal(number, self._received)

  def agreed(self) -> bool:
    """Whether all processes end now; every process asks as often as every other, after every step and in between."""
    if self._agreed or jax.process_count() == 1:
      return self.signal is not None
    if not multihost_utils.reached_preemption_sync_point(next(self._asked)):
      return False
    self._agreed, self.signal = True, self.signal or signal.SIGTERM
    own = "" if self._noticed is None else f"{time.monotonic() - self._noticed}"
    ages = problems_of_all(once("notice"), own, NOTICE_SECONDS)
    self._noticed = time.monotonic() - max(map(float, ages.values()), default=0.0)
    return True

  @property
  def seconds(self) -> float:
    """Since the first signal that any process got."""
    return 0.0 if self._noticed is None else time.monotonic() - self._noticed

  def close(self) -> None:
    """Stops listening."""
    self._closed.set()
    self._told.set()
    if self._native is not None:
      _set_native_action(signal.SIGTERM, self._native)
      self._before.pop(signal.SIGTERM)
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before, self._native = {}, None

  def _wait_until_late(self) -> None:
    self._told.wait()
    if not self._closed.wait(NOTICE_SECONDS):
      self.when_late()

  def _received(self, number: int, frame: FrameType | None) -> None:
    if self.signal is not None and number == signal.SIGINT:
      _LOG.warning("maxtext: stopped at once.", extra=ON_STDERR)
      os._exit(128 + number)
    if self.signal is None:
      if jax.process_index() == 0:
        _LOG.warning("maxtext: ending after this step, with a checkpoint; once more ends at once.", extra=ON_STDERR)
      self._noticed = time.monotonic()
      self._told.set()
    self.signal = self.signal or signal.Signals(number)
    if jax.process_count() > 1:
      if self._native is not None:
        _set_native_action(signal.SIGTERM, self._native)
      os.kill(os.getpid(), signal.SIGTERM)


def _native_action(number: int) -> "ctypes.Array[ctypes.c_char]":
  """The handler that a library installed, as the C library describes it; Python knows of no such thing."""
  action = ctypes.create_string_buffer(1024)  # longer than any system's struct sigaction
  assert ctypes.CDLL(None).sigaction(int(number), None, action) == 0
  return action


def _set_native_action(number: int, action: "ctypes.Array[ctypes.c_char]") -> None:
  assert ctypes.CDLL(None).sigaction(int(number), action, None) == 0
