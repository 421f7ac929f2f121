"""Paged attention: one query per row over a paged KV cache, by JAX's kernel for TPUs, which reads only a row's pages.

It casts keys and values to bfloat16, whatever dtype they are stored in. Its reference is plain attention over the
gathered pages (`layers/paged_kv_cache.py`).

Shapes: B rows, H query heads, K key heads, R stacked layers, N pages, P slots of a page, M most pages of a row, D head
dim, W head dim in the pool.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from maxtext.kernels.attention_mask import MASKED, ScoreSpec


def paged(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  layer: jax.Array,
  table: jax.Array,
  lengths: jax.Array,
  scoring: ScoreSpec,
  block: int,
  mesh: Mesh,
  rows: str | tuple[str, ...] | None,
  heads: str | tuple[str, ...] | None,
) -> jax.Array:
  """q [B,1,H,D] over the first `lengths` [B] positions of each row's pages in pools [K,R,N,P,W], to [B,1,H,D].

  The kernel takes the pool of all layers, since a slice for one layer would be a copy: page n of layer r is page rN+n.

  Args:
    table: [B,M] pages; N and above mean no page, and occur only beyond the length.
    block: pages that are read at once.
    rows, heads: mesh axes over which rows, and heads, are sharded; pools are sharded by heads only.
  """
  from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

  count, size, width = keys.shape[2:]
  most = table.shape[1]
  block = min(block, most)
  fill = -most % block
  pages = jnp.pad(jnp.minimum(table, count - 1), ((0, 0), (0, fill))) + layer * count
  q_spec, pool_spec = PartitionSpec(rows, None, heads, None), PartitionSpec(heads, None, None, None, None)

  def local(q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array, pages: jax.Array) -> jax.Array:
    flat = (pool.reshape(pool.shape[0], -1, size, width) for pool in (keys, values))
    wide = jnp.pad(q[:, 0] * scoring.scale, ((0, 0), (0, 0), (0, width - q.shape[-1])))
    out = paged_attention(
      wide, *flat, lengths, pages, mask_value=MASKED, attn_logits_soft_cap=scoring.cap, pages_per_compute_block=block
    )
    return out[:, None, :, : q.shape[-1]]

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(q_spec, pool_spec, pool_spec, PartitionSpec(rows), PartitionSpec(rows, None)),
    out_specs=q_spec,
    check_vma=False,
  )(q, keys, values, jnp.minimum(lengths, most * size).astype(jnp.int32), pages.astype(jnp.int32))
