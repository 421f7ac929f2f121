"""What happens to a run, told to a command so that somebody hears of it: failure, stall, recovery. Imports no JAX."""

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

from maxtext.configs import ConfigError
from maxtext.configs.secrets import redact

_LOG = logging.getLogger(__name__)

Event = Literal["failure", "stall", "recovery"]

_TIMEOUT_SECONDS = 30.0  # for the command
_SHOWN = 200  # characters of what it says when it fails


class EventHook:
  """Runs a command for every event, with a JSON object on its standard input. One that fails does not end the run.

  As a context manager it tells of the error that ends its block. After a step it looks for stalls, in a thread.

  Args:
    command: with its arguments; no shell reads it.
    run: the run's name.
    step: the one that this start resumes after; 0 is a new run.
    stall_seconds: without a finished step, after which the run has stalled; 0 is never.
  """

  def __init__(self, command: str, run: str, step: int, stall_seconds: float) -> None:
    self._command, self._run, self._step, self._stall_seconds = shlex.split(command), run, step, stall_seconds
    self._resumed, self._stalled = bool(step), False
    self._moved, self._lock, self._done = time.monotonic(), threading.Lock(), threading.Event()
    self._watch: threading.Thread | None = None

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
  ) -> None:
    self._done.set()
    if isinstance(error, Exception) and not isinstance(error, ConfigError):
      self._tell("failure", redact(str(error)) or type(error).__name__)

  def failed(self, why: str) -> None:
    """The run ends here, without an error that leaves the block."""
    self._tell("failure", why)

  def finished(self, step: int) -> None:
    """A step has finished."""
    with self._lock:
      recovered = "training goes on after a stall" if self._stalled else ""
      recovered = recovered or (f"training goes on after step {self._step}" if self._resumed else "")
      self._resumed = self._stalled = False
      self._step, self._moved = step, time.monotonic()
    if recovered:
      threading.Thread(target=self._tell, args=("recovery", recovered), name="event").start()
    if self._stall_seconds and self._watch is None:
      self._watch = threading.Thread(target=self._look, name="stall watch", daemon=True)
      self._watch.start()

  def _look(self) -> None:
    while not self._done.wait(self._stall_seconds / 10):
      with self._lock:
        silent = time.monotonic() - self._moved
        found = silent > self._stall_seconds and not self._stalled
        self._stalled |= found
      if found:
        self._tell("stall", f"no step has finished for {silent:.0f} s")

  def _tell(self, event: Event, message: str) -> None:
    facts = {"event": event, "run_name": self._run, "step": self._step, "host": socket.gethostname(),
             "time": time.time(), "message": message}  # fmt: skip
    if problem := _run(self._command, json.dumps(facts)):
      _LOG.warning(f"maxtext: event_command did not take a {event}: {redact(problem)}")


def _run(command: list[str], text: str) -> str:
  """Runs a command with a text on its input; what is wrong with it, if anything."""
  said = _Tail()
  try:
    process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said.write, text=True, start_new_session=True
    )
  except (OSError, ValueError) as error:
    return str(error)
  finally:
    os.close(said.write)
    said.start()
  try:
    process.communicate(text, _TIMEOUT_SECONDS)
  except BaseException as error:  # also Ctrl-C
    with suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)  # with what it has started
    process.wait()
    if not isinstance(error, subprocess.TimeoutExpired):
      raise
    return f"it has not ended within {_TIMEOUT_SECONDS:g} s, and was ended."
  said.join(1.0)  # longer where something that it has started goes on
  return f"ended with code {process.returncode}: {said.text}" if process.returncode else ""


class _Tail(threading.Thread):
  """Reads all that a command writes, which may be without end, and keeps its last characters."""

  def __init__(self) -> None:
    super().__init__(name="event output", daemon=True)
    self._read, self.write = os.pipe()
    self._last = b""

  @property
  def text(self) -> str:
    return self._last.decode(errors="replace").strip()[-_SHOWN:]

  def run(self) -> None:
    while found := os.read(self._read, 1 << 16):
      self._last = (self._last + found)[-4 * _SHOWN :]
    os.close(self._read)
