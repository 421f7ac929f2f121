"""A number per array that changes when any of its bits does, computed where the array lives.

It is a sum, modulo 2^32, of a hash of every element and its index: it does not depend on how the array is split, so
what eight devices saved can be checked by one. One changed element always changes it.
"""

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def checksum(array: jax.typing.ArrayLike) -> jax.Array:
  """The number, on every device that holds a part. Arrays go one by one: on a CPU each takes its size as scratch."""
  x = jnp.asarray(array)
  bits = x.astype(jnp.uint32) if x.dtype == jnp.bool_ else _bits(x)
  index = jnp.zeros(bits.shape, jnp.uint32)
  for dim in range(bits.ndim):
    index = _mix(index + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) + np.uint32(1))
  return jnp.sum(_mix(bits ^ index), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
  """Its bits as 32-bit numbers; an eight-byte element becomes two."""
  word = jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")
  return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of 32 bits that makes neighbouring numbers unrelated."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
  return x ^ (x >> 15)
