"""Copies bytes from one process to others through the network of the devices, a chunk at a time."""

from collections.abc import Callable, Iterable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

CHUNK = 64 << 20  # bytes in transfer, and held twice, at a time


def receive_from(source: int, receivers: Iterable[int], size: int, data: np.ndarray | None = None) -> np.ndarray:
  """The bytes of one process, on that process and on the receivers, all of which must call it in the same order.

  Args:
    source: index of the process that has the bytes.
    receivers: indices of the processes that need them.
    size: the number of bytes.
    data: the bytes; given on the source alone.
  """
  processes = sorted({source, *receivers})
  devices = tuple(next(d for d in jax.devices() if d.process_index == process) for process in processes)
  own = devices[processes.index(jax.process_index())]
  rows, add = NamedSharding(Mesh(np.array(devices), "processes"), PartitionSpec("processes")), _adder(devices)
  found = np.empty(size, np.uint8) if data is None else data
  assert found.shape == (size,), (found.shape, size)
  for start in range(0, size, CHUNK):
    part = slice(start, min(start + CHUNK, size))
    row = np.zeros_like(found[None, part]) if data is None else found[None, part]
    shape = (len(devices), row.shape[1])
    total = add(jax.make_array_from_single_device_arrays(shape, rows, [jax.device_put(row, own)]))
    if data is None:
      found[part] = total.addressable_data(0)
    else:
      total.block_until_ready()
  return found


@cache
def _adder(devices: tuple[jax.Device, ...]) -> Callable[[jax.Array], jax.Array]:
  """A program that sums rows; all rows but the source's are zero."""
  everywhere = NamedSharding(Mesh(np.array(devices), "processes"), PartitionSpec())
  return jax.jit(lambda rows: jnp.sum(rows, axis=0, dtype=jnp.uint8), out_shardings=everywhere)
