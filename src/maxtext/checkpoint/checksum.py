"""A number per array that changes when any of its bits does, computed where the array lives.

It is a sum, modulo 2^32, of a hash of every element and its index: it does not depend on how the array is split, so
what eight devices saved can be checked by one. One changed element always changes it. Each process adds up the parts
that it answers for, and nothing passes between devices: what the processes found is added where it is compared.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Parts = list[list[jax.Array]]


def checksums(arrays: Mapping[str, Any]) -> Parts:
  """Of each array, in the order of their names, the checksums of this process's parts; under way when this returns."""
  return [[_checksum(*part) for part in _own_parts(arrays[name])] for name in sorted(arrays)]


def added(parts: Parts) -> np.ndarray:
  """One uint32 per array."""
  return np.array([sum(map(int, own)) % 2**32 for own in parts], np.uint32)


def _own_parts(array: jax.Array | np.ndarray) -> list[tuple[Any, np.ndarray]]:
  """Data and where it starts in the array. One of several copies is enough, and of what all processes hold one does."""
  if not isinstance(array, jax.Array):
    return [(array, np.zeros(array.ndim, np.uint32))] if jax.process_index() == 0 else []
  shards = (shard for shard in array.addressable_shards if shard.replica_id == 0)
  return [(shard.data, np.array([i.start or 0 for i in shard.index], np.uint32)) for shard in shards]


@jax.jit
def _checksum(part: jax.typing.ArrayLike, start: jax.Array) -> jax.Array:
  x = jnp.asarray(part)
  bits = x.astype(jnp.uint32) if x.dtype == jnp.bool_ else _bits(x)
  index = jnp.zeros(x.shape, jnp.uint32)
  for dim in range(x.ndim):
    index = _mix(index + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) + start[dim] + np.uint32(1))
  return jnp.sum(_mix(bits ^ index), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
  assert x.dtype.itemsize <= 4, "JAX has no larger numbers unless it is told to"
  return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of 32 bits that makes neighbouring numbers unrelated."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
  return x ^ (x >> 15)
