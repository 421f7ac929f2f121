"""The KV cache: what layers store of the tokens they have seen, one array per name for a whole stack, written in place.

Keys and values are rings [R,B,T,D], or [R,B,H,T,D] with heads first, as matmuls with them want it: position p is stored
at p mod T, so T need only reach as far back as the layer attends. What does not grow with the sequence (the state of a
delta net, the last tokens of a convolution) is stored whole. Rings of layers that attend to all earlier tokens may be
paged (`paged_kv_cache.py`).

With KV-cache quantization a ring stores integers of a few bits, and `<name>_scale` beside it their scales.

Shapes: R repeats of the stacked layers, B batch, S new tokens, T places of the ring, H heads, D width, W last tokens.
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

_NOWHERE = 2**30  # a position that no query sees


@dataclass(frozen=True)
class CacheSpec:
  """One array of a cache before it exists; with named dimensions, so that it lives where its layer does.

  Attributes:
    ring: positions have places of their own, so the last tokens can be taken back; what is kept whole cannot.
    paged: it is a pool of pages, and belongs to no row.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dtype: jax.typing.DTypeLike
  ring: bool = True
  paged: bool = False

  def stacked(self, repeats: int) -> "CacheSpec":
    """The same for a stack of layers."""
    first = int(self.paged)  # behind the heads of a pool
    shape = (*self.shape[:first], repeats, *self.shape[first:])
    axes = (*self.axes[:first], "layers", *self.axes[first:])
    return replace(self, shape=shape, axes=axes)

  def in_pages(self, pages: PagedKVCache) -> "CacheSpec":
    """The pool [H,N,P,W] that takes the place of rings [B,T,W] or [B,H,T,W]."""
    heads, axis = (self.shape[1], self.axes[1]) if len(self.shape) == 4 else (1, None)
    shape, axes = (heads, pages.count, pages.size, self.shape[-1]), (axis, None, None, self.axes[-1])
    return replace(self, shape=shape, axes=axes, paged=True)


@dataclass(frozen=True)
class KVCacheQuantization:
  """How numbers of a ring are kept as whole numbers: the largest of those that share a scale is the largest there is.

  Attributes:
    bits: 8; or 4, and then a byte holds two numbers.
    per_head: a scale for each head of a token instead of one for all of them.
  """

  bits: Literal[4, 8]
  per_head: bool

  def slots(self, ring: CacheSpec) -> tuple[CacheSpec, CacheSpec]:
    """Of the whole numbers and of their scales."""
    *outer, width = ring.shape
    shared = outer if self.per_head or len(outer) == 2 else [outer[0], 1, *outer[2:]]
    per_byte = 8 // self.bits
    return (
      CacheSpec((*outer, -(-width // per_byte)), ring.axes, jnp.int8),
      CacheSpec((*shared, 1), ring.axes, jnp.float32),
    )

  def rounded(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers [B,S,D] or [B,S,H,D] as they are kept, and their scales."""
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(-1 if self.per_head else tuple(range(2, x.ndim)), keepdims=True)
    scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny * 2**self.bits) / (2 ** (self.bits - 1) - 1)
    numbers = jnp.round(x / scale).astype(jnp.int8)
    if self.bits == 8:
      return numbers, scale
    even = jnp.pad(numbers, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
    low, high = jnp.split(even, 2, axis=-1)
    return (high << 4) | (low & 15), scale

  def restored(self, numbers: jax.Array, scale: jax.Array, like: jax.Array) -> jax.Array:
    """What was rounded, as wide and in the number format of `like`."""
    if self.bits == 4:  # shifts of signed numbers keep the sign
      numbers = jnp.concatenate([(numbers << 4) >> 4, numbers >> 4], axis=-1)[..., : like.shape[-1]]
    return (numbers * scale).astype(like.dtype)


def cache_arrays(
  slots: dict[str, CacheSpec], rounding: KVCacheQuantization | None, pages: PagedKVCache | None = None
) -> dict[str, CacheSpec]:
  """The arrays that keep rings, rounded or as they are, each row's on its own or in pages."""
  if pages is not None:
    slots = {n: replace(s, shape=(*s.shape[:-1], pages.width(s.shape[-1]))) for n, s in slots.items()}
  kept = slots if rounding is None else _with_scales(slots, rounding.slots)
  return kept if pages is None else {n: s.in_pages(pages) for n, s in kept.items()}


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
    The stack's cache; what the tokens may look at, in one layer's arrays; and where that stands. Tokens see what is
    kept of themselves too, so that pieces of any length give the same.
  """
  assert context.segments is None, "a cached row is one document"
  positions, kept = context.positions, _kept(new, rounding)
  if table is not None:
    return _update_pages(cache, repeat, context, table, kept, new, rounding)
  whole = cache | {n: _written(cache[n], repeat, context, x) for n, x in kept.items()}
  if context.fresh:
    return whole, _restored(kept, new, rounding), _tokens(context, positions)
  if positions.shape[1] == 1:  # one token takes the place of one that it does not see
    layer = {n: _layer(whole[n], repeat) for n in kept}
    return whole, _restored(layer, new, rounding), _tokens(context, _held_all(layer, positions[:, -1]))
  before = {n: _layer(cache[n], repeat) for n in kept}
  seen = {n: jnp.concatenate([before[n], x.astype(before[n].dtype)], axis=1) for n, x in kept.items()}
  places = jnp.concatenate([_held_all(before, positions[:, 0] - 1), positions], axis=1)
  return whole, _restored(seen, new, rounding), _tokens(context, places)


@dataclass(frozen=True)
class CacheBlocks:
  """One layer's rings, which are read some places at a time, and only as far as any row has come.

  Attributes:
    count: blocks that any row needs.
    read: what stands in a block [B,T,D] or [B,T,H,D], and where.
  """

  count: jax.Array
  read: Callable[[jax.Array], tuple[Cache, Tokens]]


def update_by_blocks(
  cache: Cache, repeat: jax.Array, context: Context, new: Cache, size: int, rounding: KVCacheQuantization | None = None
) -> tuple[Cache, CacheBlocks]:
  """`extend` for rings in which new tokens take no place that one of them looks at; a block has `size` places."""
  assert context.end is not None
  kept, last = _kept(new, rounding), context.positions[:, -1]
  whole = cache | {n: _written(cache[n], repeat, context, x) for n, x in kept.items()}
  T = next(whole[n].shape[-2] for n in kept)
  size = min(size, T)

  def read(block: jax.Array) -> tuple[Cache, Tokens]:
    start = jnp.minimum(block * size, T - size)  # the last block may begin among the places of the one before
    layer = {n: _layer(whole[n], repeat, (start, size)) for n in kept}
    places = start + jnp.arange(size)
    held = jnp.where(places >= block * size, _held(places, last, T), _NOWHERE)
    return _restored(layer, new, rounding), _tokens(context, held)

  return whole, CacheBlocks(-(-jnp.minimum(context.end, T) // size), read)


def replaced(cache: Cache, repeat: jax.Array, new: Cache) -> Cache:
  """Writes what one layer keeps whole [B,...], whatever the length."""
  return cache | {n: cache[n].at[repeat].set(x.astype(cache[n].dtype)) for n, x in new.items()}


def latest(line: jax.Array, width: int, context: Context) -> jax.Array:
  """The last W tokens that count of a row [B,W+S,...] in which W older ones stand before the new ones."""
  if context.count is None:
    return line[:, line.shape[1] - width :]
  return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, width))(line, context.count)


def _scale(name: str) -> str:
  return f"{name}_scale"


def _with_scales(arrays: dict[str, Part], split: Callable[[Part], tuple[Part, Part]]) -> dict[str, Part]:
  """Each in two, the second by the name of its scale."""
  return {part: half for name, x in arrays.items() for part, half in zip((name, _scale(name)), split(x), strict=True)}


def _kept(new: Cache, rounding: KVCacheQuantization | None) -> Cache:
  return new if rounding is None else _with_scales(new, rounding.rounded)


def _restored(kept: Cache, like: Cache, rounding: KVCacheQuantization | None) -> Cache:
  if rounding is None:
    return kept
  return {name: rounding.restored(kept[name], kept[_scale(name)], x) for name, x in like.items()}


def _update_pages(
  cache: Cache,
  repeat: jax.Array,
  context: Context,
  table: jax.Array,
  kept: Cache,
  new: Cache,
  rounding: KVCacheQuantization | None,
) -> tuple[Cache, Cache, Tokens]:
  """Nothing comes round in pages, so every place that a token sees has been written when it looks."""
  whole = cache | {n: write_pages(cache[n], repeat, table, context.positions, x) for n, x in kept.items()}
  seen = _restored({n: read_pages(whole[n], repeat, table, x) for n, x in kept.items()}, new, rounding)
  places = next(iter(seen.values())).shape[1]
  return whole, seen, _tokens(context, jnp.broadcast_to(jnp.arange(places), (table.shape[0], places)))


def _tokens(context: Context, places: jax.Array) -> Tokens:
  """What stands at positions `places` [B,T]: of new tokens, which follow one another, the span is known."""
  if context.spans is None:
    return Tokens(places)
  index, count = places - context.positions[:, :1], context.positions.shape[1]
  spans = jnp.take_along_axis(context.spans, jnp.clip(index, 0, count - 1), axis=1)
  return Tokens(places, spans=jnp.where((index >= 0) & (index < count), spans, 0))


def _written(array: jax.Array, repeat: jax.Array, context: Context, new: jax.Array) -> jax.Array:
  """Tokens that do not count, and those that later ones of this call displace, are left out."""
  T, positions = array.shape[-2], context.positions
  rows = jnp.arange(positions.shape[0])[:, None]
  last = positions[:, -1:] if context.count is None else positions[:, :1] + context.count[:, None] - 1
  kept = (positions <= last) & (positions > last - T)
  heads = (slice(None),) * (array.ndim - 4)
  return array.at[repeat, rows, *heads, jnp.where(kept, positions % T, T)].set(new.astype(array.dtype), mode="drop")


def _layer(array: jax.Array, repeat: jax.Array, part: tuple[jax.Array, int] | None = None) -> jax.Array:
  """One layer's part, with tokens before heads as new ones have it; `part` is the first place, and how many."""
  if part is None:
    layer = jax.lax.dynamic_index_in_dim(array, repeat, axis=0, keepdims=False)
  else:
    start, count = part
    outer = array.shape[1:-2]
    starts: list[jax.Array | int] = [repeat, *(0 for _ in outer), start, 0]
    layer = jax.lax.dynamic_slice(array, starts, (1, *outer, count, array.shape[-1]))[0]
  return layer.swapaxes(1, 2) if layer.ndim == 4 else layer


def _held(places: jax.Array, last: jax.Array, T: int) -> jax.Array:
  """The position in each of some places of a ring [B,T] after position `last` [B] was written."""
  positions = last[:, None] - (last[:, None] - places) % T
  return jnp.where(positions >= 0, positions, _NOWHERE)


def _held_all(layer: Cache, last: jax.Array) -> jax.Array:
  """The same for all places."""
  T = next(iter(layer.values())).shape[1]
  return _held(jnp.arange(T), last, T)
