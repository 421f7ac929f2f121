"""Atomic writes: a file or folder gets its name when all of it is written, so no reader sees a part of it.

A durable write is also on the disk before it counts, so that a machine that stops takes back nothing that was
committed. Stores of objects (paths with `://`) show an object only when it is whole, and keep what they have
acknowledged; there, nothing is left to do.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from etils import epath

UNFINISHED = ".unfinished"
"""What stands behind the name of a file or folder until it is whole."""

_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # what file systems say that keep no names apart from files


def sync(path: epath.Path | Path | str) -> None:
  """Waits until a file, or the names in a folder, are on the disk."""
  if "://" in str(path):
    return
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError as error:
    if error.errno not in _NOT_FOR_FOLDERS or not os.path.isdir(path):
      raise
  finally:
    os.close(descriptor)


def sync_tree(folder: epath.Path | Path) -> None:
  """The same of everything below a folder."""
  for parent, _, files in os.walk(folder, topdown=False):
    for name in files:
      sync(Path(parent, name))
    sync(Path(parent))


def write_durably(path: epath.Path, text: str) -> None:
  """Writes a file, and returns when its content is on the disk. It is not atomic: for a folder that is."""
  path.write_text(text)
  sync(path)


def write_atomically(
  path: epath.Path | Path, content: bytes, *, durable: bool = True, unfinished: Path | None = None
) -> None:
  """Makes a file, or replaces it, as a whole; on a disk or in an object store. See `atomic_file`."""
  if "://" in str(path):
    path.write_bytes(content)
    return
  with atomic_file(Path(path), durable=durable, unfinished=unfinished) as file:
    file.write(content)


@contextmanager
def atomic_file(path: Path, *, durable: bool = True, unfinished: Path | None = None) -> Iterator[BinaryIO]:
  """A file to write to, which takes its name, and the place of the file that had it, at the end of the block.

  Where the block or the disk fails, the old file stays as it was and nothing is left of the new one.

  Args:
    path: on a disk.
    durable: the content and the name are on the disk when the block has ended.
    unfinished: its name until then, in the same folder; `path` with `.unfinished` behind it if it is None. Writers that
      may be at the same file at once need names of their own.
  """
  unfinished = unfinished or path.with_name(f"{path.name}{UNFINISHED}")
  try:
    with open(unfinished, "wb") as file:
      yield file
      if durable:
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
  except BaseException:
    with suppress(OSError):
      unfinished.unlink()
    raise
  if durable:
    sync(path.parent)


def create_atomically(path: Path, content: bytes, unfinished: Path) -> bool:
  """Makes a file as a whole unless there is one already; returns whether it did. It is not durable.

  On file systems without hard links, as of mounted buckets, the file is there before its content is.

  Args:
    path: on a disk.
    content: of the file.
    unfinished: a name of this writer alone, in the same folder.
  """
  try:
    unfinished.write_bytes(content)
    try:
      os.link(unfinished, path)
    except FileExistsError:
      raise
    except OSError:
      with open(path, "xb") as file:
        file.write(content)
  except FileExistsError:
    return False
  finally:
    unfinished.unlink(missing_ok=True)
  return True


def commit_file(file: Path, path: str) -> None:
  """Moves a file that is whole to its place on the same disk, durably."""
  sync(file)
  os.replace(file, path)
  sync(os.path.dirname(path))


def commit_folder(folder: epath.Path | Path, path: epath.Path | Path) -> None:
  """Gives a folder that is whole its name on the same disk, durably. There must be no other of that name."""
  sync_tree(folder)
  os.rename(folder, path)
  sync(path.parent)


@contextmanager
def atomic_folder(path: epath.Path | Path) -> Iterator[Path]:
  """A folder to write to, which gets its name at the end of the block, durably.

  Until then it has `.unfinished` behind its name. Where the block or the disk fails, nothing is left of it.
  """
  unfinished = Path(f"{path}{UNFINISHED}")
  try:
    unfinished.mkdir()
    yield unfinished
    commit_folder(unfinished, path)
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise
