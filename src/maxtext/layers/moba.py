"""Mixture of block attention (MoBA): a query sees its own block of keys, and earlier blocks with the best mean keys.

Shapes: B batch, S queries, T keys, H query heads, K key heads, D head dim, N blocks.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext.kernels.attention_mask import Tokens


@dataclass(frozen=True)
class MoBA:
  """A query sees `count` blocks of `size` keys, including its own."""

  size: int
  count: int

  def selected(self, q: jax.Array, k: jax.Array, queries: Tokens, keys: Tokens) -> jax.Array:
    """Whether a key [B,T,K,D] is in a selected block of a query [B,S,H,D], [B,H,S,T]; no gradient flows through it.

    Blocks do not cross documents. Keys must be in the order of their positions; the block of a query is the last one
    that begins at or before it.
    """
    q, k = (jax.lax.stop_gradient(a).astype(jnp.float32) for a in (q, k))
    (B, S, H, D), (T, K) = q.shape, k.shape[1:3]
    number, total = self._numbers(keys)
    number = jnp.broadcast_to(number, (B, T))
    member = jax.nn.one_hot(number, total)
    mean = jnp.einsum("btn,btkd->bnkd", member, k) / jnp.maximum(member.sum(1), 1)[..., None, None]
    scores = jnp.einsum("bskgd,bnkd->bkgsn", q.reshape(B, S, K, H // K, D), mean).reshape(B, H, S, total)
    if keys.segments is None:
      own = jnp.broadcast_to(queries.positions // self.size, (B, S))
      past = jnp.arange(total) < own[..., None]
    else:
      own = number
      documents = jnp.max(member * keys.segments[..., None], axis=1)
      past = (jnp.arange(total) < own[..., None]) & (documents[:, None] == keys.segments[..., None])
    is_own = jnp.arange(total) == own[..., None]
    scores = jnp.where(is_own[:, None], jnp.inf, jnp.where(past[:, None], scores, -jnp.inf))
    best = jax.nn.one_hot(jax.lax.top_k(scores, min(self.count, total))[1], total).sum(-2)
    return jnp.einsum("bhsn,btn->bhst", jnp.where(scores > -jnp.inf, best, 0), member) > 0

  def _numbers(self, keys: Tokens) -> tuple[jax.Array, int]:
    """The block number of each key within its row, and the largest possible number of blocks."""
    T = keys.positions.shape[1]
    if keys.segments is None:
      return keys.positions // self.size, -(-T // self.size)
    new = jnp.diff(keys.segments, axis=1, prepend=-1) != 0
    return jnp.cumsum(new | (keys.positions % self.size == 0), axis=1) - 1, T
