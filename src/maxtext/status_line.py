"""One line at the bottom of a terminal that is updated in place, below everything that the program prints.

Where stdout is no terminal (a file, a pipe, a notebook) nothing is shown, and what is printed is not touched.

The cursor rests at the start of the line and is never hidden. So a prompt, or a library that writes past Python, starts
at the first column whatever happens to the process.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from maxtext.logs import readable_duration, write_now

_TICK_SECONDS = 0.2
_ERASE = "\r\x1b[K"

Render = Callable[[int], str]
"""From a number of columns to the text of the line."""

_open_line: "StatusLine | None" = None


@contextmanager
def status_line() -> "Iterator[StatusLine]":
  """The status line of this process: opened here and erased at the end, or the one that is open already."""
  global _open_line
  if _open_line is not None:
    yield _open_line
    return
  line = _open_line = StatusLine(sys.stdout)
  try:
    yield line
  finally:
    _open_line = None
    line.close()


def show_phase(what: str) -> None:
  """Shows what the program does now, with the time since this call, on the status line if one is open."""
  if _open_line is not None:
    _open_line.phase(what)


def erase_status_line() -> None:
  """Erases an open status line for good, before the process ends without unwinding."""
  if _open_line is not None:
    _open_line.close()


def at_line_start(text: str, out: TextIO) -> str:
  """The text, after an empty line's start on a terminal, which shows Ctrl-C as `^C` where its cursor is."""
  return f"{_ERASE}{text}" if _is_capable(out) else text


def _is_capable(out: TextIO) -> bool:
  return out.isatty() and os.environ.get("TERM") != "dumb"


class StatusLine:
  """Shown from the first `phase` or `show` until `close`.

  A thread draws it five times a second, so that time passes on the screen while a compiler works. Meanwhile
  `sys.stdout` and `sys.stderr`, if they are terminals, erase the line before they write and draw it again after a
  newline.

  Args:
    out: the terminal; anything else shows nothing.
  """

  def __init__(self, out: TextIO) -> None:
    self._out = out
    self._render: Render | None = None
    self._drawn = ""
    self._closed = not _is_capable(out)
    self._lock, self._ended = threading.RLock(), threading.Event()
    self._replaced: list[tuple[str, Any]] = []
    if not self._closed:
      os.register_at_fork(after_in_child=self._forget)

  @property
  def is_shown(self) -> bool:
    """Whether there is a terminal to show it on."""
    return not self._closed

  @property
  def width(self) -> int:
    """Columns of the terminal; 80 where it does not say."""
    with suppress(OSError, ValueError):
      if columns := os.get_terminal_size(self._out.fileno()).columns:
        return columns
    return 80

  def phase(self, what: str) -> None:
    """Shows what the program does now, with the time since this call."""
    start = time.monotonic()
    self.show(lambda width: f"{what}  {readable_duration(time.monotonic() - start)}")

  def show(self, render: Render) -> None:
    """Shows this text from now on; a thread calls `render` again and again."""
    if self._closed:
      return
    with self._lock:
      first, self._render = self._render is None, render
    if first:
      for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
          self._replaced.append((name, stream))
          setattr(sys, name, _Above(self, stream))
      with self._lock:
        self._draw()
      threading.Thread(target=self._tick, name="status line", daemon=True).start()

  def close(self) -> None:
    """Erases the line and gives the streams back."""
    self._ended.set()
    held = self._lock.acquire(timeout=1.0)
    try:
      if not self._closed:
        self._erase()
      self._closed = True
    finally:
      if held:
        self._lock.release()
    for name, stream in self._replaced:
      if isinstance(getattr(sys, name), _Above):
        setattr(sys, name, stream)
    self._replaced = []

  def write_above(self, stream: TextIO, text: str, complete: bool) -> int:
    """Writes to a stream where the line was, and draws the line again if the text's last line is complete."""
    with self._lock:
      self._erase()
      if not complete:
        return stream.write(text)
      write_now(stream, text)
      self._draw()
      return len(text)

  def _tick(self) -> None:
    while not self._ended.wait(_TICK_SECONDS):
      with self._lock:
        if not any(above.is_within_line for _, above in self._streams()):
          self._draw()

  def _streams(self) -> "Iterator[tuple[str, _Above]]":
    for name, _ in self._replaced:
      if isinstance(stream := getattr(sys, name), _Above):
        yield name, stream

  def _draw(self) -> None:
    if self._closed or self._render is None or not self._in_foreground():
      return
    width = max(1, self.width - 1)  # some terminals wrap after the last column
    text = self._render(width).replace("\n", " ")[:width]
    if text != self._drawn:
      self._put(f"{_ERASE}{text}\r")
      self._drawn = text

  def _erase(self) -> None:
    if self._drawn:
      self._put(_ERASE)
      self._drawn = ""

  def _put(self, text: str) -> None:
    with suppress(OSError, ValueError):  # a terminal that is gone
      write_now(self._out, text)

  def _in_foreground(self) -> bool:
    """Whether the terminal is this process's: one that runs in the background would draw over what the user types."""
    try:
      return os.tcgetpgrp(self._out.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # a terminal that controls no process
      return True

  def _forget(self) -> None:
    """In a forked process, which has the streams but not the thread, and must not wait for its lock."""
    self._closed, self._drawn, self._lock = True, "", threading.RLock()


class _Above:
  """A stream whose text appears above the status line."""

  def __init__(self, line: StatusLine, stream: TextIO) -> None:
    self._line, self._stream = line, stream
    self.is_within_line = False

  def write(self, text: str) -> int:
    if text:
      self.is_within_line = not text.endswith("\n")
    return self._line.write_above(self._stream, text, not self.is_within_line)

  def writelines(self, lines: Sequence[str]) -> None:
    for line in lines:
      self.write(line)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


def fit(parts: Sequence[tuple[int, str]], width: int) -> str:
  """Joins parts in their order, without those that do not fit.

  Args:
    parts: importance, of which the smallest number comes first, and text; empty text is left out.
    width: the most characters.
  """
  kept: set[int] = set()
  for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
    chosen = [parts[i][1] for i in range(len(parts)) if i in {*kept, index} and parts[i][1]]
    if len("  ".join(chosen)) <= width:
      kept.add(index)
  return "  ".join(text for index, (_, text) in enumerate(parts) if index in kept and text)
