"""A number per array that changes when any of its bits does, computed where the array lives.

It is a sum, modulo 2^32, of a hash of every element and its index: it does not depend on how the array is split, so
what eight devices saved can be checked by one. One changed element always changes it. Each process adds up the parts
that it answers for, and nothing passes between devices: what the processes found is added where it is compared.
In the same pass it is seen whether every element is a finite number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

Parts = list[list[tuple[jax.Array, jax.Array]]]  # of each array, of each part: its checksum, and whether it is finite


def checksums(arrays: Mapping[str, Any]) -> Parts:
  """Of each array, in the order of their names, the checksums of this process's parts; under way when this returns."""
  return [[_checksum(*part) for part in _own_parts(arrays[name])] for name in sorted(arrays)]


def added(parts: Parts) -> np.ndarray:
  """One uint32 per array."""
  return np.array([sum(int(checksum) for checksum, _ in own) % 2**32 for own in parts], np.uint32)


def checksums_of_all(arrays: Mapping[str, Any]) -> dict[str, int]:
  """The checksum of each array, the same on every process; all of them call it."""
  # One by one: on a CPU an array takes its own size as scratch.
  sums = np.array([added(checksums({name: arrays[name]}))[0] for name in sorted(arrays)], np.uint32)
  if jax.process_count() > 1:
    sums = np.sum(multihost_utils.process_allgather(sums), axis=0, dtype=np.uint32)
  return dict(zip(sorted(arrays), sums.tolist(), strict=True))


def nonfinite(parts: Parts) -> np.ndarray:
  """One bool per array: whether a part of this process holds a NaN or an infinity."""
  return np.array([not all(bool(finite) for _, finite in own) for own in parts], bool)


def nonfinite_names(arrays: Mapping[str, Any]) -> list[str]:
  """The arrays of which this process's parts are not finite; no checksum is computed."""
  under_way = {name: [_finite(data) for data, _ in _own_parts(array)] for name, array in arrays.items()}
  return sorted(name for name, parts in under_way.items() if not all(map(bool, parts)))


def checksum(x: jax.Array, start: Sequence[int] | jax.Array) -> jax.Array:
  """The checksum of an array whose first element has the index `start` in the whole; to be traced."""
  bits = x.astype(jnp.uint32) if x.dtype == jnp.bool_ else _bits(x)
  index = jnp.zeros(x.shape, jnp.uint32)
  for dim in range(x.ndim):
    first = jnp.asarray(start[dim], jnp.uint32) + np.uint32(1)
    index = _mix(index + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) + first)
  return jnp.sum(_mix(bits ^ index), dtype=jnp.uint32)


def checksum_of_part(part: np.ndarray, start: Sequence[int]) -> int:
  """What a part of an array adds to its checksum, modulo 2^32; `start` is the index of the part's first element."""
  dim = next((d for d, size in enumerate(part.shape) if size > 1), None)
  if dim is None or part.size <= _AT_ONCE:
    return int(_checksum(part, np.array(start, np.uint32))[0])
  step, total = max(1, part.shape[dim] * _AT_ONCE // part.size), 0
  for i in range(0, part.shape[dim], step):
    some = part[(slice(None),) * dim + (slice(i, i + step),)]
    total += checksum_of_part(some, (*start[:dim], start[dim] + i, *start[dim + 1 :]))
  return total % 2**32


_AT_ONCE = 1 << 22  # elements; what is computed between takes several times their memory


def _own_parts(array: jax.Array | np.ndarray) -> list[tuple[Any, np.ndarray]]:
  """Data and where it starts in the array. One of several copies is enough, and of what all processes hold one does."""
  if not isinstance(array, jax.Array):
    return [(array, np.zeros(array.ndim, np.uint32))] if jax.process_index() == 0 else []
  shards = (shard for shard in array.addressable_shards if shard.replica_id == 0)
  return [(shard.data, np.array([i.start or 0 for i in shard.index], np.uint32)) for shard in shards]


@jax.jit
def _checksum(part: jax.typing.ArrayLike, start: jax.Array) -> tuple[jax.Array, jax.Array]:
  return checksum(jnp.asarray(part), start), _finite(part)


@jax.jit
def _finite(part: jax.typing.ArrayLike) -> jax.Array:
  x = jnp.asarray(part)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return jnp.array(True)
  return jnp.all(jnp.isfinite(x.astype(jnp.float32) if x.dtype.itemsize == 1 else x))


def _bits(x: jax.Array) -> jax.Array:
  assert x.dtype.itemsize <= 4, "JAX has no larger numbers unless it is told to"
  return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of 32 bits that makes neighbouring numbers unrelated."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
  return x ^ (x >> 15)
