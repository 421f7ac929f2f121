"""Attention of rows split over devices, where keys travel round the ring of devices instead of being gathered.

Each round weighs the own queries with the keys of one device and passes those on; rounds are joined by their largest
logits, as in online softmax. No device ever holds the keys of a whole row.
"""

from collections.abc import Callable

import jax

from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls
from maxtext.kernels.online_softmax import OnlineSoftmax


def ring(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  queries: Tokens,
  scoring: ScoreSpec,
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

  def join(sums: OnlineSoftmax, k: jax.Array, v: jax.Array, keys: Tokens) -> OnlineSoftmax:
    return sums.join(q, k, v, queries, keys, scoring, precision, matmuls)

  one: Callable[..., OnlineSoftmax] = jax.checkpoint(join)

  def turn(carry: tuple[OnlineSoftmax, tuple], _: None) -> tuple[tuple[OnlineSoftmax, tuple], None]:
    sums, visiting = carry
    passed_on = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, onward), visiting)
    return (one(sums, *visiting), passed_on), None

  start = OnlineSoftmax.empty((B, K, H // K, S), v.shape[-1], sinks)
  (sums, _), _ = jax.lax.scan(turn, (start, (k, v, queries)), None, length=parts)
  return sums.mean.astype(v.dtype)
