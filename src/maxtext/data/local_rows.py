"""The rows that the devices of this process hold, and global arrays made of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from maxtext.data.batch import Batch, BatchWithState, IteratorState
from maxtext.data.media_rows import MediaRows
from maxtext.data.streams import Rows
from maxtext.models.media import TowerInputs


@dataclass(frozen=True)
class LocalRows:
  """The blocks of rows that the devices of this process hold. A block is the rows of one device, for any batch size."""

  sharding: Sharding
  blocks: int
  local_blocks: tuple[int, ...]
  group: tuple[int, int]  # processes with the same blocks are a group: index of this group, number of groups
  shared: bool  # whether groups overlap

  @staticmethod
  def of(sharding: Sharding, rows: int, length: int) -> "LocalRows":
    local_rows = {d: index[0].indices(rows)[0] for d, index in sharding.devices_indices_map((rows, length)).items()}
    starts = sorted(set(local_rows.values()))
    blocks: dict[int, set[int]] = {}
    device: Any
    for device, start in local_rows.items():
      blocks.setdefault(device.process_index, set()).add(starts.index(start))
    mine = tuple(sorted(blocks[jax.process_index()]))
    groups = sorted({tuple(sorted(block)) for block in blocks.values()})
    shared = sum(map(len, groups)) > len(starts)
    return LocalRows(sharding, len(starts), mine, (groups.index(mine), len(groups)), shared)

  def numbers(self, total: int) -> np.ndarray:
    """The indices of this process's rows among `total` rows of the run."""
    size = total // self.blocks
    return np.concatenate([np.arange(block * size, (block + 1) * size) for block in self.local_blocks])

  def array(self, local: np.ndarray, total: int, sharding: Sharding | None = None) -> jax.Array:
    """A global array, from the rows of this process."""
    size = total // self.blocks

    def block_of(index: Any) -> np.ndarray:
      start = self.local_blocks.index(index[0].indices(total)[0] // size) * size
      return local[(slice(start, start + size), *index[1:])]

    return jax.make_array_from_callback((total, *local.shape[1:]), sharding or self.sharding, block_of)

  @property
  def by_rows(self) -> NamedSharding:
    """The sharding of arrays that are split along rows alone."""
    assert isinstance(self.sharding, NamedSharding)
    return NamedSharding(self.sharding.mesh, PartitionSpec(self.sharding.spec[0]))


def place_rows(
  number: int, rows: Rows, *, local_rows: LocalRows, total: int, about: np.ndarray, extra: Mapping[str, Any]
) -> tuple[BatchWithState, np.ndarray]:
  """Puts the rows of this process on its devices. `number` is the count of batches up to this one; `extra` has shape
  and sharding of the batch's extra values."""
  count = len(rows.inputs) * local_rows.blocks // len(local_rows.local_blocks)
  real: np.ndarray = rows.segments > 0

  def position() -> IteratorState:
    streams = local_rows.array(rows.after, total, local_rows.by_rows)
    return {"streams": streams, "batches": np.array(number, np.int32), "about": about}

  batch = make_batch(rows, lambda array: local_rows.array(array, count))
  values = {name: local_rows.array(rows.extra_values(name, like), count, like.sharding) for name, like in extra.items()}
  batch = replace(batch, extra=values)
  if rows.media is not None:
    batch = _with_media(batch, rows.media, local_rows, count)
  return BatchWithState(batch, position), np.any(real, axis=1)


def _with_media(batch: Batch, media: MediaRows, local_rows: LocalRows, count: int) -> Batch:
  towers = dict[str, TowerInputs]()
  for tower, arrays in media.towers.items():
    indices = local_rows.array(arrays["indices"], count)
    others = {name: array for name, array in arrays.items() if name != "indices"}
    placed = {name: local_rows.array(array, count, local_rows.by_rows) for name, array in others.items()}
    towers[tower] = TowerInputs(indices=indices, **placed)
  rotary = None if media.rotary_positions is None else local_rows.array(media.rotary_positions, count)
  return replace(batch, media=towers, rotary_positions=rotary)


def make_batch(rows: Rows, place: Callable[[np.ndarray], jax.Array]) -> Batch:
  """The batch of rows, without extra values; `place` puts an array on the devices."""
  return Batch(
    place(rows.inputs), place(rows.targets), place(rows.positions), place(rows.segments), place(rows.loss_weights)
  )
