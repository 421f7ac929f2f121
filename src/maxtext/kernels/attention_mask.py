"""Attention masks and logits: which keys a query sees, and their scores. Every attention kernel here uses them.

Shapes: B batch, S queries, T keys, H query heads, K key heads, G = H/K query heads per key head, D head dim.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls
from maxtext.kernels.load_balance import LoadBalancedOrder

# The logit of a masked key: low enough to vanish in a softmax, high enough that the difference of two is finite.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class Tokens(NamedTuple):
  """Positions, documents and spans of tokens. A pytree.

  Attributes:
    positions: [B,S] within the document.
    segments: [B,S] number of the document within the row; None if each row is one document.
    spans: [B,S] tokens of one document with the same number, other than 0, attend to each other bidirectionally (those
      of an image); None if there are no spans.
  """

  positions: jax.Array
  segments: jax.Array | None = None
  spans: jax.Array | None = None

  def part(self, start: int, end: int) -> "Tokens":
    """The tokens of a range."""
    return jax.tree.map(lambda x: x[:, start:end], self)


@dataclass(frozen=True)
class ScoreSpec:
  """How logits are computed, and which keys a query sees.

  Attributes:
    scale: multiplies the dot product of query and key.
    window: number of positions that a query sees, up to and including its own; None is all of them.
    chunked: the window does not slide: positions are divided into chunks of that length, and a query sees its own.
    cap: soft cap of scaled logits, cap * tanh(logit / cap).
    causal: a query sees no later key, except those of its own span. False is for encoders: a window then reaches as far
      forward as back, and a query sees all of its chunk.
  """

  scale: float
  window: int | None = None
  chunked: bool = False
  cap: float | None = None
  causal: bool = True

  def sees(self, queries: jax.Array, keys: jax.Array, together: jax.Array | None = None) -> jax.Array:
    """Whether positions `keys` are visible from positions `queries`.

    `together` says which pairs are of one span: there, all later keys are visible too. A window or a chunk limits
    earlier keys within a span as elsewhere.
    """
    gap = queries - keys
    if not self.causal:
      return self._sees_both_ways(queries, keys, gap)
    if together is None:
      return (gap >= 0) & self.reaches(queries, gap)
    return ((gap >= 0) | together) & self.reaches(queries, jnp.maximum(gap, 0))

  def _sees_both_ways(self, queries: jax.Array, keys: jax.Array, gap: jax.Array) -> jax.Array:
    if self.window is None:
      return jnp.ones_like(gap, bool)
    return queries // self.window == keys // self.window if self.chunked else jnp.abs(gap) < self.window

  def reaches(self, queries: jax.Array, gap: jax.Array) -> jax.Array:
    """Whether a key `gap` positions before `queries` is within the window, or within the query's chunk."""
    if self.window is None:
      return gap >= 0
    return gap <= queries % self.window if self.chunked else gap < self.window


def scores(
  q: jax.Array,
  k: jax.Array,
  queries: Tokens,
  keys: Tokens,
  scoring: ScoreSpec,
  precision: str = "default",
  selected: jax.Array | None = None,
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """Logits [B,K,G,S,T] in float32, `MASKED` where a key is not visible (`ScoreSpec.sees`), of another segment, or not
  selected."""
  B, S, H, D = q.shape
  K = k.shape[2]
  grouped = q.reshape(B, S, K, H // K, D)
  logits = matmuls.scores("bskgd,btkd->bkgst", grouped, k, precision=precision, preferred_element_type=jnp.float32)
  logits = logits * scoring.scale
  if scoring.cap is not None:
    logits = scoring.cap * jnp.tanh(logits / scoring.cap)
  visible = scoring.sees(queries.positions[:, :, None], keys.positions[:, None, :], _together(queries, keys))
  if queries.segments is not None and keys.segments is not None:
    visible &= queries.segments[:, :, None] == keys.segments[:, None, :]
  visible = visible[:, None, None]
  if selected is not None:
    visible = visible & selected.reshape(B, *((K, H // K) if selected.shape[1] == H else (1, 1)), *selected.shape[2:])
  return jnp.where(visible, logits, MASKED)


def _together(queries: Tokens, keys: Tokens) -> jax.Array | None:
  """Whether a query and a key are of one span, [B,S,T]; segments are compared elsewhere."""
  if queries.spans is None or keys.spans is None:
    return None
  return (queries.spans[:, :, None] == keys.spans[:, None, :]) & (queries.spans != 0)[:, :, None]


def gathered(parts: Any, axes: tuple[str, ...], order: LoadBalancedOrder | None) -> Any:
  """Inside `shard_map`: all-gathers rows over the mesh axes `axes` to [B,T,...], in the order of the text."""
  if not axes:
    return parts

  def whole(x: jax.Array) -> jax.Array:
    x = jax.lax.all_gather(x, axes, axis=1, tiled=True)
    return x if order is None else order.undo(x)

  return jax.tree.map(whole, parts)
