"""Documents of one source or of several in given shares, dealt to streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from maxtext.data.order import Order, Window


class Documents(Protocol):
  """A source with random access: numbered documents, in shards."""

  @property
  def sizes(self) -> Sequence[int]:
    """Documents in each shard."""
    ...

  @property
  def window(self) -> Window:
    """How much of it is shuffled together."""
    ...

  @property
  def identity(self) -> dict[str, Any]:
    """What must not change between a run's beginning and its resumption, wherever the files are."""
    ...

  def read(self, numbers: Sequence[int]) -> Sequence[Any]:
    """The records of these documents."""
    ...

  def tokens(self, record: Any) -> np.ndarray:
    """The tokens of a record."""
    ...


@dataclass(frozen=True)
class Source:
  """A part of a corpus, and how many of the documents it gives, relative to the others."""

  documents: Documents
  weight: float = 1.0


class Mixture:
  """The k-th document of any of S streams.

  Every stream takes its documents from the sources in a fixed cycle that has each in its share, and every source has an
  endless order of its own: no stream is left with a single source, and its place is still one number.
  """

  def __init__(
    self, sources: Sequence[Source], streams: int, seed: int, shuffle: bool = True, epochs: int | None = None
  ) -> None:
    """With `epochs`, a stream ends where its first source to do so has been passed through that often."""
    self._sources, self._streams, self._epochs = sources, streams, epochs
    self._orders = [Order(s.documents.sizes, s.documents.window, (seed, i), shuffle) for i, s in enumerate(sources)]
    self._cycle, self._earlier, self._shares = _cycle([s.weight for s in sources])
    self._before = lru_cache(maxsize=None)(self._count_before)

  def read(self, wanted: Sequence[tuple[int, int]]) -> list[np.ndarray | None]:
    """The tokens of documents (stream, k), each the k-th of its stream; None after the last."""
    found: list[np.ndarray | None] = [None] * len(wanted)
    asked: list[list[tuple[int, int]]] = [[] for _ in self._sources]
    for place, (stream, k) in enumerate(wanted):
      source, i = self._locate(stream, k)
      order = self._orders[source]
      if self._epochs is None or i < order.documents * self._epochs:
        asked[source].append((place, order.document(i)))
    for documents, numbers in zip((source.documents for source in self._sources), asked, strict=True):
      if numbers:
        records = documents.read([number for _, number in numbers])
        for (place, _), record in zip(numbers, records, strict=True):
          found[place] = documents.tokens(record)
    return found

  def _locate(self, stream: int, k: int) -> tuple[int, int]:
    """The source of a stream's k-th document, and its number in the endless order of that source."""
    if len(self._sources) == 1:
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
    return np.bincount(self._cycle[: self._start(stream)], minlength=len(self._sources)).tolist()


def _cycle(weights: Sequence[float]) -> tuple[list[int], list[int], list[int]]:
  """Which source comes where, how many of the same came earlier in the cycle, and how many of each there are.

  The rarest comes a hundred times, so that rounding moves no share by more than a hundredth; the length is bounded.
  """
  parts = np.asarray(weights, np.float64) / np.sum(weights)
  shares = np.maximum(1, np.rint(parts * min(100 / parts.min(), 100_000))).astype(np.int64)
  sources = np.repeat(np.arange(len(weights)), shares)
  earlier = np.concatenate([np.arange(n) for n in shares])
  order = np.argsort((earlier + 0.5) / shares[sources], kind="stable")  # each evenly spread
  return sources[order].tolist(), earlier[order].tolist(), shares.tolist()
