"""Decode attention: one new token per row over a stack's KV cache, by a Pallas kernel for TPUs that works in place.

The kernel takes the number of its layer in the stack, so the cache is never sliced. It reads each block of slots from
memory once, skips blocks that a row has not reached yet, and writes back only the tile with the new token. Position p
is stored in slot p mod T, as in every ring (`layers/kv_cache.py`).

Shapes: R layers of the stack, B rows, H query heads, K key heads, G = H/K query heads per key head, T slots, D width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from maxtext.kernels.attention_mask import MASKED, ScoreSpec

Ref = Any  # a block of an array in on-chip memory

_BLOCK_BYTES = 2**20  # of keys per block; values take as much, and the next block of both is prefetched
_TILE = {2: 16, 4: 8}  # slots in a memory tile, by the bytes of an element


def fits(cache: jax.ShapeDtypeStruct | jax.Array, cache_spec: PartitionSpec) -> bool:
  """Whether the kernel supports a ring: its slots and its width must be whole tiles.

  Layers, slots and width must not be sharded, since the kernel indexes them from 0.
  """
  T, D = cache.shape[-2:]
  tile, (layers, _, _, slots, width) = _TILE.get(cache.dtype.itemsize), cache_spec
  whole = layers is None and slots is None and width is None
  return whole and tile is not None and T % tile == 0 and D % 128 == 0


def step(
  q: jax.Array,
  new: tuple[jax.Array, jax.Array],
  cache: tuple[jax.Array, jax.Array],
  layer: jax.Array,
  positions: jax.Array,
  scoring: ScoreSpec,
  sinks: jax.Array | None,
  *,
  mesh: Mesh,
  cache_spec: PartitionSpec,
  most: int | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Queries [B,H,D], new keys and values [B,K,D] at `positions` [B], and the stack's cache, two of [R,B,K,T,D].

  A block has at most `most` slots; None is as many as fit. Returns the output [B,H,D], and the cache with the new keys
  and values.
  """
  rows, heads = cache_spec[1], cache_spec[2]
  local = partial(_local, scoring=scoring, most=most, interpret=interpret)
  row = PartitionSpec(rows, heads)
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(row, (row, row), (cache_spec, cache_spec), PartitionSpec(), PartitionSpec(rows), PartitionSpec(heads)),
    out_specs=(row, (cache_spec, cache_spec)),
    check_vma=False,
  )(q, new, cache, layer, positions, sinks)


def _local(
  q: jax.Array,
  new: tuple[jax.Array, jax.Array],
  cache: tuple[jax.Array, jax.Array],
  layer: jax.Array,
  positions: jax.Array,
  sinks: jax.Array | None,
  *,
  scoring: ScoreSpec,
  most: int | None,
  interpret: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  _, B, K, T, D = cache[0].shape
  G, dtype = q.shape[1] // K, cache[0].dtype
  tile = _TILE[dtype.itemsize]
  block = _block(T, tile, min(_BLOCK_BYTES // (K * D * dtype.itemsize), most or T))
  initial = jnp.full((K, G), MASKED) if sinks is None else sinks.astype(jnp.float32).reshape(K, G)

  def of_row(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda b, t, layer, last: (b, *(0 for _ in shape)))

  def read(b: jax.Array, t: jax.Array, layer: jax.Array, last: jax.Array) -> tuple:
    final = jnp.minimum(last[b], T - 1) // block
    return layer[0], b, 0, jnp.minimum(t, final), 0  # a block that is already in on-chip memory is not read again

  def written(b: jax.Array, t: jax.Array, layer: jax.Array, last: jax.Array) -> tuple:
    return layer[0], b, 0, last[b] % T // tile, 0

  blocks, tiles = (pl.BlockSpec((None, None, K, n, D), at) for n, at in ((block, read), (tile, written)))
  whole = pl.BlockSpec((K, G, 1), lambda b, t, layer, last: (0, 0, 0))
  grid = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=2,
    grid=(B, T // block),
    in_specs=[of_row(K, G, D), of_row(K, 1, D), of_row(K, 1, D), whole, blocks, blocks],
    out_specs=[of_row(K, G, D), tiles, tiles],
    scratch_shapes=[pltpu.VMEM((K, G, n), jnp.float32) for n in (1, 1, D)],
  )
  out, keys, values = pl.pallas_call(
    partial(_kernel, scoring=scoring, T=T, block=block, tile=tile, has_sinks=sinks is not None),
    grid_spec=grid,
    out_shape=[jax.ShapeDtypeStruct((B, K, G, D), q.dtype), *(jax.ShapeDtypeStruct(c.shape, dtype) for c in cache)],
    input_output_aliases={6: 1, 7: 2},
    cost_estimate=pl.CostEstimate(
      flops=4 * B * K * G * T * D, transcendentals=B * K * G * T, bytes_accessed=2 * B * K * T * D * dtype.itemsize
    ),
    interpret=interpret,
  )(
    layer.reshape(1),
    positions,
    q.reshape(B, K, G, D),
    *(x[:, :, None].astype(dtype) for x in new),
    initial[..., None],
    *cache,
  )
  return out.reshape(B, K * G, D), (keys, values)


def _block(T: int, tile: int, most: int) -> int:
  """Slots of a block: a whole number of tiles, at least one, that divides the ring."""
  return max(n for n in range(tile, T + 1, tile) if T % n == 0 and n <= max(most, tile))


def _kernel(
  layer: Ref, last: Ref, q: Ref, new_key: Ref, new_value: Ref, initial: Ref, keys: Ref, values: Ref, out: Ref,
  key_tile: Ref, value_tile: Ref, largest: Ref, total: Ref, summed: Ref, *,
  scoring: ScoreSpec, T: int, block: int, tile: int, has_sinks: bool,
) -> None:  # fmt: skip
  """One block of slots of one row."""
  b, t = pl.program_id(0), pl.program_id(1)
  position = last[b]
  slot = position % T
  K, G, D = summed.shape

  @pl.when(t == 0)
  def _initialize() -> None:
    largest[...] = initial[...]
    total[...] = jnp.full((K, G, 1), 1.0 if has_sinks else 0.0)
    summed[...] = jnp.zeros((K, G, D))

  @pl.when(t == slot // block)
  def _write() -> None:
    first = (slot % block) // tile * tile
    here = jax.lax.broadcasted_iota(jnp.int32, (K, tile, D), 1) == slot % tile
    for ring, new, written in ((keys, new_key, key_tile), (values, new_value, value_tile)):
      near = pl.ds(pl.multiple_of(first, tile), tile)
      written[...] = jnp.where(here, new[...], ring[:, near])
      ring[:, near] = written[...]

  @pl.when(t <= jnp.minimum(position, T - 1) // block)
  def _accumulate() -> None:
    logits = jnp.einsum("kgd,ktd->kgt", q[...], keys[...], preferred_element_type=jnp.float32) * scoring.scale
    if scoring.cap is not None:
      logits = scoring.cap * jnp.tanh(logits / scoring.cap)
    offset = t * block + jax.lax.broadcasted_iota(jnp.int32, (K, G, block), 2) - slot
    gap = jnp.where(offset <= 0, -offset, T - offset)  # slots after the newest hold older positions
    logits = jnp.where((gap <= position) & scoring.reaches(position, gap), logits, MASKED)
    above = jnp.maximum(largest[...], logits.max(-1, keepdims=True))
    weights, correction = jnp.exp(logits - above), jnp.exp(largest[...] - above)
    total[...] = total[...] * correction + weights.sum(-1, keepdims=True)
    added = jnp.einsum("kgt,ktd->kgd", weights.astype(values.dtype), values[...], preferred_element_type=jnp.float32)
    summed[...] = summed[...] * correction + added
    largest[...] = above

  @pl.when(t == pl.num_programs(1) - 1)
  def _finish() -> None:
    out[...] = (summed[...] / total[...]).astype(out.dtype)
