"""Checksums of what every device holds in its own memory: replicas can be compared by them, and two runs of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.checkpoint.checksum import checksum
from maxtext.training.state import on_devices
from maxtext.training.synchronized_compile import SynchronizedCompile


class DeviceChecksums:
  """Computes a uint32 for each device of a mesh, and each array of a tree: every call has a tree of the same arrays.

  Each device reads its own copy or shard, in one program; the numbers alone pass between devices.
  """

  def __init__(self, mesh: Mesh) -> None:
    self._mesh, self._compiled = mesh, dict[Any, SynchronizedCompile]()

  def __call__(self, tree: Any) -> np.ndarray:
    """A row for each device in the mesh's order, a column for each leaf; the same on every process."""
    structure = jax.tree.structure(tree)
    if structure not in self._compiled:
      self._compiled[structure] = self._compile(tree)
    return np.asarray(self._compiled[structure](tree))

  def _compile(self, tree: Any) -> SynchronizedCompile:
    shardings = jax.tree.map(lambda a: a.sharding, tree)
    specs = jax.tree.map(lambda s: s.spec, shardings)

    def own(shards: Any) -> jax.Array:
      return jnp.stack([checksum(x, [0] * x.ndim) for x in jax.tree.leaves(shards)])[None]

    rows = PartitionSpec(self._mesh.axis_names)
    of_all = jax.shard_map(own, mesh=self._mesh, in_specs=(specs,), out_specs=rows, check_vma=False)
    everywhere = NamedSharding(self._mesh, PartitionSpec())
    return SynchronizedCompile(jax.jit(lambda t: of_all(on_devices(t, shardings)), out_shardings=everywhere), batch=0)


@dataclass(frozen=True)
class Differences:
  """Replicas that differ.

  Attributes:
    arrays: the indices of the arrays.
    devices: the indices of the devices that hold other bits than most of their replicas, or of all replicas where no
      value has a majority.
    is_certain: whether there was a majority.
  """

  arrays: Sequence[int]
  devices: Sequence[int]
  is_certain: bool


def first_holders(mesh: Mesh, leaves: Sequence[Any]) -> np.ndarray:
  """For each device and array, the index of the first device that holds the same part of the array."""
  devices, known = mesh.devices.flatten().tolist(), dict[Any, list[int]]()
  columns = []
  for leaf in leaves:
    kind = leaf.sharding, leaf.shape
    if kind not in known:
      parts = leaf.sharding.devices_indices_map(leaf.shape)
      firsts: dict[str, int] = {}
      known[kind] = [firsts.setdefault(str(parts[device]), i) for i, device in enumerate(devices)]
    columns.append(known[kind])
  return np.array(columns).T


def compare_replicas(table: np.ndarray, holders: np.ndarray) -> Differences | None:
  """Compares the checksums of those devices that hold the same part; None where all are equal."""
  arrays = np.flatnonzero((table != np.take_along_axis(table, holders, 0)).any(0)).tolist()
  odd, tied = set[int](), set[int]()
  for array in arrays:
    for holder in np.unique(holders[:, array]):
      group = np.flatnonzero(holders[:, array] == holder)
      values, counts = np.unique(table[group, array], return_counts=True)
      if len(values) > 1 and 2 * counts.max() > len(group):
        odd |= set(group[table[group, array] != values[counts.argmax()]].tolist())
      elif len(values) > 1:
        tied |= set(group.tolist())
  return Differences(arrays, sorted(odd or tied), bool(odd)) if arrays else None
