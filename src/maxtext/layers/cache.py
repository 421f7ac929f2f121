"""Caches of keys and values: one array per name for a whole stack, [R,B,T,...], written in place.

R repeats of the stacked layers, B batch, T slots; slot t of a row holds position t.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

Cache = dict[str, jax.Array]


@dataclass(frozen=True)
class Slots:
  """One array of a cache before it exists; with named dimensions, so that it lives where its layer does."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dtype: jax.typing.DTypeLike

  def stacked(self, repeats: int) -> "Slots":
    """The same for a stack of layers."""
    return Slots((repeats, *self.shape), ("layers", *self.axes), self.dtype)


def extend(cache: Cache, repeat: jax.Array, positions: jax.Array, new: Cache) -> tuple[Cache, Cache]:
  """Writes `new` [B,S,...] at its positions; returns the stack's cache and this layer's view [B,T,...]."""
  rows = jnp.arange(positions.shape[0])[:, None]
  whole = {n: cache[n].at[repeat, rows, positions].set(x.astype(cache[n].dtype)) for n, x in new.items()}
  layer = {n: jax.lax.dynamic_index_in_dim(whole[n], repeat, axis=0, keepdims=False) for n in new}
  return cache | whole, layer


def replaced(cache: Cache, repeat: jax.Array, new: Cache) -> Cache:
  """Writes what one layer keeps whole [B,...], whatever the length."""
  return cache | {n: cache[n].at[repeat].set(x.astype(cache[n].dtype)) for n, x in new.items()}
