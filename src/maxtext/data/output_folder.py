"""A folder in which files appear whole: on a disk by renaming, in an object store as it is.

Paths go through fsspec; `gs://` and `s3://` need its package for that store.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxtext.storage.atomic import commit_file

UNFINISHED = ".unfinished"
"""What is not yet whole, and notes about it, lie here."""


class OutputFolder:
  """Where shards go: a local folder, or one in an object store, where a file appears only when it is whole."""

  def __init__(self, url: str) -> None:
    from fsspec.core import url_to_fs

    self._fs, self._root = url_to_fs(url)
    self._local = "file" in self._fs.protocol

  def names(self, below: str = "") -> list[str]:
    """Names of the files there, without their path."""
    self._fs.invalidate_cache()
    try:
      found = self._fs.ls(f"{self._root}/{below}".rstrip("/"), detail=False)
    except FileNotFoundError:
      return []
    return sorted(path.rsplit("/", 1)[-1] for path in found)

  def read(self, name: str) -> bytes | None:
    """A file's content; None where there is no such file."""
    try:
      return self._fs.cat_file(f"{self._root}/{name}")
    except FileNotFoundError:
      return None

  def size(self, name: str) -> int | None:
    """A file's bytes; None where there is no such file."""
    try:
      return self._fs.size(f"{self._root}/{name}")
    except FileNotFoundError:
      return None

  def write(self, name: str, content: bytes) -> None:
    """Makes a file, or replaces it, as a whole."""
    with self.scratch() as scratch:
      file = Path(scratch, "content")
      file.write_bytes(content)
      self.publish(file, name)

  def publish(self, file: Path, name: str) -> None:
    """Moves a file from `scratch` to its place; it is on the disk when this returns."""
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
    """A folder of this machine, on the same disk where there is one, that goes away with everything in it."""
    near = f"{self._root}/{UNFINISHED}" if self._local else None
    if near:
      os.makedirs(near, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=near) as scratch:
      yield scratch
