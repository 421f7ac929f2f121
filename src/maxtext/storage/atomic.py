"""Atomic writes: a file or folder gets its name after all of it is written, so no reader sees a partial one.

A durable write is also synced to the disk before it is committed, so a crash of the machine loses nothing that was
committed. Object stores (paths with `://`) are atomic and durable themselves.
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
"""Suffix of the name of a file or folder until it is complete."""

_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # from file systems that cannot sync a folder


def sync(path: epath.Path | Path | str) -> None:
  """Syncs a file, or the entries of a folder, to the disk."""
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
  """Syncs all files and folders below a folder, and the folder itself."""
  for parent, _, files in os.walk(folder, topdown=False):
    for name in files:
      sync(Path(parent, name))
    sync(Path(parent))


def write_durably(path: epath.Path, text: str) -> None:
  """Writes a file and syncs it. The write is not atomic: use it inside a folder that is committed atomically."""
  path.write_text(text)
  sync(path)


def write_atomically(
  path: epath.Path | Path, content: bytes, *, durable: bool = True, unfinished: Path | None = None
) -> None:
  """Creates or replaces a file atomically, on a disk or in an object store. See `atomic_file`."""
  if "://" in str(path):
    path.write_bytes(content)
    return
  with atomic_file(Path(path), durable=durable, unfinished=unfinished) as file:
    file.write(content)


@contextmanager
def atomic_file(path: Path, *, durable: bool = True, unfinished: Path | None = None) -> Iterator[BinaryIO]:
  """Yields a file to write to, which replaces `path` at the end of the block.

  If the block or the disk fails, the old file stays unchanged and the new one is removed.

  Args:
    path: the file, on a disk.
    durable: whether the content and the name are synced before the block ends.
    unfinished: the temporary path, in the same folder; None means `path` with the suffix `.unfinished`. Concurrent
      writers of the same file need distinct paths.
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
  """Creates a file atomically if it does not exist; returns whether it did. The write is not durable.

  On file systems without hard links, such as mounted buckets, the file exists before its content is complete.

  Args:
    path: the file, on a disk.
    content: its content.
    unfinished: a temporary path that only this writer uses, in the same folder.
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
  """Durably moves a complete file to its final path on the same disk."""
  sync(file)
  os.replace(file, path)
  sync(os.path.dirname(path))


def commit_folder(folder: epath.Path | Path, path: epath.Path | Path) -> None:
  """Durably renames a complete folder to its final path on the same disk, which must not exist."""
  sync_tree(folder)
  os.rename(folder, path)
  sync(path.parent)


@contextmanager
def atomic_folder(path: epath.Path | Path) -> Iterator[Path]:
  """Yields a folder to write to, which is durably renamed to `path` at the end of the block.

  Until then its name has the suffix `.unfinished`. If the block or the disk fails, the folder is removed.
  """
  unfinished = Path(f"{path}{UNFINISHED}")
  try:
    unfinished.mkdir()
    yield unfinished
    commit_folder(unfinished, path)
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise
