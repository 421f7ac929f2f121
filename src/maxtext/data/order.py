"""The order of a source's documents: an infinite sequence of epochs, each a new permutation of all documents.

There is no table with an entry per document. In each epoch the shards are permuted and cut into windows, and the
documents of a window are permuted by a Feistel network, so that at any time only a window's shards are read from. A
corpus of few shards is one window.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from maxtext.data.hashing import splitmix64


class ShuffleWindow(NamedTuple):
  """A window is closed as soon as it holds this many shards or this many documents."""

  shards: int
  documents: int = 1 << 62


FEW_SHARDS = ShuffleWindow(128)
"""Few enough to keep their readers open."""


class DocumentOrder:
  """The i-th document of the infinite order, for any i."""

  def __init__(self, sizes: Sequence[int], window: ShuffleWindow, seed: tuple[int, ...], shuffle: bool = True) -> None:
    """`sizes` are the documents of each shard. Without `shuffle`, every epoch has the original order."""
    self._sizes, self._seed, self._shuffle, self._window = np.asarray(sizes, np.int64), seed, shuffle, window
    self.documents = int(self._sizes.sum())
    self._epoch = lru_cache(maxsize=4)(lambda epoch: _Epoch(self._sizes, (*self._seed, epoch), self._window))

  def document(self, i: int) -> int:
    """The number of the i-th document."""
    epoch, i = divmod(i, self.documents)
    return self._epoch(epoch).document(i) if self._shuffle else i


@lru_cache(maxsize=64)
def permutation(count: int, *seed: int) -> np.ndarray:
  """A permutation as a table; for small counts only."""
  keys = np.arange(count, dtype=np.uint64) + np.uint64(_hash(*seed) << 32)
  return np.argsort(splitmix64(keys), kind="stable")


class _Epoch:
  """One permutation. Streams may be in different epochs, so a few of these are cached."""

  def __init__(self, sizes: np.ndarray, seed: tuple[int, ...], window: ShuffleWindow) -> None:
    self._seed = seed
    self._sizes, self._limit = sizes, window
    self._first = (np.cumsum(sizes) - sizes).tolist()

  def document(self, i: int) -> int:
    window = bisect_right(self._window_starts, i) - 1
    start = self._window_starts[window]
    i = start + _permute(i - start, self._window_starts[window + 1] - start, (*self._seed, 1 + window))
    place = bisect_right(self._ends, i)
    shard = self._shards[place]
    return self._first[shard] + i - (self._ends[place] - int(self._sizes[shard]))

  @cached_property
  def _shards(self) -> list[int]:
    count = len(self._sizes)
    if count <= self._limit.shards and self._sizes.sum() <= self._limit.documents:
      return list(range(count))  # one window: its documents are permuted as a whole
    return permutation(count, *self._seed, 0).tolist()

  @cached_property
  def _ends(self) -> list[int]:
    return np.cumsum(self._sizes[self._shards]).tolist()

  @cached_property
  def _window_starts(self) -> list[int]:
    starts, shards = [0], 0
    for end in self._ends:
      shards += 1
      if shards == self._limit.shards or end - starts[-1] >= self._limit.documents:
        starts.append(end)
        shards = 0
    return starts if starts[-1] == self._ends[-1] else [*starts, self._ends[-1]]


def _permute(i: int, count: int, seed: tuple[int, ...]) -> int:
  if count <= 8192:  # Feistel networks over few numbers are slow
    return int(permutation(count, *seed)[i])
  from grain.experimental import index_shuffle

  return index_shuffle(i, max_index=count - 1, seed=_hash(*seed), rounds=4)


@lru_cache(maxsize=1024)
def _hash(*numbers: int) -> int:
  """A seed from several numbers; a sum would make epoch 1 of seed 0 the same as epoch 0 of seed 1."""
  return int(np.random.SeedSequence(numbers).generate_state(1)[0])
