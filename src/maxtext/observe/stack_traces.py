"""Periodic stack traces of all threads, to debug a run that hangs."""

import sys
import threading
import traceback
from typing import TextIO


class StackTraces:
  """Writes the stacks of all threads every `seconds`, until closed.

  A Python thread and not `faulthandler`, which reads frames while they change and can crash the process.
  """

  def __init__(self, seconds: float, out: TextIO = sys.stderr) -> None:
    self._seconds, self._out, self._done = seconds, out, threading.Event()
    self._thread = threading.Thread(target=self._run, name="stack traces", daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Ends the thread."""
    self._done.set()
    self._thread.join()

  def _run(self) -> None:
    while not self._done.wait(self._seconds):
      names = {thread.ident: thread.name for thread in threading.enumerate()}
      for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
          self._out.write(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
      self._out.flush()
