"""Reading from storage that may not answer at once.

A file that is missing or holds something else is damage, for whoever reads to judge. A read that fails for any other
reason says nothing about the file: it is tried again, and then ends the run, which may be started again later.
"""

import errno
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from maxtext.configs.errors import RunError

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")

DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before a read is tried again
_OF_THE_FILE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR)
_NEVER_BETTER = (errno.EACCES, errno.EPERM)
_UNANSWERED = {
  "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED",
  "UNAVAILABLE", "UNKNOWN",
}  # fmt: skip
"""TensorStore's words for what is not the file's fault; for that it has NOT_FOUND, DATA_LOSS and others."""


class StorageError(RunError):
  """Storage that could not be read, of which nothing follows for what is stored there."""


def retried(what: object, read: Callable[[], _T]) -> _T:
  """What `read` returns, however often it takes; `what` is named where it never does.

  Raises what `read` raises if that says something about the file itself.
  """
  for delay in (*DELAYS, None):
    try:
      return read()
    except Exception as error:
      if not is_storage_failure(error):
        raise
      why = reason(error)
      if delay is None or _will_not_get_better(error):
        raise StorageError(f"{what} cannot be read: {why}. Nothing was changed; start again when it can.") from error
      _LOG.warning(f"maxtext: {what} cannot be read: {why}; trying again in {delay:g} s.")
      time.sleep(delay)
  raise AssertionError("the last attempt returns or raises")


@contextmanager
def writing(folder: object) -> Iterator[None]:
  """Makes of what storage raises while a folder is written one line that names the folder."""
  try:
    yield
  except Exception as error:
    if isinstance(error, RunError) or not is_storage_failure(error):
      raise
    raise StorageError(f"{folder} cannot be written: {reason(error)}. Start again when it can.") from error


def is_storage_failure(error: BaseException) -> bool:
  """Whether a read failed for a reason that says nothing about the file."""
  error = _first(error)
  if isinstance(error, StorageError):
    return False  # it was tried often enough
  number = _error_number(error)
  if number is not None:
    return number not in _OF_THE_FILE
  if isinstance(error, ValueError):
    status = re.match(r"([A-Z_]+): ", str(error))
    return status is not None and status[1] in _UNANSWERED
  gcsfs = sys.modules.get("gcsfs.retry")
  return isinstance(error, OSError) or (gcsfs is not None and isinstance(error, gcsfs.HttpError))


def reason(error: BaseException) -> str:
  """Why storage failed, in one line: the first cause, without TensorStore's description of where it looked."""
  error = _first(error)
  text = " ".join(str(error).split()) or type(error).__name__
  text = text.split(" [tensorstore_spec")[0].split(" See full TensorStore details")[0]
  return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"


def _will_not_get_better(error: BaseException) -> bool:
  error = _first(error)
  return _error_number(error) in _NEVER_BETTER or str(error).startswith(("PERMISSION_DENIED", "UNAUTHENTICATED"))


def _error_number(error: BaseException) -> int | None:
  """The operating system's, also where TensorStore has put it into a text."""
  if isinstance(error, OSError):
    return error.errno if error.errno is not None else (errno.ENOENT if isinstance(error, FileNotFoundError) else None)
  found = re.search(r"os_error_code='(\d+)'", str(error))
  return int(found[1]) if found else None


def _first(error: BaseException) -> BaseException:
  while error.__cause__ is not None:
    error = error.__cause__
  return error
