"""Caches of keys and values: one array per name for a whole stack, [R,B,T,...], written in place.

R repeats of the stacked layers, B batch, T slots; slot t of a row holds position t.
"""

import jax

Cache = dict[str, jax.Array]


def extend(cache: Cache, repeat: jax.Array, positions: jax.Array, new: Cache) -> tuple[Cache, Cache]:
  """Writes `new` [B,S,...] at its positions; returns the stack's cache and this layer's view [B,T,...]."""
  rows = jax.numpy.arange(positions.shape[0])[:, None]
  whole = {n: cache[n].at[repeat, rows, positions].set(x.astype(cache[n].dtype)) for n, x in new.items()}
  layer = {n: jax.lax.dynamic_index_in_dim(whole[n], repeat, axis=0, keepdims=False) for n in new}
  return cache | whole, layer
