"""What every layer of one call shares, token by token."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from maxtext.layers.rope import RotaryEmbedding, Table, rotary_table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
  """Per-token context. A pytree, handed through stacks explicitly, so that a pipeline can send it along.

  Attributes:
    positions: [B,S] where tokens stand in their document. They alone order tokens: masks, windows, learned positions
      and the places of a cache go by them. Rotary tables may go by other positions.
    segments: [B,S] document of each token, or None where a row is one document.
    spans: [B,S] tokens of a document with the same number, other than 0, see each other both ways; None is none. A
      cache does not keep them, so a chunk of a prompt has all of a span.
    tables: rotary tables, one per distinct `RotaryEmbedding` of the model.
    tokens: [B,S] the tokens themselves, for layers that look them up.
    count: [B] how many tokens of each row count, from the first on; those after them leave nothing in a cache. None is
      all.
    pages: [B,M] the pages of each row, where some of the cache lies in pages.
    fresh: the cache is empty, so tokens see each other alone.
    end: the position behind the last that counts in any row, where the cache has places for all of them; rows are then
      read up to it. None reads them whole.
  """

  positions: jax.Array
  segments: jax.Array | None
  tables: dict[str, Table]
  tokens: jax.Array | None = None
  count: jax.Array | None = None
  pages: jax.Array | None = None
  fresh: bool = field(default=False, metadata={"static": True})
  end: jax.Array | None = None
  spans: jax.Array | None = None

  @staticmethod
  def of(
    positions: jax.Array,
    segments: jax.Array | None,
    ropes: Iterable[RotaryEmbedding],
    dtype: jax.typing.DTypeLike,
    tokens: jax.Array | None = None,
    count: jax.Array | None = None,
    fresh: bool = False,
    pages: jax.Array | None = None,
    end: jax.Array | None = None,
    rotary_positions: jax.Array | None = None,
    spans: jax.Array | None = None,
  ) -> "Context":
    """Computes the rotary tables of all layers once.

    `rotary_positions`, [B,S] or [B,S,C] of C components, are what they turn by; None is `positions`.
    """
    turned_by = positions if rotary_positions is None else rotary_positions
    tables = {repr(r): rotary_table(r, turned_by, dtype) for r in dict.fromkeys(ropes)}
    return Context(positions, segments, tables, tokens, count, pages, fresh, end, spans)

  def table(self, rope: RotaryEmbedding) -> Table:
    """The rotary table of a layer."""
    return self.tables[repr(rope)]

  @property
  def counts(self) -> jax.Array | None:
    """Whether each token counts, [B,S]; None is all."""
    return None if self.count is None else jnp.arange(self.positions.shape[1]) < self.count[:, None]

  @property
  def real(self) -> jax.Array | None:
    """Whether a token counts and is no padding, [B,S]; None is all."""
    if self.segments is None:
      return self.counts
    real = self.segments != 0
    return real if self.counts is None else real & self.counts

  @property
  def begins(self) -> jax.Array:
    """Whether a token is the first of its document, [B,S]."""
    begins = self.positions == 0
    if self.segments is not None:
      begins |= jnp.diff(self.segments, axis=1, prepend=self.segments[:, :1]) != 0
    return begins
