"""Caches: what layers keep of the tokens that they have seen, one array per name for a whole stack, written in place.

Keys and values are rings [R,B,T,D], or [R,B,H,T,D], heads first as products with them want it: position p stands in
place p mod T, so T need only reach as far back as the layer looks. What does not grow with the sequence (the state of a
delta net, the last tokens of a convolution) is kept whole.

Shapes: R repeats of the stacked layers, B batch, S new tokens, T places of the ring, H heads, D width, W last tokens.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext.kernels.scores import Tokens
from maxtext.layers.context import Context

Cache = dict[str, jax.Array]

_NOWHERE = 2**30  # a position that no query sees


@dataclass(frozen=True)
class Slots:
  """One array of a cache before it exists; with named dimensions, so that it lives where its layer does."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dtype: jax.typing.DTypeLike

  def stacked(self, repeats: int) -> "Slots":
    """The same for a stack of layers."""
    return Slots((repeats, *self.shape), ("layers", *self.axes), self.dtype)


def extend(cache: Cache, repeat: jax.Array, context: Context, new: Cache) -> tuple[Cache, Cache, Tokens]:
  """Writes `new` [B,S,D] or [B,S,H,D] of one layer at the tokens' positions.

  Returns:
    The stack's cache; what the tokens may look at, in one layer's arrays; and where that stands.
  """
  assert context.segments is None, "a cached row is one document"
  whole = cache | {n: _written(cache[n], repeat, context, x) for n, x in new.items()}
  if context.fresh:
    return whole, new, Tokens(context.positions)
  positions = context.positions
  if positions.shape[1] == 1:  # one token takes the place of one that it does not see
    layer = {n: _layer(whole[n], repeat) for n in new}
    return whole, layer, Tokens(_held(layer, positions[:, -1]))
  before = {n: _layer(cache[n], repeat) for n in new}
  seen = {n: jnp.concatenate([before[n], x.astype(before[n].dtype)], axis=1) for n, x in new.items()}
  return whole, seen, Tokens(jnp.concatenate([_held(before, positions[:, 0] - 1), positions], axis=1))


def replaced(cache: Cache, repeat: jax.Array, new: Cache) -> Cache:
  """Writes what one layer keeps whole [B,...], whatever the length."""
  return cache | {n: cache[n].at[repeat].set(x.astype(cache[n].dtype)) for n, x in new.items()}


def latest(line: jax.Array, width: int, context: Context) -> jax.Array:
  """The last W tokens that count of a row [B,W+S,...] in which W older ones stand before the new ones."""
  if context.count is None:
    return line[:, line.shape[1] - width :]
  return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, width))(line, context.count)


def _written(array: jax.Array, repeat: jax.Array, context: Context, new: jax.Array) -> jax.Array:
  """Tokens that do not count, and those that later ones of this call displace, are left out."""
  T, positions = array.shape[-2], context.positions
  rows = jnp.arange(positions.shape[0])[:, None]
  last = positions[:, -1:] if context.count is None else positions[:, :1] + context.count[:, None] - 1
  kept = (positions <= last) & (positions > last - T)
  heads = (slice(None),) * (array.ndim - 4)
  return array.at[repeat, rows, *heads, jnp.where(kept, positions % T, T)].set(new.astype(array.dtype), mode="drop")


def _layer(array: jax.Array, repeat: jax.Array) -> jax.Array:
  """One layer's part, with tokens before heads as new ones have it."""
  layer = jax.lax.dynamic_index_in_dim(array, repeat, axis=0, keepdims=False)
  return layer.swapaxes(1, 2) if layer.ndim == 4 else layer


def _held(layer: Cache, last: jax.Array) -> jax.Array:
  """The position in each place of a ring [B,T] after position `last` [B] was written."""
  T = next(iter(layer.values())).shape[1]
  positions = last[:, None] - (last[:, None] - jnp.arange(T)) % T
  return jnp.where(positions >= 0, positions, _NOWHERE)
