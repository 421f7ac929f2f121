"""Dropout. A mask is a function of a token's random key and of the index in its width. It depends neither on the mesh
nor on the order of the tokens, and recomputation draws the same mask.

Shapes: B batch, S sequence, E width.
"""

import jax
import jax.numpy as jnp

from maxtext.mesh.explicit import auto_axes

_IMPLEMENTATION = "threefry2x32"  # bits depend on the key and the index alone, also under vmap


def token_keys(key: jax.Array, rows: int, order: jax.typing.ArrayLike) -> jax.Array:
  """The random key of each token, as data [B,S,2], from its row and its index in the text, which `order` [S] holds."""
  base = jax.random.wrap_key_data(jax.random.bits(key, (2,)), impl=_IMPLEMENTATION)
  order = jnp.asarray(order, jnp.uint32)
  index = jnp.arange(rows, dtype=jnp.uint32)[:, None] * jnp.uint32(len(order)) + order
  return jax.random.key_data(jax.vmap(jax.vmap(lambda i: jax.random.fold_in(base, i)))(index))


def fold_in(keys: jax.Array, number: jax.typing.ArrayLike) -> jax.Array:
  """Other keys [B,S,2] of the same tokens, for one part of the model."""

  def one(key: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl=_IMPLEMENTATION), number))

  return auto_axes(jax.vmap(jax.vmap(one)), jax.typeof(keys).sharding, keys)


def dropout(x: jax.Array, keys: jax.Array | None, rate: float, number: int = 0) -> jax.Array:
  """x [B,S,E] with a share `rate` of its elements zeroed, and the others divided by 1 - rate.

  Args:
    keys: [B,S,2] of the tokens, from `Context.dropout_keys`; None returns x, and so does a rate of 0.
    number: tells apart several uses of the same keys.
  """
  if keys is None or not rate:
    return x

  def kept(key: jax.Array) -> jax.Array:
    own = jax.random.wrap_key_data(key, impl=_IMPLEMENTATION)
    return jax.random.bernoulli(own, 1 - rate, x.shape[-1:])

  mask = auto_axes(jax.vmap(jax.vmap(kept)), jax.typeof(x).sharding, fold_in(keys, number))
  return jnp.where(mask, x / (1 - rate), 0)
