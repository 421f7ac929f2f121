"""The sharding of each parameter, for printing and for checking that large parameters are sharded."""

from dataclasses import dataclass
from math import prod
from typing import Any

from maxtext.models.model import Model


@dataclass(frozen=True)
class Placement:
  """The sharding of one parameter on a mesh."""

  path: str
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  mesh_axes: tuple[Any, ...]
  shards: int
  bytes_per_device: int

  @property
  def size(self) -> int:
    """Number of elements of the whole parameter."""
    return prod(self.shape)


def placements(model: Model) -> list[Placement]:
  """The placement of every parameter and buffer, in the model's order."""
  rows = []
  for path, axes in model.logical_axes.items():
    if path in model.statistics:
      continue
    struct = model.struct(path)
    local = struct.sharding.shard_shape(struct.shape)
    parts = tuple(struct.sharding.spec) + (None,) * (len(struct.shape) - len(struct.sharding.spec))
    shards = struct.size // max(prod(local), 1)
    rows.append(Placement(path, struct.shape, axes, parts, shards, prod(local) * struct.dtype.itemsize))
  return rows


def table(model: Model) -> str:
  """All placements as a text table."""
  rows = [
    (p.path, str(list(p.shape)), _names(p.axes), _names(p.mesh_axes), f"{p.bytes_per_device:,}")
    for p in placements(model)
  ]
  head = ("parameter", "shape", "dimensions", "split over", "bytes per device")
  widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
  return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in (head, *rows))


def _names(parts: tuple[Any, ...]) -> str:
  return ", ".join("-" if not p else p if isinstance(p, str) else "+".join(p) for p in parts)
