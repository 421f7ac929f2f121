"""Attention of rows split over devices, where keys travel round the ring of devices instead of being gathered.

Each round weighs the own queries with the keys of one device and passes those on; rounds are joined by their largest
logits, as in online softmax. No device ever holds the keys of a whole row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.kernels.scores import MASKED, Scoring, Tokens, scores


class _Sums(NamedTuple):
  """What the rounds so far say of a softmax: largest logit and sum [B,K,G,S], weighted values [B,K,G,S,D]."""

  largest: jax.Array
  total: jax.Array
  values: jax.Array


def ring(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  queries: Tokens,
  scoring: Scoring,
  sinks: jax.Array | None,
  precision: str,
  *,
  axes: tuple[str, ...],
  parts: int,
) -> jax.Array:
  """Inside `shard_map`, with the part of a row that this device holds; `axes` of the mesh form the ring."""
  B, S, H, _ = q.shape
  K, D = k.shape[2], v.shape[-1]
  onward = [(part, (part + 1) % parts) for part in range(parts)]

  def join(sums: _Sums, k: jax.Array, v: jax.Array, keys: Tokens) -> _Sums:
    logits = scores(q, k, queries, keys, scoring, precision)
    largest = jnp.maximum(sums.largest, logits.max(-1))
    weights = jnp.exp(logits - largest[..., None])
    shrunk = jnp.exp(sums.largest - largest)
    values = jnp.einsum("bkgst,btkd->bkgsd", weights.astype(v.dtype), v, precision=precision)
    return _Sums(largest, sums.total * shrunk + weights.sum(-1), sums.values * shrunk[..., None] + values)

  one: Callable[..., _Sums] = jax.checkpoint(join)

  def turn(carry: tuple[_Sums, tuple], _: None) -> tuple[tuple[_Sums, tuple], None]:
    sums, visiting = carry
    passed_on = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, onward), visiting)
    return (one(sums, *visiting), passed_on), None

  shape = (B, K, H // K, S)
  start = _Sums(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, D)))
  if sinks is not None:  # a logit that every query sees, and that gives nothing
    column = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, H // K, 1), shape)
    start = _Sums(column, jnp.ones(shape), start.values)
  (sums, _), _ = jax.lax.scan(turn, (start, (k, v, queries)), None, length=parts)
  out = sums.values / sums.total[..., None]
  return jnp.moveaxis(out, 3, 1).reshape(B, S, H, D).astype(v.dtype)
