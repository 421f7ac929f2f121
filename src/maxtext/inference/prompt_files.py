"""Caches of prompts in a folder, a file for each, so that a prompt that is asked often is computed once for all runs.

A file belongs to the model and the parameters that it was computed with, by their checksums. The folder is a cache: a
file that is damaged or cannot be read is computed again, one that cannot be written is done without, and the files that
were not used for longest make room. Several processes may share it.
"""

import hashlib
import logging
import os
import secrets
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np

from maxtext.configs import ConfigError
from maxtext.inference.state import Caches
from maxtext.logs import ON_STDERR
from maxtext.storage.atomic import UNFINISHED, atomic_file

_LOG = logging.getLogger(__name__)

MOST_BYTES = 64 * 2**30
"""Of a folder."""

_STALE = 3600.0  # seconds after which an unfinished file is that of a process which was killed
_DAMAGED = (zipfile.BadZipFile, ValueError, KeyError, EOFError, NotImplementedError)


class PromptFiles:
  """What a scheduler asks for beginnings of prompts, and tells of those it has computed.

  Args:
    folder: of the files; made when the first is written.
    model: says what tells it and its parameters, as they are now, from all others.
    like: shapes of a row.
    reads: files are read; otherwise they are only written.
    most: bytes of the folder's files.
  """

  def __init__(self, folder: Path, model: Callable[[], str], like: Caches, reads: bool, most: int = MOST_BYTES) -> None:
    self._folder, self._model, self._like, self._reads, self._most = folder, model, like, reads, most

  def check(self, prompt: Sequence[int]) -> None:
    """Refuses a prompt that has no file, where they are read."""
    if self._reads and len(prompt) > 1 and not self._file(prompt[:-1]).exists():
      raise ConfigError(
        f"load_from_prefill_dir=true, but prefill_cache_dir={self._folder} has no cache of this prompt by these "
        "parameters: decode it once without load_from_prefill_dir."
      )

  def find(self, prompt: Sequence[int]) -> tuple[int, Caches | None]:
    """All but the last token of a prompt whose file is read, and its row."""
    if not self._reads or len(prompt) < 2:
      return 0, None
    structs, tree = jax.tree.flatten(self._like)
    file = self._file(prompt[:-1])
    try:  # a text that was interrupted goes on with a part of its answer, and has no file
      with np.load(file) as arrays:
        found = [arrays[f"{i}"].view(s.dtype).reshape(s.shape) for i, s in enumerate(structs)]
      os.utime(file)
    except FileNotFoundError:
      return 0, None
    except OSError as error:
      _say(f"{file} cannot be read ({error.strerror}), so its prompt is computed.")
      return 0, None
    except _DAMAGED as error:
      _say(f"{file} is damaged ({error}), so its prompt is computed and written again.")
      with suppress(OSError):
        file.unlink()
      return 0, None
    return len(prompt) - 1, jax.tree.unflatten(tree, found)

  def keep(self, prompt: Sequence[int], count: int, row: Caches) -> None:
    """Writes the row of a prompt, once it is the row of all that an answer needs: of all but the last token."""
    if count != len(prompt) - 1:
      return
    leaves = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in jax.tree.leaves(jax.device_get(row))]
    size = sum(leaf.nbytes for leaf in leaves)
    if size > self._most:
      return
    file = self._file(prompt[:count])
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._make_room(size)
      with atomic_file(file, unfinished=unfinished) as target:
        np.savez(target, allow_pickle=False, **{f"{i}": a for i, a in enumerate(leaves)})
    except OSError as error:
      _say(f"{file} cannot be written ({error.strerror}), so its prompt will be computed again.")

  def clear(self) -> None:
    """Nothing is removed when parameters change: a file of others has another name, and they may come back."""

  def _make_room(self, size: int) -> None:
    """Removes what was not used for longest until so many bytes more fit, and what killed processes have left."""
    found = []
    for file in self._folder.iterdir():
      with suppress(OSError):  # another process removes, too
        about = file.stat()
        if file.name.endswith(UNFINISHED) and about.st_mtime < time.time() - _STALE:
          file.unlink()
        elif file.suffix == ".npz":
          found.append((about.st_mtime_ns, about.st_size, file))
    used = sum(bytes_of for _, bytes_of, _ in found)
    for _, bytes_of, file in sorted(found):
      if used + size <= self._most:
        return
      with suppress(OSError):
        file.unlink()
      used -= bytes_of

  def _file(self, tokens: Sequence[int]) -> Path:
    shapes = [(s.shape, str(s.dtype)) for s in jax.tree.leaves(self._like)]
    about = repr((self._model(), shapes, list(map(int, tokens))))
    return self._folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.npz"


def _say(what: str) -> None:
  _LOG.warning(f"maxtext: {what}", extra=ON_STDERR)
