"""Documents in tables: rows whose columns hold text or tokens, read at random."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxtext.data.documents import TokenCounts
from maxtext.data.order import FEW_SHARDS, ShuffleWindow
from maxtext.data.sources.encoding import Encoding

Read = Callable[[Sequence[int]], Sequence[Any]]


class ColumnDocuments:
  """The documents of a table.

  Attributes:
    sizes: documents in each shard.
    window: how much is shuffled together.
    identity: what the rows are, and how they become tokens.
    counts: what truncation says of lengths.
    read: gives some rows.
    where: says which row it is.
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
    """`about` says which data it is, wherever it is; `values` gives the values of a row's columns."""
    self.sizes, self.window = sizes, window
    self.identity = {"documents": sum(sizes), **about, **encoding.identity}
    self.counts = TokenCounts(None, None if encoding.most is None else [encoding.most] * len(sizes))
    self.read, self.where = read, where
    self._encoding, self._values = encoding, values

  def tokens(self, record: Any) -> np.ndarray:
    """The tokens of a row."""
    return self._encoding(self._values(record))
