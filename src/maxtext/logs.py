"""Logging. Every module logs under the name `maxtext` (`logging.getLogger(__name__)`); this module has the set-up.

Used as a library, the package adds no handler: records go wherever the program sends them, and without any set-up
Python shows warnings on stderr. The commands and `maxtext.train()` call `setup_logging`, which adds the console.
"""

import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

ON_STDERR = {"console": "stderr"}
"""For `extra=` of a logging call: the console writes this record to stderr. Without it, a record goes to stdout."""


class ConsoleHandler(logging.Handler):
  """Writes each message as one line, without a prefix, and flushes.

  The stream is looked up for each record, because the status line replaces `sys.stdout` while it is shown.
  """

  def emit(self, record: logging.LogRecord) -> None:
    out = sys.stderr if getattr(record, "console", "stdout") == "stderr" else sys.stdout
    if out is None:  # the program was started without it
      return
    try:
      write_now(out, f"{self.format(record)}\n")
    except BrokenPipeError:  # the reader of the output has closed it, which ends a command
      raise
    except OSError:  # such as a file on a full disk: a message is not worth a run
      pass


def debug_loggers(names: str) -> None:
  """Has the loggers of these modules, with commas between them, write everything to stderr. JAX's own switch
  (`jax_debug_log_modules`) shows nothing unless `jax_logging_level` is set too, and for 'jax' itself never."""
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter("{levelname} {asctime} {name}:{lineno}: {message}", style="{"))
  for name in filter(None, map(str.strip, names.split(","))):
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)


def write_now(stream: TextIO, text: str) -> None:
  """Writes and flushes, also within a signal's handler that interrupted a write to the same stream: Python's buffer
  refuses that."""
  try:
    stream.write(text)
  except RuntimeError:
    with suppress(OSError, ValueError):  # it has no file
      os.write(stream.fileno(), text.encode(errors="replace"))
  with suppress(RuntimeError):
    stream.flush()


def readable_duration(seconds: float) -> str:
  """A duration in its two largest units."""
  seconds = max(0, round(seconds))
  for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
    if seconds >= size:
      return f"{seconds // size} {unit} {seconds % size // smaller_size} {smaller}"
  return f"{seconds} s"


def readable_size(size: float) -> str:
  """A number of bytes with three digits and a unit."""
  for unit in ("B", "kB", "MB", "GB"):
    if size < 1000:
      return f"{size:.3g} {unit}"
    size /= 1000
  return f"{size:,.3g} TB"


def setup_logging() -> None:
  """Sends the records of `maxtext`, from INFO up, to this process's console.

  A program that has added a handler to the logger `maxtext`, or chosen its level, keeps that. Records are not passed
  on to the root logger: libraries add handlers there that would write every line twice.
  """
  logger = logging.getLogger("maxtext")
  if logger.handlers:
    return
  logger.addHandler(ConsoleHandler())
  logger.propagate = False
  if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
