"""The KV cache: what layers store of the tokens they have seen, one array per name for a whole stack, written in place.

Keys and values are rings [R,B,T,D], or [R,B,H,T,D] with heads first, as matmuls with them want it: position p is stored
at p mod T, so T need only reach as far back as the layer attends. What does not grow with the sequence (the state of a
delta net, the last tokens of a convolution) is stored whole. Rings of layers that attend to all earlier tokens may be
paged (`paged_kv_cache.py`).

With KV-cache quantization a ring stores integers of a few bits, and `<name>_scale` beside it their scales.

Shapes: R repeats of the stacked layers, B batch, S new tokens, T slots of the ring, H heads, D width, W last tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from maxtext.kernels.attention_mask import Tokens
from maxtext.layers.context import Context
from maxtext.layers.paged_kv_cache import PagedKVCache, read_pages, write_pages

Cache = dict[str, jax.Array]
Part = TypeVar("Part")

_UNSEEN = 2**30  # a position that no query sees


@dataclass(frozen=True)
class CacheSpec:
  """The shape, logical axes and dtype of one array of a cache; the logical axes shard it like its layer.

  Attributes:
    ring: every position has a slot, so the last tokens can be rolled back; a state that is stored whole cannot.
    paged: the array is a pool of pages, which all rows share.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dtype: jax.typing.DTypeLike
  ring: bool = True
  paged: bool = False

  def stacked(self, repeats: int) -> "CacheSpec":
    """The same for a stack of layers."""
    first = int(self.paged)  # after the heads of a pool
    shape = (*self.shape[:first], repeats, *self.shape[first:])
    axes = (*self.axes[:first], "layers", *self.axes[first:])
    return replace(self, shape=shape, axes=axes)

  def in_pages(self, pages: PagedKVCache) -> "CacheSpec":
    """The pool [H,N,P,W] that replaces rings [B,T,W] or [B,H,T,W]."""
    heads, axis = (self.shape[1], self.axes[1]) if len(self.shape) == 4 else (1, None)
    shape, axes = (heads, pages.count, pages.size, self.shape[-1]), (axis, None, None, self.axes[-1])
    return replace(self, shape=shape, axes=axes, paged=True)


@dataclass(frozen=True)
class KVCacheQuantization:
  """Quantization of keys and values to integers, symmetric, with the scale from the largest magnitude.

  Attributes:
    bits: 8, or 4 with two integers to a byte.
    per_head: each head of a token has its own scale, instead of one for all heads.
  """

  bits: Literal[4, 8]
  per_head: bool

  def slots(self, ring: CacheSpec) -> tuple[CacheSpec, CacheSpec]:
    """The specs of the integers and of their scales."""
    *outer, width = ring.shape
    shared = outer if self.per_head or len(outer) == 2 else [outer[0], 1, *outer[2:]]
    per_byte = 8 // self.bits
    return (
      CacheSpec((*outer, -(-width // per_byte)), ring.axes, jnp.int8),
      CacheSpec((*shared, 1), ring.axes, jnp.float32),
    )

  def quantize(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes x [B,S,D] or [B,S,H,D]: the integers as they are stored, and their scales."""
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(-1 if self.per_head else tuple(range(2, x.ndim)), keepdims=True)
    scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny * 2**self.bits) / (2 ** (self.bits - 1) - 1)
    numbers = jnp.round(x / scale).astype(jnp.int8)
    if self.bits == 8:
      return numbers, scale
    even = jnp.pad(numbers, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
    low, high = jnp.split(even, 2, axis=-1)
    return (high << 4) | (low & 15), scale

  def dequantize(self, numbers: jax.Array, scale: jax.Array, like: jax.Array) -> jax.Array:
    """Dequantizes to the width and dtype of `like`."""
    if self.bits == 4:  # shifts of signed integers extend the sign
      numbers = jnp.concatenate([(numbers << 4) >> 4, numbers >> 4], axis=-1)[..., : like.shape[-1]]
    return (numbers * scale).astype(like.dtype)


def cache_arrays(
  slots: dict[str, CacheSpec], rounding: KVCacheQuantization | None, pages: PagedKVCache | None = None
) -> dict[str, CacheSpec]:
  """The arrays of a cache with these rings: quantized or not, one ring per row or paged."""
  if pages is not None:
    slots = {n: replace(s, shape=(*s.shape[:-1], pages.width(s.shape[-1]))) for n, s in slots.items()}
  stored = slots if rounding is None else _with_scales(slots, rounding.slots)
  return stored if pages is None else {n: s.in_pages(pages) for n, s in stored.items()}


def update_cache(
  cache: Cache,
  repeat: jax.Array,
  context: Context,
  new: Cache,
  rounding: KVCacheQuantization | None = None,
  table: jax.Array | None = None,
) -> tuple[Cache, Cache, Tokens]:
  """Writes `new` [B,S,D] or [B,S,H,D] of one layer at the tokens' positions.

  Args:
    table: [B,M] the pages of each row, where the arrays are pools.

  Returns:
    The stack's cache; the keys and values of this layer that the tokens may see; and their positions. These include
    the new tokens as they are stored, so that chunks of any length give the same result.
  """
  assert context.segments is None, "a cached row is one document"
  positions, stored = context.positions, _quantize(new, rounding)
  if table is not None:
    return _update_pages(cache, repeat, context, table, stored, new, rounding)
  whole = cache | {n: _write(cache[n], repeat, context, x) for n, x in stored.items()}
  if context.fresh:
    return whole, _dequantize(stored, new, rounding), _tokens(context.positions, context.spans, positions)
  if positions.shape[1] == 1:  # one token overwrites one that it does not see
    layer = {n: _layer(whole[n], repeat) for n in stored}
    return (
      whole,
      _dequantize(layer, new, rounding),
      _tokens(context.positions, context.spans, _positions_in_ring(layer, positions[:, -1])),
    )
  before = {n: _layer(cache[n], repeat) for n in stored}
  seen = {n: jnp.concatenate([before[n], x.astype(before[n].dtype)], axis=1) for n, x in stored.items()}
  seen_positions = jnp.concatenate([_positions_in_ring(before, positions[:, 0] - 1), positions], axis=1)
  return whole, _dequantize(seen, new, rounding), _tokens(context.positions, context.spans, seen_positions)


@dataclass(frozen=True)
class CacheBlocks:
  """One layer's rings, read in blocks of slots, up to the longest row.

  Attributes:
    count: number of blocks that the longest row needs.
    read: the content [B,T,D] or [B,T,H,D] of a block, of B rows from a first one on, and its positions.
  """

  count: jax.Array
  read: Callable[[jax.Array, int, int], tuple[Cache, Tokens]]


def update_by_blocks(
  cache: Cache, repeat: jax.Array, context: Context, new: Cache, size: int, rounding: KVCacheQuantization | None = None
) -> tuple[Cache, CacheBlocks]:
  """`update_cache` for rings where new tokens overwrite no slot that one of them sees; a block has `size` slots."""
  assert context.end is not None
  stored, last = _quantize(new, rounding), context.positions[:, -1]
  whole = cache | {n: _write(cache[n], repeat, context, x) for n, x in stored.items()}
  T = next(whole[n].shape[-2] for n in stored)
  size = min(size, T)

  def read(block: jax.Array, first: int, rows: int) -> tuple[Cache, Tokens]:
    start = jnp.minimum(block * size, T - size)  # the last block may overlap the one before
    like = {n: x[first : first + rows] for n, x in new.items()}
    layer = {n: _layer(whole[n], repeat, (first, rows), (start, size)) for n in stored}
    slots = start + jnp.arange(size)
    positions = _positions_in_slots(slots, last[first : first + rows], T)
    queries, spans = jax.tree.map(lambda x: x[first : first + rows], (context.positions, context.spans))
    seen = jnp.where(slots >= block * size, positions, _UNSEEN)
    return _dequantize(layer, like, rounding), _tokens(queries, spans, seen)

  return whole, CacheBlocks(-(-jnp.minimum(context.end, T) // size), read)


def replaced(cache: Cache, repeat: jax.Array, new: Cache) -> Cache:
  """Overwrites the arrays of one layer [B,...] that are stored whole."""
  return cache | {n: cache[n].at[repeat].set(x.astype(cache[n].dtype)) for n, x in new.items()}


def latest(line: jax.Array, width: int, context: Context) -> jax.Array:
  """The last W valid tokens of rows [B,W+S,...] that hold W older tokens and then the new ones."""
  if context.count is None:
    return line[:, line.shape[1] - width :]
  return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, width))(line, context.count)


def _scale(name: str) -> str:
  return f"{name}_scale"


def _with_scales(arrays: dict[str, Part], split: Callable[[Part], tuple[Part, Part]]) -> dict[str, Part]:
  """Splits each array in two: the integers under its name, and the scales under `<name>_scale`."""
  return {part: half for name, x in arrays.items() for part, half in zip((name, _scale(name)), split(x), strict=True)}


def _quantize(new: Cache, rounding: KVCacheQuantization | None) -> Cache:
  return new if rounding is None else _with_scales(new, rounding.quantize)


def _dequantize(stored: Cache, like: Cache, rounding: KVCacheQuantization | None) -> Cache:
  if rounding is None:
    return stored
  return {name: rounding.dequantize(stored[name], stored[_scale(name)], x) for name, x in like.items()}


def _update_pages(
  cache: Cache,
  repeat: jax.Array,
  context: Context,
  table: jax.Array,
  stored: Cache,
  new: Cache,
  rounding: KVCacheQuantization | None,
) -> tuple[Cache, Cache, Tokens]:
  """Pages are not rings: no slot is overwritten, so tokens can be written before they are read."""
  whole = cache | {n: write_pages(cache[n], repeat, table, context.positions, x) for n, x in stored.items()}
  seen = _dequantize({n: read_pages(whole[n], repeat, table, x) for n, x in stored.items()}, new, rounding)
  length = next(iter(seen.values())).shape[1]
  return (
    whole,
    seen,
    _tokens(context.positions, context.spans, jnp.broadcast_to(jnp.arange(length), (table.shape[0], length))),
  )


def _tokens(queries: jax.Array, spans: jax.Array | None, positions: jax.Array) -> Tokens:
  """The tokens at these positions [B,T]. Spans are known for the new tokens only, whose positions are consecutive."""
  if spans is None:
    return Tokens(positions)
  index, count = positions - queries[:, :1], queries.shape[1]
  found = jnp.take_along_axis(spans, jnp.clip(index, 0, count - 1), axis=1)
  return Tokens(positions, spans=jnp.where((index >= 0) & (index < count), found, 0))


def _write(array: jax.Array, repeat: jax.Array, context: Context, new: jax.Array) -> jax.Array:
  """Writes new tokens to their slots, except invalid ones and those that later tokens of this call overwrite."""
  T, positions = array.shape[-2], context.positions
  rows = jnp.arange(positions.shape[0])[:, None]
  last = positions[:, -1:] if context.count is None else positions[:, :1] + context.count[:, None] - 1
  stored = (positions <= last) & (positions > last - T)
  heads = (slice(None),) * (array.ndim - 4)
  return array.at[repeat, rows, *heads, jnp.where(stored, positions % T, T)].set(new.astype(array.dtype), mode="drop")


def _layer(
  array: jax.Array,
  repeat: jax.Array,
  rows: tuple[int, int] | None = None,
  part: tuple[jax.Array, int] | None = None,
) -> jax.Array:
  """The arrays of one layer, with tokens before heads; of some rows and slots, given by the first and their number."""
  if rows is None or part is None:
    layer = jax.lax.dynamic_index_in_dim(array, repeat, axis=0, keepdims=False)
  else:
    (first, some), (start, count) = rows, part
    outer = array.shape[2:-2]
    starts: list[jax.Array | int] = [repeat, first, *(0 for _ in outer), start, 0]
    layer = jax.lax.dynamic_slice(array, starts, (1, some, *outer, count, array.shape[-1]))[0]
  return layer.swapaxes(1, 2) if layer.ndim == 4 else layer


def _positions_in_slots(slots: jax.Array, last: jax.Array, T: int) -> jax.Array:
  """The positions [B,T] in these slots of a ring after position `last` [B] was written."""
  positions = last[:, None] - (last[:, None] - slots) % T
  return jnp.where(positions >= 0, positions, _UNSEEN)


def _positions_in_ring(layer: Cache, last: jax.Array) -> jax.Array:
  """The same for all slots."""
  T = next(iter(layer.values())).shape[1]
  return _positions_in_slots(jnp.arange(T), last, T)
