"""Requests to stop: Ctrl-C, SIGTERM or a preemption notice. All processes of a run stop after the same step."""

import ctypes
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from maxtext.distributed.multihost import gather_problems, unique_name
from maxtext.logs import ON_STDERR
from maxtext.status_line import erase_status_line

_LOG = logging.getLogger(__name__)

# The time between preemption notice and shutdown in the large clouds, and Kubernetes' default between SIGTERM and
# SIGKILL.
NOTICE_SECONDS = 30.0


class Interrupt:
  """Handles signals from `listen` to `close`.

  The first signal requests a clean stop; a second Ctrl-C exits at once. In an interactive session the second raises
  `KeyboardInterrupt` instead, which leaves the process alive.

  JAX's preemption service finds the step after which all processes stop. Its own SIGTERM handler starts that, so our
  handler records the time and passes a SIGTERM on to it. A run of one process does not use the service.
  """

  def __init__(self) -> None:
    self.signal: signal.Signals | None = None  # the first one
    # Called NOTICE_SECONDS after the first signal, on a process that received it.
    self.on_notice_expired: Callable[[], None] = lambda: None
    self._noticed_at: float | None = None
    self._agreed = False
    self._polls = itertools.count(1)
    self._before: dict[int, Any] = {}
    self._native: ctypes.Array[ctypes.c_char] | None = None
    self._signaled, self._closed = threading.Event(), threading.Event()
    self._watch: threading.Thread | None = None

  def listen(self, *numbers: signal.Signals) -> None:
    """Installs the handlers. Does nothing outside the main thread, which Python requires for handlers."""
    if threading.current_thread() is not threading.main_thread():
      return
    if self._watch is None:  # not in the handler: it could interrupt the start of another thread
      self._watch = threading.Thread(target=self._wait_for_notice_end, name="notice", daemon=True)
      self._watch.start()
    for number in numbers:
      if number not in self._before:
        if number == signal.SIGTERM and jax.process_count() > 1:
          self._native = _native_action(number)
        self._before[number] = signal.signal(number, self._received)

  def should_stop(self) -> bool:
    """Whether all processes stop now. Every process must call it equally often: after every step, and in between."""
    if self._agreed or jax.process_count() == 1:
      return self.signal is not None
    if not multihost_utils.reached_preemption_sync_point(next(self._polls)):
      return False
    self._agreed, self.signal = True, self.signal or signal.SIGTERM
    own = "" if self._noticed_at is None else f"{time.monotonic() - self._noticed_at}"
    ages = gather_problems(unique_name("notice"), own, NOTICE_SECONDS)
    self._noticed_at = time.monotonic() - max(map(float, ages.values()), default=0.0)
    return True

  @property
  def seconds_since_signal(self) -> float:
    """Seconds since the first signal that any process received."""
    return 0.0 if self._noticed_at is None else time.monotonic() - self._noticed_at

  def close(self) -> None:
    """Restores the previous handlers."""
    self._closed.set()
    self._signaled.set()
    if self._native is not None:
      _set_native_action(signal.SIGTERM, self._native)
      self._before.pop(signal.SIGTERM)
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before, self._native = {}, None

  def _wait_for_notice_end(self) -> None:
    self._signaled.wait()
    if not self._closed.wait(NOTICE_SECONDS):
      self.on_notice_expired()

  def _received(self, number: int, frame: FrameType | None) -> None:
    if self.signal is not None and number == signal.SIGINT:
      erase_status_line()
      if hasattr(sys, "ps1"):  # a notebook or a prompt outlives its runs
        raise KeyboardInterrupt
      _LOG.warning("maxtext: stopped at once.", extra=ON_STDERR)
      os._exit(128 + number)
    if self.signal is None:
      if jax.process_index() == 0:
        _LOG.warning("maxtext: ending after this step, with a checkpoint; once more ends at once.", extra=ON_STDERR)
      self._noticed_at = time.monotonic()
      self._signaled.set()
    self.signal = self.signal or signal.Signals(number)
    if jax.process_count() > 1:
      if self._native is not None:
        _set_native_action(signal.SIGTERM, self._native)
      os.kill(os.getpid(), signal.SIGTERM)


def _native_action(number: int) -> "ctypes.Array[ctypes.c_char]":
  """The signal handler that a C library installed. Python's `signal` module cannot return such handlers."""
  action = ctypes.create_string_buffer(1024)  # longer than any system's struct sigaction
  assert ctypes.CDLL(None).sigaction(int(number), None, action) == 0
  return action


def _set_native_action(number: int, action: "ctypes.Array[ctypes.c_char]") -> None:
  assert ctypes.CDLL(None).sigaction(int(number), action, None) == 0
