"""Mixtures: documents of one or more weighted sources, and spans of long ones, assigned to streams."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from maxtext.data.documents import DataSource
from maxtext.data.order import DocumentOrder
from maxtext.data.spans import Items


class SourceMixture:
  """The k-th item of any of S streams: a document, or a span of one that is long.

  Every stream takes its items from the sources in a fixed weighted cycle, and every source has an infinite order of its
  own. So every stream has all sources, and its state is still one number.
  """

  def __init__(
    self,
    sources: Sequence[DataSource],
    streams: int,
    seed: int,
    shuffle: bool = True,
    epochs: int | None = None,
    vocab_size: int | None = None,
  ) -> None:
    """With `epochs`, a stream ends when any of its sources has been read that often.

    With `vocab_size`, a token outside of it raises an error.
    """
    self._streams, self._epochs = streams, epochs
    self._items = items = [Items(source, vocab_size) for source in sources]
    self._orders = [
      DocumentOrder(item.sizes, source.documents.window, (seed, i), shuffle)
      for i, (source, item) in enumerate(zip(sources, items, strict=True))
    ]
    # Weights are of documents, so one that is split brings all of its spans.
    self._cycle, self._earlier, self._shares = _source_cycle(
      [s.weight * item.count / max(sum(s.documents.sizes), 1) for s, item in zip(sources, items, strict=True)]
    )
    self._before = lru_cache(maxsize=None)(self._count_before)

  def read(self, wanted: Sequence[tuple[int, int]]) -> list[np.ndarray | None]:
    """The tokens of items (stream, k), each the k-th of its stream; None after the last."""
    found: list[np.ndarray | None] = [None] * len(wanted)
    asked: list[list[tuple[int, int]]] = [[] for _ in self._items]
    for place, (stream, k) in enumerate(wanted):
      source, i = self._locate(stream, k)
      order = self._orders[source]
      if self._epochs is None or i < order.documents * self._epochs:
        asked[source].append((place, order.document(i)))
    for items, numbers in zip(self._items, asked, strict=True):
      for (place, _), tokens in zip(numbers, items.read([number for _, number in numbers]), strict=True):
        found[place] = tokens
    return found

  def _locate(self, stream: int, k: int) -> tuple[int, int]:
    """The source of a stream's k-th item, and its number in the endless order of that source."""
    if len(self._items) == 1:
      return 0, stream + k * self._streams
    start = self._start(stream)
    turns, place = divmod(start + k, len(self._cycle))
    source = self._cycle[place]
    taken = turns * self._shares[source] + self._earlier[place] - self._before(stream)[source]
    return source, stream + taken * self._streams

  def _start(self, stream: int) -> int:
    """Streams start at different places of the cycle, so that a batch has all sources."""
    return stream * 2654435761 % len(self._cycle)

  def _count_before(self, stream: int) -> list[int]:
    return np.bincount(self._cycle[: self._start(stream)], minlength=len(self._items)).tolist()


def _source_cycle(weights: Sequence[float]) -> tuple[list[int], list[int], list[int]]:
  """The source at each place of the cycle, how often it came earlier in the cycle, and how often each source occurs.

  The rarest source occurs a hundred times, so that rounding changes no weight by more than 1 %; the length is bounded.
  """
  parts = np.asarray(weights, np.float64) / np.sum(weights)
  shares = np.maximum(1, np.rint(parts * min(100 / parts.min(), 100_000))).astype(np.int64)
  sources = np.repeat(np.arange(len(weights)), shares)
  earlier = np.concatenate([np.arange(n) for n in shares])
  order = np.argsort((earlier + 0.5) / shares[sources], kind="stable")  # each evenly spread
  return sources[order].tolist(), earlier[order].tolist(), shares.tolist()
