"""What happens to a run, told to a command so that somebody hears of it: failure, stall, recovery. Imports no JAX."""

import json
import logging
import shlex
import socket
import subprocess
import threading
import time
from types import TracebackType
from typing import Literal, Self

from maxtext.configs import ConfigError
from maxtext.configs.secrets import redact

_LOG = logging.getLogger(__name__)

Event = Literal["failure", "stall", "recovery"]

_TIMEOUT_SECONDS = 30.0  # for the command


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
    try:
      done = subprocess.run(
        self._command, input=json.dumps(facts), capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
      )
      problem = f"ended with code {done.returncode}: {done.stderr.strip()[-200:]}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
      problem = str(error)
    if problem:
      _LOG.warning(f"maxtext: event_command did not take a {event}: {redact(problem)}")
