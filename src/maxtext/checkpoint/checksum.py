"""A number per array that changes when any of its bits does, computed where the array lives.

It is a sum, modulo 2^32, of a hash of every element and its index: it does not depend on how the array is split, so
what eight devices saved can be checked by one. One changed element always changes it.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def checksums(arrays: Mapping[str, Any]) -> jax.Array:
  """One uint32 per array, in the order of their names, on every device."""
  leaves = [arrays[name] for name in sorted(arrays)]
  placed = (leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array))
  mesh = next((sharding.mesh for sharding in placed if isinstance(sharding, NamedSharding)), None)
  return _program(None if mesh is None else NamedSharding(mesh, PartitionSpec()))(leaves)


def checksum_of_part(part: np.ndarray, start: Sequence[int]) -> int:
  """What a part of an array adds to the array's checksum, modulo 2^32; `start` is its first element's index."""
  dim = next((d for d, size in enumerate(part.shape) if size > 1), None)
  if dim is None or part.size <= _AT_ONCE:
    return int(_part_program(part, np.array(start, np.uint32)))
  step, total = max(1, part.shape[dim] * _AT_ONCE // part.size), 0
  for i in range(0, part.shape[dim], step):
    some = part[(slice(None),) * dim + (slice(i, i + step),)]
    total += checksum_of_part(some, (*start[:dim], start[dim] + i, *start[dim + 1 :]))
  return total % 2**32


_AT_ONCE = 1 << 22  # elements; what is computed between takes several times their memory


@jax.jit
def _part_program(part: jax.Array, start: jax.Array) -> jax.Array:
  return _checksum(part, start)


@cache
def _program(where: NamedSharding | None) -> Any:
  def checksum_all(leaves: Sequence[Any]) -> jax.Array:
    return jnp.stack([_checksum(leaf) for leaf in leaves])

  return jax.jit(checksum_all, out_shardings=where)


def _checksum(array: jax.typing.ArrayLike, start: jax.Array | None = None) -> jax.Array:
  x = jnp.asarray(array)
  bits = x.astype(jnp.uint32) if x.dtype == jnp.bool_ else _bits(x)
  index = jnp.zeros(bits.shape, jnp.uint32)
  for dim in range(bits.ndim):
    first = np.uint32(1) if start is None or dim >= x.ndim else start[dim] + np.uint32(1)
    index = _mix(index + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) + first)
  return jnp.sum(_mix(bits ^ index), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
  """Its bits as 32-bit numbers; an eight-byte element becomes two."""
  word = jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")
  return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of 32 bits that makes neighbouring numbers unrelated."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
  return x ^ (x >> 15)
