"""Signs of life of a process of an elastic run, for the agent that started it: a line each half second, by a thread.

A process that hangs in a collective still beats; one that is stopped, or whose machine has no memory left, does not.
"""

import os
import threading
import time
from contextlib import suppress

VARIABLE = "MAXTEXT_HEARTBEAT"
"""The descriptor of a pipe, in the environment."""
BEAT_SECONDS = 0.5
SUSPECT = b"suspect"
"""The line of a process whose results are not to be trusted; all others are numbers of steps."""

_step = -1


def start_heartbeat() -> None:
  """Begins to beat, if an agent listens."""
  if descriptor := os.environ.get(VARIABLE):
    threading.Thread(target=_beat, args=(int(descriptor),), name="heartbeat", daemon=True).start()


def finished_step(step: int) -> None:
  """Tells the agent, with the next beat, that a step has finished."""
  global _step
  _step = step


def report_suspect() -> None:
  """Tells the agent at once, if one listens, that this host is to be left out: its devices are wrong."""
  if descriptor := os.environ.get(VARIABLE):
    with suppress(OSError):
      os.write(int(descriptor), SUSPECT + b"\n")


def _beat(descriptor: int) -> None:
  with suppress(OSError):  # the agent has ended, and this process will
    os.set_blocking(descriptor, False)
    while True:
      with suppress(BlockingIOError):
        os.write(descriptor, f"{_step}\n".encode())
      time.sleep(BEAT_SECONDS)
