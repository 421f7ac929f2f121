"""Which rows the devices of this process hold, and arrays of the whole run made of them."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from maxtext.data.batch import Batch, Fed, Position
from maxtext.data.streams import Rows


@dataclass(frozen=True)
class Held:
  """Which blocks of rows the devices of this process hold; a block is what one device has, whatever the batch."""

  sharding: Sharding
  blocks: int
  mine: tuple[int, ...]
  group: tuple[int, int]  # processes that hold the same blocks are a group: the number of this one, and how many
  shared: bool  # whether groups have blocks in common

  @staticmethod
  def of(sharding: Sharding, rows: int, length: int) -> "Held":
    held = {d: index[0].indices(rows)[0] for d, index in sharding.devices_indices_map((rows, length)).items()}
    starts = sorted(set(held.values()))
    blocks: dict[int, set[int]] = {}
    device: Any
    for device, start in held.items():
      blocks.setdefault(device.process_index, set()).add(starts.index(start))
    mine = tuple(sorted(blocks[jax.process_index()]))
    groups = sorted({tuple(sorted(block)) for block in blocks.values()})
    shared = sum(map(len, groups)) > len(starts)
    return Held(sharding, len(starts), mine, (groups.index(mine), len(groups)), shared)

  def numbers(self, total: int) -> np.ndarray:
    """The rows of this process, among `total` of the run."""
    size = total // self.blocks
    return np.concatenate([np.arange(block * size, (block + 1) * size) for block in self.mine])

  def array(self, local: np.ndarray, total: int, sharding: Sharding | None = None) -> jax.Array:
    """An array of the whole run, from the rows of this process."""
    size = total // self.blocks

    def piece(index: Any) -> np.ndarray:
      start = self.mine.index(index[0].indices(total)[0] // size) * size
      return local[(slice(start, start + size), *index[1:])]

    return jax.make_array_from_callback((total, *local.shape[1:]), sharding or self.sharding, piece)

  @property
  def by_rows(self) -> NamedSharding:
    """For arrays that are split as rows are and whole otherwise."""
    assert isinstance(self.sharding, NamedSharding)
    return NamedSharding(self.sharding.mesh, PartitionSpec(self.sharding.spec[0]))


def place_rows(number: int, rows: Rows, *, held: Held, total: int, about: np.ndarray) -> tuple[Fed, np.ndarray]:
  """Puts the rows of this process on its devices. `number` batches have been made with this one."""
  count = len(rows.inputs) * held.blocks // len(held.mine)
  real: np.ndarray = rows.segments > 0
  arrays = (rows.inputs, rows.targets, rows.positions, rows.segments, rows.loss_weights)

  def position() -> Position:
    streams = held.array(rows.after, total, held.by_rows)
    return {"streams": streams, "batches": np.array(number, np.int32), "about": about}

  return Fed(Batch(*(held.array(array, count) for array in arrays)), position), np.any(real, axis=1)
