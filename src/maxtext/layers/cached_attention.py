"""Attention over the KV cache of a layer: in place by the decode kernel, block by block up to the longest row, over
pages, or over the whole cache at once. `attention.py` calls it where the cache is not empty.

Shapes: B rows, S new tokens, H query heads, K key heads, D head width, M pages of a row.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext.kernels.attention import blockwise, reference
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.attention_matmuls import AttentionMatmuls
from maxtext.kernels.paged_attention import paged
from maxtext.layers.context import Context
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.kv_cache import Cache, update_by_blocks, update_cache
from maxtext.layers.moba import MoBA

QUERIES = ("activation_batch", "activation_length", "activation_heads", "activation_head_dim")
CACHED = ("activation_batch", "activation_kv_heads", "activation_length", "activation_head_dim")
_POOL = ("activation_kv_heads", "layers", None, None, "activation_head_dim")


@dataclass(frozen=True)
class CachedAttention:
  """Writes new keys and values to the cache of a layer, and attends to it.

  Attributes:
    sinks: [H] attention sinks, a logit per head.
    blocks: selects the blocks of keys that a query sees; None lets it see all.
    matmuls: of scores and values; fused kernels do their own.
  """

  execution: ExecutionConfig
  scoring: ScoreSpec
  sinks: jax.Array | None
  blocks: MoBA | None
  matmuls: AttentionMatmuls

  def __call__(
    self, q: jax.Array, new: Cache, cache: Cache, repeat: jax.Array, context: Context, table: jax.Array | None
  ) -> tuple[jax.Array, Cache]:
    """Queries [B,S,H,D], and `new` keys and values [B,S,K,D], to outputs [B,S,H,D] and the stack's cache.

    Args:
      repeat: the layer's number in its stack.
      table: [B,M] the pages of each row; None where the layer's cache is not paged.
    """
    if table is not None:
      return self._in_pages(q, new, cache, repeat, context, table)
    where = self.execution.sharding.partition(cache["key"].shape, "layers", *CACHED)
    if self._kernel_fits(cache, where, context):
      return self._by_kernel(q, new, cache, where, repeat, context)
    if context.end is not None and self.execution.kv_cache.block is not None and self.blocks is None:
      return self._by_blocks(q, new, cache, repeat, context, self.execution.kv_cache.block)
    cache, seen, keys = update_cache(cache, repeat, context, new, self.execution.kv_cache.quantization)
    return self._at_once(q, seen, context, keys), cache

  def _at_once(self, q: jax.Array, seen: Cache, context: Context, keys: Tokens) -> jax.Array:
    k, v, tokens = seen["key"], seen["value"], Tokens(context.positions, spans=context.spans)
    assert self.blocks is None or context.spans is None, "only earlier blocks are selected"
    selected = None if self.blocks is None else self.blocks.selected(q, k, tokens, keys)
    return reference(
      q, k, v, tokens, keys, self.scoring, self.sinks, self.execution.numerics.precision, selected, self.matmuls
    )

  def _by_blocks(
    self, q: jax.Array, new: Cache, cache: Cache, repeat: jax.Array, context: Context, size: int
  ) -> tuple[jax.Array, Cache]:
    cache, blocks = update_by_blocks(cache, repeat, context, new, size, self.execution.kv_cache.quantization)
    rows, parts = q.shape[0], self.execution.kv_cache.parts
    each = rows // parts if rows % parts == 0 else rows
    precision, matmuls = self.execution.numerics.precision, self.matmuls

    def attend(first: int) -> jax.Array:
      def read(block: jax.Array) -> tuple[jax.Array, jax.Array, Tokens]:
        seen, where = blocks.read(block, first, each)
        return seen["key"], seen["value"], where

      tokens = jax.tree.map(lambda x: x[first : first + each], Tokens(context.positions, spans=context.spans))
      return blockwise(
        q[first : first + each], read, blocks.count, tokens, self.scoring, self.sinks, precision, matmuls
      )

    return jnp.concatenate([attend(first) for first in range(0, rows, each)]), cache

  def _kernel_fits(self, cache: Cache, where: PartitionSpec, context: Context) -> bool:
    """Whether the decode kernel, for one new token per row, supports this step."""
    execution = self.execution
    one = context.end is not None and context.positions.shape[1] == 1
    if (
      not execution.kernels.decode_attention
      or not one
      or self.blocks is not None
      or execution.kv_cache.quantization is not None
    ):
      return False
    from maxtext.kernels.decode_attention import fits  # Pallas takes half a second to import

    return fits(cache["key"], where)

  def _by_kernel(
    self, q: jax.Array, new: Cache, cache: Cache, where: PartitionSpec, repeat: jax.Array, context: Context
  ) -> tuple[jax.Array, Cache]:
    from maxtext.kernels.decode_attention import step

    execution, stack = self.execution, (cache["key"], cache["value"])
    out, (key, value) = step(
      q[:, 0], (new["key"][:, 0], new["value"][:, 0]), stack, repeat, context.positions[:, 0], self.scoring, self.sinks,
      mesh=execution.sharding.mesh, cache_spec=where, most=execution.kv_cache.block,
      interpret=execution.kernels.attention.interpret,
    )  # fmt: skip
    return out[:, None], cache | {"key": key, "value": value}

  def _in_pages(
    self, q: jax.Array, new: Cache, cache: Cache, repeat: jax.Array, context: Context, table: jax.Array
  ) -> tuple[jax.Array, Cache]:
    execution, pages = self.execution, self.execution.kv_cache.pages
    assert pages is not None
    cache, seen, keys = update_cache(cache, repeat, context, new, execution.kv_cache.quantization, table)
    # The kernel takes one query per row and keys in bfloat16, and supports neither windows nor sinks nor selected keys.
    plain = self.scoring.window is None and self.blocks is None and self.sinks is None
    exact = execution.kv_cache.quantization is None and jnp.dtype(execution.numerics.dtype) == jnp.bfloat16
    pools = cache["key"], cache["value"]
    heads, *others = execution.sharding.partition(pools[0].shape, *_POOL)
    if not (pages.kernel and plain and exact and q.shape[1] == 1) or any(others):
      return self._at_once(q, seen, context, keys), cache
    rows, lengths = execution.sharding.partition(q.shape, *QUERIES)[0], context.positions[:, 0] + 1
    return paged(
      q, *pools, repeat, table, lengths, self.scoring, pages.block, execution.sharding.mesh, rows, heads
    ), cache
