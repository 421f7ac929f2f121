"""Ring attention: rows are sharded along the sequence, and keys are sent round a ring of devices, not gathered.

In each iteration a device attends to the keys of one shard and sends them to the next device; the results are combined
by an online softmax. No device ever holds the keys of a whole row.
"""

from collections.abc import Callable

import jax

from maxtext.kernels.attention_inputs import AttentionInputs
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.attention_matmuls import PLAIN, AttentionMatmuls
from maxtext.kernels.online_softmax import OnlineSoftmax


def ring(
  inputs: AttentionInputs,
  scoring: ScoreSpec,
  precision: str,
  *,
  axes: tuple[str, ...],
  shards: int,
  matmuls: AttentionMatmuls = PLAIN,
) -> jax.Array:
  """The output of this device's shard of the rows, inside `shard_map`; the mesh axes `axes` form the ring."""
  q, k, v, queries, sinks, _ = inputs
  B, S, H, _ = q.shape
  K = k.shape[2]
  to_next = [(shard, (shard + 1) % shards) for shard in range(shards)]

  def join(sums: OnlineSoftmax, k: jax.Array, v: jax.Array, keys: Tokens) -> OnlineSoftmax:
    return sums.join(q, k, v, queries, keys, scoring, precision, matmuls)

  one: Callable[..., OnlineSoftmax] = jax.checkpoint(join)

  def iteration(carry: tuple[OnlineSoftmax, tuple], _: None) -> tuple[tuple[OnlineSoftmax, tuple], None]:
    sums, shard = carry
    following = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), shard)
    return (one(sums, *shard), following), None

  start = OnlineSoftmax.empty((B, K, H // K, S), v.shape[-1], sinks)
  (sums, _), _ = jax.lax.scan(iteration, (start, (k, v, queries)), None, length=shards)
  return sums.mean.astype(v.dtype)
