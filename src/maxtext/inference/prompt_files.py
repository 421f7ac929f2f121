"""Caches of prompts in a folder, a file for each, so that a prompt that is asked often is computed once for all runs.

A file belongs to the model and the parameters that it was computed with, by their checksums.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from maxtext.configs import ConfigError
from maxtext.inference.state import Caches


class PromptFiles:
  """What a scheduler asks for beginnings of prompts, and tells of those it has computed.

  Args:
    folder: of the files; made when the first is written.
    model: what tells it and its parameters from all others.
    like: shapes of a row.
    reads: files are read; otherwise they are only written.
  """

  def __init__(self, folder: Path, model: str, like: Caches, reads: bool) -> None:
    self._folder, self._model, self._like, self._reads = folder, model, like, reads

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
    if not file.exists():  # a text that was interrupted goes on with a part of its answer
      return 0, None
    with np.load(file) as arrays:
      found = [arrays[f"{i}"].view(s.dtype).reshape(s.shape) for i, s in enumerate(structs)]
    return len(prompt) - 1, jax.tree.unflatten(tree, found)

  def keep(self, prompt: Sequence[int], count: int, row: Caches) -> None:
    """Writes the row of a prompt, once it is the row of all that an answer needs: of all but the last token."""
    if count != len(prompt) - 1:
      return
    leaves = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in jax.tree.leaves(jax.device_get(row)))
    self._folder.mkdir(parents=True, exist_ok=True)
    file = self._file(prompt[:count])
    unfinished = file.with_name(f"{file.name}.unfinished")
    with unfinished.open("wb") as target:
      np.savez(target, allow_pickle=False, **{f"{i}": a for i, a in enumerate(leaves)})
    unfinished.rename(file)

  def _file(self, tokens: Sequence[int]) -> Path:
    shapes = [(s.shape, str(s.dtype)) for s in jax.tree.leaves(self._like)]
    about = repr((self._model, shapes, list(map(int, tokens))))
    return self._folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.npz"
