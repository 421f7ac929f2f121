"""What every layer of one call shares, token by token."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax

from maxtext.layers.rope import Rope, Table, rotary_table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
  """Per-token context. A pytree, handed through stacks explicitly, so that a pipeline can send it along.

  Attributes:
    positions: [B,S]; with a cache, also the rows that are written.
    segments: [B,S] document of each token, or None where a row is one document.
    tables: rotary tables, one per distinct `Rope` of the model.
  """

  positions: jax.Array
  segments: jax.Array | None
  tables: dict[str, Table]

  @staticmethod
  def of(
    positions: jax.Array, segments: jax.Array | None, ropes: Iterable[Rope], dtype: jax.typing.DTypeLike
  ) -> "Context":
    """Computes the rotary tables of all layers once."""
    return Context(positions, segments, {repr(r): rotary_table(r, positions, dtype) for r in dict.fromkeys(ropes)})

  def table(self, rope: Rope) -> Table:
    """The rotary table of a layer."""
    return self.tables[repr(rope)]
