"""Attention of rows split over devices, where keys travel round the ring of devices instead of being gathered.

Each round weighs the own queries with the keys of one device and passes those on; rounds are joined by their largest
logits, as in online softmax. No device ever holds the keys of a whole row.
"""

from collections.abc import Callable

import jax

from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls
from maxtext.kernels.scores import Scoring, Tokens
from maxtext.kernels.sums import Sums


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
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """Inside `shard_map`, with the part of a row that this device holds; `axes` of the mesh form the ring."""
  B, S, H, _ = q.shape
  K = k.shape[2]
  onward = [(part, (part + 1) % parts) for part in range(parts)]

  def join(sums: Sums, k: jax.Array, v: jax.Array, keys: Tokens) -> Sums:
    return sums.join(q, k, v, queries, keys, scoring, precision, matmuls)

  one: Callable[..., Sums] = jax.checkpoint(join)

  def turn(carry: tuple[Sums, tuple], _: None) -> tuple[tuple[Sums, tuple], None]:
    sums, visiting = carry
    passed_on = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, onward), visiting)
    return (one(sums, *visiting), passed_on), None

  start = Sums.empty((B, K, H // K, S), v.shape[-1], sinks)
  (sums, _), _ = jax.lax.scan(turn, (start, (k, v, queries)), None, length=parts)
  return sums.mean.astype(v.dtype)
