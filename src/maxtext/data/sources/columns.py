"""Documents in tables with random access, whose columns hold text or tokens."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxtext.data.order import FEW_SHARDS, ShuffleWindow
from maxtext.data.sources.encoding import Encoding

Read = Callable[[Sequence[int]], Sequence[Any]]


class ColumnDocuments:
  """The documents of a table.

  Attributes:
    sizes: number of documents in each shard.
    window: how many documents are shuffled together.
    identity: what determines the rows and their tokens.
    counts: the known limits of document lengths.
    read: returns the rows with these numbers.
    where: describes the location of a row, for messages.
    encoding: makes documents of rows.
    values: returns the values of a row's columns.
  """

  def __init__(
    self,
    read: Read,
    encoding: Encoding,
    sizes: Sequence[int],
    about: dict[str, Any],
    where: Callable[[int], str],
    window: ShuffleWindow = FEW_SHARDS,
    values: Callable[[Any], Sequence[Any]] = list,
  ) -> None:
    """`about` identifies the data, whatever its location; `values` returns the values of a row's columns."""
    self.sizes, self.window = sizes, window
    self.identity = {"documents": sum(sizes), **about, **encoding.identity}
    self.counts = encoding.counts(len(sizes))
    self.read, self.where = read, where
    self.encoding, self.values = encoding, values

  def with_neighbours(self) -> "ColumnDocuments":
    """The same documents, whose rows bring the values of the next row as a last value."""
    found, count = copy.copy(self), sum(self.sizes)

    def read(numbers: Sequence[int]) -> list[tuple[Any, Any]]:
      rows = list(self.read([*numbers, *((number + 1) % count for number in numbers)]))
      return list(zip(rows[: len(numbers)], rows[len(numbers) :], strict=True))

    found.read = read
    found.values = lambda record: [*self.values(record[0]), self.values(record[1])]
    return found

  def tokens(self, record: Any) -> np.ndarray:
    """The tokens of the document in a row."""
    return self.encoding(self.values(record))
