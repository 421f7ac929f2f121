"""Online softmax: attention over blocks of keys, one after the other.

A block of which a query sees no key leaves its sums unchanged to the bit, so such a block may be skipped.

Shapes: B batch, S queries, T keys, H query heads, K key heads, G = H/K query heads per key head, D width of values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.kernels.attention_mask import MASKED, ScoreSpec, Tokens, scores
from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls


class OnlineSoftmax(NamedTuple):
  """Of the blocks so far: largest logit and sum of exponentials [B,K,G,S], weighted values [B,K,G,S,D]."""

  largest: jax.Array
  total: jax.Array
  values: jax.Array

  @staticmethod
  def empty(shape: tuple[int, int, int, int], width: int, sinks: jax.Array | None) -> "OnlineSoftmax":
    """The state before the first block; a sink is a logit that every query sees, without a value."""
    values = jnp.zeros((*shape, width))
    if sinks is None:
      return OnlineSoftmax(jnp.full(shape, MASKED), jnp.zeros(shape), values)
    column = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, *shape[1:3], 1), shape)
    return OnlineSoftmax(column, jnp.ones(shape), values)

  def join(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: Tokens,
    keys: Tokens,
    scoring: ScoreSpec,
    precision: str,
    matmuls: AttentionMatmuls = PLAIN,
  ) -> "OnlineSoftmax":
    """The state after one more block of keys and values."""
    logits = scores(q, k, queries, keys, scoring, precision, matmuls=matmuls)
    largest = jnp.maximum(self.largest, logits.max(-1))
    weights = jnp.exp(logits - largest[..., None])
    correction = jnp.exp(self.largest - largest)
    values = matmuls.values(
      "bkgst,btkd->bkgsd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    return OnlineSoftmax(
      largest, self.total * correction + weights.sum(-1), self.values * correction[..., None] + values
    )

  @property
  def mean(self) -> jax.Array:
    """The output of attention, [B,S,H,D]."""
    B, K, G, S, D = self.values.shape
    return jnp.moveaxis(self.values / self.total[..., None], 3, 1).reshape(B, S, K * G, D)
