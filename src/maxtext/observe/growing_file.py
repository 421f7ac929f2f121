"""A file that only grows, on a disk that may be full for a while."""

import errno
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

_MOST_WAITING = 16 * 2**20  # bytes


class GrowingFile:
  """Appends to a file. What cannot be written waits for the next call, so that nothing is torn or lost once there is
  room again; of what comes when 16 MiB wait, nothing is kept.

  Args:
    path: of the file; its folder is made.
    prepare: called with the path before the file is first opened.
  """

  def __init__(self, path: Path, prepare: Callable[[Path], None] = lambda path: None) -> None:
    self._path, self._prepare = path, prepare
    self._prepared = False
    self._file: FileIO | None = None
    self._waiting = bytearray()

  def append(self, data: bytes) -> None:
    """Writes this after all that waits. An `OSError` says that it waits too."""
    if len(self._waiting) + len(data) <= _MOST_WAITING:
      self._waiting += data
    try:
      file = self._open()
      while self._waiting and (written := file.write(self._waiting)):
        del self._waiting[:written]
    except OSError:
      self._let_go()  # a handle may have gone stale with the disk
      raise

  def close(self) -> None:
    """Tries once more; an `OSError` says that what waits is lost."""
    try:
      if self._waiting:
        self.append(b"")
    finally:
      self._let_go()

  def _open(self) -> FileIO:
    if self._file is None:
      if not self._prepared:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._prepare(self._path)
        self._prepared = True
      self._file = FileIO(self._path, "a")
    return self._file

  def _let_go(self) -> None:
    if self._file is not None:
      with suppress(OSError):
        self._file.close()
      self._file = None


def is_mistake(error: OSError) -> bool:
  """Whether a file cannot be written since its name is wrong, which waiting does not mend; a full disk may empty."""
  return error.errno in _MISTAKES


_MISTAKES = {
  errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM,
  errno.EROFS,
}  # fmt: skip
