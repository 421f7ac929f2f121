"""An append-only file on a disk that may be full for a while."""

import errno
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

_MAX_PENDING_BYTES = 16 * 2**20  # bytes


class GrowingFile:
  """Appends to a file. Data that cannot be written is kept for the next call, so that nothing is torn or lost once
  there is space again. With 16 MiB pending, further data is dropped.

  Args:
    path: of the file; its folder is created.
    prepare: called with the path before the file is first opened.
  """

  def __init__(self, path: Path, prepare: Callable[[Path], None] = lambda path: None) -> None:
    self._path, self._prepare = path, prepare
    self._prepared = False
    self._file: FileIO | None = None
    self._pending = bytearray()

  def append(self, data: bytes) -> None:
    """Writes pending data and then this. If it raises `OSError`, this is pending too."""
    if len(self._pending) + len(data) <= _MAX_PENDING_BYTES:
      self._pending += data
    try:
      file = self._open()
      while self._pending and (written := file.write(self._pending)):
        del self._pending[:written]
    except OSError:
      self._close_file()  # a handle may have gone stale with the disk
      raise

  def close(self) -> None:
    """Writes pending data and closes. If it raises `OSError`, pending data is lost."""
    try:
      if self._pending:
        self.append(b"")
    finally:
      self._close_file()

  def _open(self) -> FileIO:
    if self._file is None:
      if not self._prepared:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._prepare(self._path)
        self._prepared = True
      self._file = FileIO(self._path, "a")
    return self._file

  def _close_file(self) -> None:
    if self._file is not None:
      with suppress(OSError):
        self._file.close()
      self._file = None


def is_permanent(error: OSError) -> bool:
  """Whether an error will not go away, such as a wrong path; a full disk may get space again."""
  return error.errno in _PERMANENT


_PERMANENT = {
  errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM,
  errno.EROFS,
}  # fmt: skip
