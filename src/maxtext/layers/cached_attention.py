"""Queries over what the cache of their layer holds: in place by a kernel, block by block as far as rows have come, in
pages, or all of it at once. `attention.py` calls it where something is in the cache already.

Shapes: B rows, S new tokens, H query heads, K key heads, D head width, M pages of a row.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext.kernels.attention import blockwise, reference
from maxtext.kernels.attention_matmuls import AttentionMatmuls
from maxtext.kernels.paged import paged
from maxtext.kernels.scores import Scoring, Tokens
from maxtext.layers.cache import Cache, extend, extend_by_blocks
from maxtext.layers.context import Context
from maxtext.layers.how import How
from maxtext.layers.key_blocks import KeyBlocks

QUERIES = ("activation_batch", "activation_length", "activation_heads", "activation_head_dim")
CACHED = ("activation_batch", "activation_kv_heads", "activation_length", "activation_head_dim")
_POOL = ("activation_kv_heads", "layers", None, None, "activation_head_dim")


@dataclass(frozen=True)
class CachedAttention:
  """Extends the cache of a layer by its new tokens, and lets their queries look at it.

  Attributes:
    sinks: [H] what the softmax of each head has besides its keys.
    blocks: choose keys, by all of them.
    matmuls: of scores and values, but where a kernel does them itself.
  """

  how: How
  scoring: Scoring
  sinks: jax.Array | None
  blocks: KeyBlocks | None
  matmuls: AttentionMatmuls

  def __call__(
    self, q: jax.Array, new: Cache, cache: Cache, repeat: jax.Array, context: Context, table: jax.Array | None
  ) -> tuple[jax.Array, Cache]:
    """Queries [B,S,H,D], and `new` keys and values [B,S,K,D], to outputs [B,S,H,D] and the stack's cache.

    Args:
      repeat: the layer's number in its stack.
      table: [B,M] the pages of each row, where the layer's keys lie in pages.
    """
    if table is not None:
      return self._in_pages(q, new, cache, repeat, context, table)
    where = self.how.partition(cache["key"].shape, "layers", *CACHED)
    if self._in_place(cache, where, context):
      return self._by_kernel(q, new, cache, where, repeat, context)
    if context.end is not None and self.how.cache_block is not None and self.blocks is None:
      return self._by_blocks(q, new, cache, repeat, context, self.how.cache_block)
    cache, seen, keys = extend(cache, repeat, context, new, self.how.cache_rounding)
    return self._at_once(q, seen, context, keys), cache

  def _at_once(self, q: jax.Array, seen: Cache, context: Context, keys: Tokens) -> jax.Array:
    k, v, tokens = seen["key"], seen["value"], Tokens(context.positions, spans=context.spans)
    assert self.blocks is None or context.spans is None, "blocks are chosen among earlier ones"
    chosen = None if self.blocks is None else self.blocks.chosen(q, k, tokens, keys)
    return reference(q, k, v, tokens, keys, self.scoring, self.sinks, self.how.precision, chosen, self.matmuls)

  def _by_blocks(
    self, q: jax.Array, new: Cache, cache: Cache, repeat: jax.Array, context: Context, size: int
  ) -> tuple[jax.Array, Cache]:
    cache, blocks = extend_by_blocks(cache, repeat, context, new, size, self.how.cache_rounding)

    def read(block: jax.Array) -> tuple[jax.Array, jax.Array, Tokens]:
      seen, where = blocks.read(block)
      return seen["key"], seen["value"], where

    tokens = Tokens(context.positions, spans=context.spans)
    precision, matmuls = self.how.precision, self.matmuls
    return blockwise(q, read, blocks.count, tokens, self.scoring, self.sinks, precision, matmuls), cache

  def _in_place(self, cache: Cache, where: PartitionSpec, context: Context) -> bool:
    """Whether the kernel for one new token per row serves this step."""
    how = self.how
    one = context.end is not None and context.positions.shape[1] == 1
    if not how.cache_kernel or not one or self.blocks is not None or how.cache_rounding is not None:
      return False
    from maxtext.kernels.step import fits  # Pallas takes half a second to import

    return fits(cache["key"], where)

  def _by_kernel(
    self, q: jax.Array, new: Cache, cache: Cache, where: PartitionSpec, repeat: jax.Array, context: Context
  ) -> tuple[jax.Array, Cache]:
    from maxtext.kernels.step import step

    how, stack = self.how, (cache["key"], cache["value"])
    out, (key, value) = step(
      q[:, 0], (new["key"][:, 0], new["value"][:, 0]), stack, repeat, context.positions[:, 0], self.scoring, self.sinks,
      mesh=how.mesh, cache_spec=where, most=how.cache_block, interpret=how.attention.interpret,
    )  # fmt: skip
    return out[:, None], cache | {"key": key, "value": value}

  def _in_pages(
    self, q: jax.Array, new: Cache, cache: Cache, repeat: jax.Array, context: Context, table: jax.Array
  ) -> tuple[jax.Array, Cache]:
    how, pages = self.how, self.how.cache_pages
    assert pages is not None
    cache, seen, keys = extend(cache, repeat, context, new, how.cache_rounding, table)
    # The kernel takes one query per row and keys in bfloat16, and knows neither windows nor sinks nor chosen keys.
    plain = self.scoring.window is None and self.blocks is None and self.sinks is None
    exact = how.cache_rounding is None and jnp.dtype(how.dtype) == jnp.bfloat16
    pools = cache["key"], cache["value"]
    heads, *others = how.partition(pools[0].shape, *_POOL)
    if not (pages.kernel and plain and exact and q.shape[1] == 1) or any(others):
      return self._at_once(q, seen, context, keys), cache
    rows, lengths = how.partition(q.shape, *QUERIES)[0], context.positions[:, 0] + 1
    return paged(q, *pools, repeat, table, lengths, self.scoring, pages.block, how.mesh, rows, heads), cache
