"""A folder with atomic writes of files, on a disk or in an object store.

Paths go through fsspec; `gs://` and `s3://` need its package for that store.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxtext.storage.atomic import commit_file

UNFINISHED = ".unfinished"
"""Subfolder for unfinished files and notes about them."""


class OutputFolder:
  """The output of a preparation: a local folder, or one in an object store."""

  def __init__(self, url: str) -> None:
    from fsspec.core import url_to_fs

    self._fs, self._root = url_to_fs(url)
    self._local = "file" in self._fs.protocol

  def names(self, below: str = "") -> list[str]:
    """Names of the files, without their path."""
    self._fs.invalidate_cache()
    try:
      found = self._fs.ls(f"{self._root}/{below}".rstrip("/"), detail=False)
    except FileNotFoundError:
      return []
    return sorted(path.rsplit("/", 1)[-1] for path in found)

  def read(self, name: str) -> bytes | None:
    """A file's content; None if there is no such file."""
    try:
      return self._fs.cat_file(f"{self._root}/{name}")
    except FileNotFoundError:
      return None

  def size(self, name: str) -> int | None:
    """A file's size in bytes; None if there is no such file."""
    try:
      return self._fs.size(f"{self._root}/{name}")
    except FileNotFoundError:
      return None

  def write(self, name: str, content: bytes) -> None:
    """Writes a file atomically."""
    with self.scratch() as scratch:
      file = Path(scratch, "content")
      file.write_bytes(content)
      self.publish(file, name)

  def publish(self, file: Path, name: str) -> None:
    """Moves a file from `scratch` to its final name, durably."""
    target = f"{self._root}/{name}"
    if self._local:
      os.makedirs(os.path.dirname(target), exist_ok=True)
      commit_file(file, target)
    else:
      self._fs.put_file(str(file), target)

  def remove(self, name: str) -> None:
    """Removes a folder in it, if it is there."""
    if self._fs.exists(path := f"{self._root}/{name}"):
      self._fs.rm(path, recursive=True)

  @contextmanager
  def scratch(self) -> Iterator[str]:
    """A temporary local folder, on the same disk if the output is on one."""
    near = f"{self._root}/{UNFINISHED}" if self._local else None
    if near:
      os.makedirs(near, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=near) as scratch:
      yield scratch
