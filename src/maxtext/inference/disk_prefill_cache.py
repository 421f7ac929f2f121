"""Prefill cache on disk: one file with the KV cache of each prompt, so that all runs compute a prompt only once.

The file name includes a checksum of the model and its parameters, and of an adapter. Any file may be missing: a damaged
or unreadable file is computed again, a file that cannot be written is skipped, and the least recently used files are
evicted.
Several processes may share a directory.
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
from maxtext.inference.decode_state import Caches
from maxtext.logs import ON_STDERR
from maxtext.storage.atomic import UNFINISHED, atomic_file

_LOG = logging.getLogger(__name__)

MAX_BYTES = 64 * 2**30
"""Default size limit of a directory."""

_STALE_SECONDS = 3600.0  # an unfinished file of this age was left by a killed process
_READ_ERRORS = (zipfile.BadZipFile, ValueError, KeyError, EOFError, NotImplementedError)


class DiskPrefillCache:
  """The prefix cache of a scheduler in a directory. An entry always covers a prompt without its last token.

  Args:
    directory: where the files are; created with the first file.
    fingerprint: returns the checksum of the model and its current parameters.
    like: shapes and dtypes of a row.
    reads: whether files are read; otherwise they are only written.
    max_bytes: size limit of the directory.
  """

  def __init__(
    self, directory: Path, fingerprint: Callable[[], str], like: Caches, reads: bool, max_bytes: int = MAX_BYTES
  ) -> None:
    self._directory, self._fingerprint, self._like = directory, fingerprint, like
    self._reads, self._max_bytes = reads, max_bytes

  def check(self, prompt: Sequence[int], adapter: str = "") -> None:
    """Raises `ConfigError` for a prompt without a file where files are read."""
    if self._reads and len(prompt) > 1 and not self._file(prompt[:-1], adapter).exists():
      raise ConfigError(
        f"load_from_prefill_dir=true, but prefill_cache_dir={self._directory} has no cache of this prompt by these "
        "parameters: decode it once without load_from_prefill_dir."
      )

  def lookup(self, prompt: Sequence[int], adapter: str = "") -> tuple[int, Caches | None]:
    """The length and the row of a prompt without its last token, or (0, None) where there is no readable file."""
    if not self._reads or len(prompt) < 2:
      return 0, None
    structs, tree = jax.tree.flatten(self._like)
    file = self._file(prompt[:-1], adapter)
    try:  # a preempted request is prefilled with a part of its output, which has no file
      with np.load(file) as arrays:
        found = [arrays[f"{i}"].view(s.dtype).reshape(s.shape) for i, s in enumerate(structs)]
      os.utime(file)
    except FileNotFoundError:
      return 0, None
    except OSError as error:
      _warn(f"{file} cannot be read ({error.strerror}), so its prompt is computed.")
      return 0, None
    except _READ_ERRORS as error:
      _warn(f"{file} is damaged ({error}), so its prompt is computed and written again.")
      with suppress(OSError):
        file.unlink()
      return 0, None
    return len(prompt) - 1, jax.tree.unflatten(tree, found)

  def store(self, prompt: Sequence[int], count: int, row: Caches, adapter: str = "") -> None:
    """Writes the row of a prompt if it covers all tokens but the last; rows of earlier chunks are ignored."""
    if count != len(prompt) - 1:
      return
    whole = jax.tree.map(_padded, jax.device_get(row), self._like)
    leaves = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in jax.tree.leaves(whole)]
    size = sum(leaf.nbytes for leaf in leaves)
    if size > self._max_bytes:
      return
    file = self._file(prompt[:count], adapter)
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
      self._directory.mkdir(parents=True, exist_ok=True)
      self._evict(size)
      with atomic_file(file, unfinished=unfinished) as target:
        np.savez(target, allow_pickle=False, **{f"{i}": a for i, a in enumerate(leaves)})
    except OSError as error:
      _warn(f"{file} cannot be written ({error.strerror}), so its prompt will be computed again.")

  def clear(self) -> None:
    """Does nothing: files of other parameters have other names and become valid again if those parameters return."""

  def _evict(self, size: int) -> None:
    """Removes the least recently used files until `size` more bytes fit, and unfinished files of killed processes."""
    found = []
    for file in self._directory.iterdir():
      with suppress(OSError):  # another process may remove the same file
        status = file.stat()
        if file.name.endswith(UNFINISHED) and status.st_mtime < time.time() - _STALE_SECONDS:
          file.unlink()
        elif file.suffix == ".npz":
          found.append((status.st_mtime_ns, status.st_size, file))
    used = sum(file_size for _, file_size, _ in found)
    for _, file_size, file in sorted(found):
      if used + size <= self._max_bytes:
        return
      with suppress(OSError):
        file.unlink()
      used -= file_size

  def _file(self, tokens: Sequence[int], adapter: str = "") -> Path:
    shapes = [(s.shape, str(s.dtype)) for s in jax.tree.leaves(self._like)]
    key = repr((self._fingerprint(), *([adapter] if adapter else []), shapes, list(map(int, tokens))))
    return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def _padded(array: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray:
  """An array of a row that may be shorter than the longest sequence."""
  return np.pad(array, [(0, most - size) for size, most in zip(array.shape, like.shape, strict=True)])


def _warn(message: str) -> None:
  _LOG.warning(f"maxtext: {message}", extra=ON_STDERR)
