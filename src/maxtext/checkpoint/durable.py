"""Files that are on the disk before they count, so that a machine that stops takes back nothing that was committed.

Stores of objects keep what they have acknowledged; there, nothing is left to do.
"""

import errno
import os
from pathlib import Path

from etils import epath

_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # what file systems say that keep no names apart from files


def write_text(path: epath.Path, text: str) -> None:
  """Writes a file, and returns when its content is on the disk."""
  path.write_text(text)
  sync(path)


def sync(path: epath.Path | Path) -> None:
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
