"""A softmax over keys that come in parts: what the parts so far say of it, and how one more joins them.

A part of which a query sees nothing leaves its sums exactly as they are, so it may as well not come.

Shapes: B batch, S queries, T keys, H query heads, K key heads, G = H/K query heads per key head, D width of values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.kernels.attention_mask import MASKED, ScoreSpec, Tokens, scores
from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls


class OnlineSoftmax(NamedTuple):
  """Of the parts so far: largest logit and sum [B,K,G,S], weighted values [B,K,G,S,D]."""

  largest: jax.Array
  total: jax.Array
  values: jax.Array

  @staticmethod
  def empty(shape: tuple[int, int, int, int], width: int, sinks: jax.Array | None) -> "OnlineSoftmax":
    """Of no part; a sink is a logit that every query sees, and that gives nothing."""
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
    """With the keys and values of one more part."""
    logits = scores(q, k, queries, keys, scoring, precision, matmuls=matmuls)
    largest = jnp.maximum(self.largest, logits.max(-1))
    weights = jnp.exp(logits - largest[..., None])
    shrunk = jnp.exp(self.largest - largest)
    values = matmuls.values(
      "bkgst,btkd->bkgsd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    return OnlineSoftmax(largest, self.total * shrunk + weights.sum(-1), self.values * shrunk[..., None] + values)

  @property
  def mean(self) -> jax.Array:
    """What attention returns, [B,S,H,D]."""
    B, K, G, S, D = self.values.shape
    return jnp.moveaxis(self.values / self.total[..., None], 3, 1).reshape(B, S, K * G, D)
