"""Per-token arrays that all layers of one call share."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from maxtext.layers.dropout import fold_in
from maxtext.layers.rope import RotaryEmbedding, Table, rotary_table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
  """Per-token context. A pytree, an explicit argument of stacks, so that a pipeline can send it between stages.

  Attributes:
    positions: [B,S] positions of tokens in their documents. Masks, windows, learned position embeddings and cache slots
      depend on them; rotary tables may use other positions.
    segments: [B,S] document of each token, or None where a row is one document.
    spans: [B,S] tokens of a document with the same number, other than 0, attend to each other bidirectionally; None if
      there are no spans. A cache does not store them, so a prefill chunk must hold a whole span.
    tables: rotary tables, one per distinct `RotaryEmbedding` of the model.
    tokens: [B,S] token ids, for layers that look them up.
    count: [B] number of valid tokens of each row, which come first; the others are not written to a cache. None means
      that all are valid.
    pages: [B,M] the pages of each row, where the cache is paged.
    fresh: the cache is empty, so attention is over the new tokens only.
    end: one more than the last valid position of any row, if the cache has a slot for every position; only slots below
      it are then read. None reads all slots.
    dropout_keys: [B,S,2] the random key of each token, from which layers draw dropout masks; None is no dropout.
    routed_experts: [B,S,K] the experts that a token is routed to, negative where the router selects them; of a stack,
      [B,S,L,K] those of all its layers. None leaves all to the routers.
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
  dropout_keys: jax.Array | None = None
  routed_experts: jax.Array | None = None

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
    dropout_keys: jax.Array | None = None,
  ) -> "Context":
    """Computes the rotary tables of all layers once.

    They are for `rotary_positions`, [B,S] or [B,S,C] of C components; None is `positions`.
    """
    rotary = positions if rotary_positions is None else rotary_positions
    tables = {repr(r): rotary_table(r, rotary, dtype) for r in dict.fromkeys(ropes)}
    return Context(positions, segments, tables, tokens, count, pages, fresh, end, spans, dropout_keys)

  def fold_in(self, number: jax.typing.ArrayLike | None) -> "Context":
    """The context of one part of the model, which has dropout masks of its own."""
    if self.dropout_keys is None or number is None:
      return self
    return replace(self, dropout_keys=fold_in(self.dropout_keys, number))

  @property
  def differs_by_layer(self) -> bool:
    """Whether the layers of a stack have contexts of their own."""
    return self.dropout_keys is not None or self.routed_experts is not None

  def of_layer(self, number: jax.Array | None) -> "Context":
    """The context of a layer of a stack; None is the only one, where they do not differ."""
    own = self.fold_in(number)
    if self.routed_experts is None or number is None:
      return own
    return replace(own, routed_experts=jax.lax.dynamic_index_in_dim(self.routed_experts, number, 2, keepdims=False))

  def table(self, rope: RotaryEmbedding) -> Table:
    """The rotary table of a layer."""
    return self.tables[repr(rope)]

  @property
  def counts(self) -> jax.Array | None:
    """Whether each token is valid, [B,S]; None means all."""
    return None if self.count is None else jnp.arange(self.positions.shape[1]) < self.count[:, None]

  @property
  def real(self) -> jax.Array | None:
    """Whether each token is valid and not padding, [B,S]; None means all."""
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
