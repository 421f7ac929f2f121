"""Documents of one source or of several in given shares, and spans of long ones, dealt to streams."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from maxtext.data.documents import DataSource
from maxtext.data.order import DocumentOrder
from maxtext.data.spans import Items


class SourceMixture:
  """The k-th item of any of S streams: a document, or a span of one that is long.

  Every stream takes its items from the sources in a fixed cycle that has each in its share, and every source has an
  endless order of its own: no stream is left with a single source, and its place is still one number.
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
    """With `epochs`, a stream ends where its first source to do so has been passed through that often.

    With `vocab_size`, a record with a token outside of it is refused.
    """
    self._streams, self._epochs = streams, epochs
    self._items = items = [Items(source, vocab_size) for source in sources]
    self._orders = [
      DocumentOrder(item.sizes, source.documents.window, (seed, i), shuffle)
      for i, (source, item) in enumerate(zip(sources, items, strict=True))
    ]
    # Weights count documents, so one that is cut brings all of its spans.
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
    """Streams begin at different places of the cycle, or a batch would be of one source."""
    return stream * 2654435761 % len(self._cycle)

  def _count_before(self, stream: int) -> list[int]:
    return np.bincount(self._cycle[: self._start(stream)], minlength=len(self._items)).tolist()


def _source_cycle(weights: Sequence[float]) -> tuple[list[int], list[int], list[int]]:
  """Which source comes where, how many of the same came earlier in the cycle, and how many of each there are.

  The rarest comes a hundred times, so that rounding moves no share by more than a hundredth; the length is bounded.
  """
  parts = np.asarray(weights, np.float64) / np.sum(weights)
  shares = np.maximum(1, np.rint(parts * min(100 / parts.min(), 100_000))).astype(np.int64)
  sources = np.repeat(np.arange(len(weights)), shares)
  earlier = np.concatenate([np.arange(n) for n in shares])
  order = np.argsort((earlier + 0.5) / shares[sources], kind="stable")  # each evenly spread
  return sources[order].tolist(), earlier[order].tolist(), shares.tolist()
