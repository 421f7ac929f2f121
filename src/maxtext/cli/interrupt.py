"""Ctrl-C and SIGTERM during a compilation: Python handles them only when the compiler returns, maybe minutes later."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from maxtext.status_line import at_line_start, erase_status_line

_watched = threading.Event()  # a thread of `prompt_interrupt` reads signals


@contextmanager
def prompt_interrupt(grace: float = 1.0, clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
  """Inside it, a Ctrl-C that has not ended the work after `grace` seconds ends the process and its children.

  One that was lost inside it, because Python raised `KeyboardInterrupt` where exceptions are ignored, such as in a
  finalizer, is raised again at its end.

  SIGTERM ends them at once, as without it, but leaves a clean terminal and calls `clean_up`. Whoever handles SIGTERM
  already, or begins to, goes on with that.

  Python writes the signal's number to a pipe at once, whatever the main thread does, and a thread reads it there. The
  thread goes on after the main thread has handled the signal, because Python's exit waits for compilers in threads.
  It calls `clean_up` first where the main thread has not handled the signal.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  handled, interrupted = threading.Event(), threading.Event()
  _watched.set()
  if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, terminate)
  watching = threading.Thread(target=_watch, args=(reader, grace, handled, interrupted, clean_up), daemon=True)
  watching.start()
  is_done = False
  try:
    yield
    is_done = True
  except KeyboardInterrupt:
    handled.set()
    raise
  finally:
    signal.set_wakeup_fd(before)
    _watched.clear()
    restore_termination()
    if not handled.is_set():
      os.close(writer)  # which ends the thread
      watching.join()
  if is_done and interrupted.is_set():
    raise KeyboardInterrupt


@contextmanager
def interrupt_exits() -> Iterator[None]:
  """Inside it, Ctrl-C ends the process at once.

  It is for imports: a library whose initialization a `KeyboardInterrupt` ends raises an `ImportError` of its own.
  Whoever ignores the signal, as what a shell starts in the background does, goes on ignoring it.
  """
  is_main = threading.current_thread() is threading.main_thread()
  if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    yield
    return
  signal.signal(signal.SIGINT, lambda number, frame: _end(signal.SIGINT, False, lambda: None))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def terminate(number: int, frame: FrameType | None) -> None:
  """Handles SIGTERM: leaves it to the thread of `prompt_interrupt`, or else ends the process with a clean terminal."""
  if _watched.is_set():
    return
  erase_status_line()
  signal.signal(number, signal.SIG_DFL)
  os.kill(os.getpid(), number)


def restore_termination() -> None:
  """Gives SIGTERM its default action again, unless somebody else has it: Python, or JAX in a run of many processes."""
  if signal.getsignal(signal.SIGTERM) is terminate:
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
      signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(
  reader: int, grace: float, handled: threading.Event, interrupted: threading.Event, clean_up: Callable[[], None]
) -> None:
  deadline = None
  while True:
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not select.select([reader], [], [], left)[0]:
      _end(signal.SIGINT, handled.is_set(), clean_up)
    read = os.read(reader, 1)
    if not read:
      os.close(reader)
      return
    if read[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is terminate:
      _end(signal.SIGTERM, handled.is_set(), clean_up)
    if read[0] == signal.SIGINT and deadline is None:
      deadline = time.monotonic() + grace
      interrupted.set()


def _end(number: int, handled: bool, clean_up: Callable[[], None]) -> None:
  for pid in _children():
    with suppress(OSError):
      os.kill(pid, signal.SIGTERM)
  if not handled:  # the main thread has cleaned up and written it
    with suppress(Exception):
      clean_up()
    erase_status_line()
    with suppress(OSError):
      os.write(sys.stderr.fileno(), at_line_start("maxtext: stopped.\n", sys.stderr).encode())
  os._exit(128 + number)


def _children() -> list[int]:
  """The children of this process, on Linux; elsewhere a terminal signals them too."""
  found = []
  for listed in Path("/proc/self/task").glob("*/children"):
    with suppress(OSError):
      found += [int(pid) for pid in listed.read_text().split()]
  return found
