"""Documents in tables: rows whose columns hold text or tokens, read at random."""

from collections.abc import Callable, Sequence
from typing import Any

from maxtext.data.order import FEW_SHARDS, Window
from maxtext.data.sources.encoding import Encoding

Read = Callable[[Sequence[int]], Sequence[Sequence[Any]]]


class ColumnDocuments:
  """The documents of a table.

  Attributes:
    sizes: documents in each shard.
    window: how much is shuffled together.
    identity: what the rows are, and how they become tokens.
    read: gives the values of the columns of some rows.
    tokens: of the values of a row.
  """

  def __init__(
    self, read: Read, encoding: Encoding, sizes: Sequence[int], about: dict[str, Any], window: Window = FEW_SHARDS
  ) -> None:
    """`about` says which data it is, wherever it is."""
    self.sizes, self.window = sizes, window
    self.identity = {"documents": sum(sizes), **about, **encoding.identity}
    self.read, self.tokens = read, encoding
