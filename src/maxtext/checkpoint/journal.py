"""What of a long piece of work is done and on disk: lines of JSON that a killed process cannot leave half-true."""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError
from maxtext.storage.atomic import UNFINISHED, commit_folder

_FILE = "journal"


def digest_of(request: Any) -> str:
  """What tells one request from another."""
  return hashlib.sha256(json.dumps(request, default=str, sort_keys=True).encode()).hexdigest()


class Journal:
  """A folder that is made step by step and gets its name when it is whole; until then it has `.unfinished` behind it.

  One process makes it: the journal is locked against others while it is open.

  Args:
    target: the folder to make.
    request: tells what is made; a folder that was begun for something else is not continued.
  """

  def __init__(self, target: Path, request: Any) -> None:
    begin = {"request": digest_of(request)}
    self.target = target.expanduser().absolute()
    self.folder = self.target.with_name(f"{self.target.name}{UNFINISHED}")
    if self.target.exists():
      raise ConfigError(f"{target} is there already; name a folder that is not.")
    self.folder.mkdir(parents=True, exist_ok=True)
    self._file = open(self.folder / _FILE, "a+")  # noqa: SIM115 - closed by finish(), or with the process
    self._lock()
    self._file.seek(0)
    lines = self._file.read().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    if whole and whole[0] != begin:
      raise ConfigError(f"{self.folder} was begun from something else: remove it, or name another folder.")
    self.entries: list[dict[str, Any]] = whole[1:]
    self._file.truncate(0)
    self.note(*(whole or [begin]))

  def note(self, *entries: Mapping[str, Any]) -> None:
    """Adds lines, and returns when they are on disk."""
    self._file.writelines(json.dumps(entry) + "\n" for entry in entries)
    self._file.flush()
    os.fsync(self._file.fileno())

  def finish(self) -> Path:
    """Gives the folder its name. The lock lasts until then: another process must not begin what is done."""
    commit_folder(self.folder, self.target)
    (self.target / _FILE).unlink()
    self._file.close()
    return self.target

  def _lock(self) -> None:
    try:
      fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # others than these: a file system without locks
      if error.errno in (errno.EACCES, errno.EAGAIN):
        raise ConfigError(
          f"{self.folder} is being written by another process: wait for it, or name another folder."
        ) from None
