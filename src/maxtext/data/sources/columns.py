"""Documents in tables with random access, whose columns hold text or tokens."""

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

  def tokens(self, record: Any) -> np.ndarray:
    """The tokens of the document in a row."""
    return self.encoding(self.values(record))
