"""Ctrl-C during a compilation: Python handles it only when the compiler returns, which may take minutes."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from maxtext.status_line import erase_status_line


@contextmanager
def prompt_interrupt(grace: float = 1.0, clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
  """Inside it, a Ctrl-C that has not ended the work after `grace` seconds ends the process and its children.

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
  handled = threading.Event()
  threading.Thread(target=_watch, args=(reader, grace, handled, clean_up), daemon=True).start()
  try:
    yield
  except KeyboardInterrupt:
    handled.set()
    raise
  finally:
    signal.set_wakeup_fd(before)
    if not handled.is_set():
      os.close(writer)  # which ends the thread


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
  signal.signal(signal.SIGINT, lambda number, frame: _end(False, lambda: None))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _watch(reader: int, grace: float, handled: threading.Event, clean_up: Callable[[], None]) -> None:
  deadline = None
  while True:
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not select.select([reader], [], [], left)[0]:
      _end(handled.is_set(), clean_up)
    read = os.read(reader, 1)
    if not read:
      os.close(reader)
      return
    if read[0] == signal.SIGINT and deadline is None:
      deadline = time.monotonic() + grace


def _end(handled: bool, clean_up: Callable[[], None]) -> None:
  for pid in _children():
    with suppress(OSError):
      os.kill(pid, signal.SIGTERM)
  if not handled:  # the main thread has cleaned up and written it
    with suppress(Exception):
      clean_up()
    erase_status_line()
    with suppress(OSError):
      os.write(sys.stderr.fileno(), b"maxtext: stopped.\n")
  os._exit(128 + signal.SIGINT)


def _children() -> list[int]:
  """The children of this process, on Linux; elsewhere a terminal signals them too."""
  found = []
  for listed in Path("/proc/self/task").glob("*/children"):
    with suppress(OSError):
      found += [int(pid) for pid in listed.read_text().split()]
  return found
