"""A process that has imported what a run needs and waits to be told which: a start that costs no imports."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from maxtext.distributed.heartbeat import SUSPECT, VARIABLE
from maxtext.distributed.supervisor import LogForwarder, end_processes, kill_with_stacks, start_process

SILENT_SECONDS = 15.0
"""Without a heartbeat, after which a process hangs. It beats twice a second; a loaded machine delays that."""


class WarmProcess:
  """See the module. Its output is forwarded with the index of its host.

  Args:
    command: reads a line of JSON from its standard input, with `arguments` and `environment`, and then runs that.
    index: for the log.
    out: where its output goes.
  """

  def __init__(self, command: Sequence[str], index: int, out: TextIO) -> None:
    self._beats, writes = os.pipe()
    os.set_blocking(self._beats, False)
    self._held, self._ours = os.pipe()  # the process sees its end when this one ends
    environment = {VARIABLE: str(writes)}
    self._process = start_process(command, environment, self._held, (writes,), stdin=subprocess.PIPE)
    os.close(writes)
    self.output = LogForwarder(index, self._process, out)
    self.step, self.is_suspect, self.asked = -1, False, False
    self._heard: float | None = None  # the last sign of life; None before the first
    self._polled = time.monotonic()

  def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a command in the process."""
    assert self._process.stdin is not None
    with suppress(OSError):  # it has ended, which its code says
      self._process.stdin.write(json.dumps({"arguments": list(arguments), "environment": dict(environment)}) + "\n")
      self._process.stdin.close()

  def poll(self) -> int | None:
    """The exit code; None while it runs. Reads the heartbeat."""
    now = time.monotonic()
    if self._heard and now - self._polled > SILENT_SECONDS / 3:  # this process did not listen: it was stopped
      self._heard = now
    self._polled = now
    with suppress(BlockingIOError):
      if lines := os.read(self._beats, 65536).split():
        self._heard, self.is_suspect = now, self.is_suspect or SUSPECT in lines
        self.step = next((int(line) for line in reversed(lines) if line != SUSPECT), self.step)
    return self._process.poll()

  @property
  def is_silent(self) -> bool:
    """Whether it hangs, after it has once been alive."""
    return self._heard is not None and time.monotonic() - self._heard > SILENT_SECONDS

  def terminate(self) -> None:
    """Asks it to save and to end."""
    self.asked = True
    self._process.terminate()

  def kill(self) -> None:
    """Ends it at once, also where it is stopped."""
    if self._process.poll() is None:
      self._process.kill()
      self._process.wait()
    self._close()

  def end(self, seconds: float) -> None:
    """Asks it to end, and ends it when the time is over."""
    end_processes([self._process], signal.SIGTERM, seconds)
    self._close()

  def kill_with_stacks(self) -> None:
    """Ends it, and lets it write where it was."""
    kill_with_stacks([self._process], 10.0)

  def _close(self) -> None:
    for descriptor in (self._beats, self._held, self._ours):
      with suppress(OSError):
        os.close(descriptor)
    self.output.join(timeout=2)
