"""Hugging Face tensors to parameters and back, one tensor at a time, from the family's one table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from maxtext.models.model import Model
from maxtext.models.weight_table import Table, Weight, find, layer_numbers


@dataclass(frozen=True)
class Slot:
  """Where a part of a tensor belongs: an index into a stacked parameter, and the shape there.

  Attributes:
    rows: sizes of what stands before the outputs, as the file has it: experts, and inputs as one dimension.
  """

  path: str
  index: tuple[int, ...]
  shape: tuple[int, ...]
  rows: tuple[int, ...]


@dataclass
class Tensor:
  """One tensor of a Hugging Face file and the parts of parameters it holds, in order."""

  weight: Weight
  blocks: int = 1
  slots: list[Slot] = field(default_factory=list)

  def put_in_order(self) -> None:
    """Sorts the slots as the tensor's parts stand."""
    if parts := self.weight.parts:
      self.slots.sort(key=lambda slot: parts.index(slot.path.split("/")[-2]))
      assert len(self.slots) == len(parts), (self, "a part is missing")

  def split(self, tensor: np.ndarray) -> list[np.ndarray]:
    """The tensor's part of each slot."""
    rows = self.slots[0].rows
    if self.weight.transposed or self.weight.convolution:
      tensor = tensor.reshape(*rows[:-1], -1, rows[-1]).swapaxes(-1, -2)
    widths = [prod(slot.shape) // prod(rows) // self.blocks for slot in self.slots]
    blocked = tensor.reshape(prod(rows), self.blocks, sum(widths))
    pieces = np.split(blocked, np.cumsum(widths)[:-1], axis=-1)
    return [piece.reshape(slot.shape) for piece, slot in zip(pieces, self.slots, strict=True)]

  def join(self, pieces: list[np.ndarray]) -> np.ndarray:
    """The tensor, from the part of each slot."""
    rows = self.slots[0].rows
    blocked = np.concatenate([piece.reshape(prod(rows), self.blocks, -1) for piece in pieces], axis=-1)
    tensor = blocked.reshape(*rows, -1)
    if self.weight.convolution:
      return tensor.T[:, None]
    return tensor.swapaxes(-1, -2) if self.weight.transposed else tensor


def layout(model: Model, table: Table) -> dict[str, Tensor]:
  """Every tensor that a model's Hugging Face file holds, by name.

  Raises:
    ValueError: names parameters that the table does not know.
  """
  found: dict[str, Tensor] = {}
  unknown = []
  for path in model.weight_names:
    weight = find(table, path)
    if weight is None:
      unknown.append(path)
      continue
    for name, slot in _slots(model, path, weight):
      tensor = found.setdefault(name, Tensor(weight, _blocks(model, path, weight)))
      tensor.slots.append(slot)
  if unknown:
    raise ValueError(f"Parameters that have no name in the family's table: {', '.join(unknown)}.")
  for tensor in found.values():
    tensor.put_in_order()
  return found


def from_tensors(model: Model, table: Table, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Parameters and buffers from named tensors; every tensor and every parameter must be used once.

  Raises:
    ValueError: names what is missing or left over.
  """
  wanted = layout(model, table)
  if missing := sorted(wanted.keys() - tensors.keys()):
    raise ValueError(f"Tensors that are missing: {', '.join(missing)}.")
  if left := sorted(tensors.keys() - wanted.keys()):
    raise ValueError(f"Tensors that no parameter takes: {', '.join(left)}.")
  params: dict[str, np.ndarray] = {}
  for name, tensor in wanted.items():
    for slot, piece in zip(tensor.slots, tensor.split(tensors[name]), strict=True):
      if slot.path not in params:
        params[slot.path] = np.empty(model.struct(slot.path).shape, piece.dtype)
      params[slot.path][slot.index] = piece
  return params


def to_tensors(model: Model, table: Table, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The named tensors of a Hugging Face file from parameters and buffers."""
  return {
    name: tensor.join([np.asarray(params[slot.path][slot.index]) for slot in tensor.slots])
    for name, tensor in layout(model, table).items()
  }


def _slots(model: Model, path: str, weight: Weight) -> list[tuple[str, Slot]]:
  """The tensors that hold one parameter, with the place of each in it."""
  shape, layers, (stacked, contracted) = (
    model.struct(path).shape,
    layer_numbers(model.spec, path),
    model.contracted[path],
  )
  indices: list[tuple[tuple[int, ...], dict[str, int]]] = [((r,), {"layer": n}) for r, n in enumerate(layers)]
  indices = indices or [((), {})]
  if "{expert}" in weight.name:
    indices = [((*i, e), {**n, "expert": e}) for i, n in indices for e in range(shape[1])]
  rest = shape[len(indices[0][0]) :]
  lead = stacked - len(indices[0][0])
  contracted += weight.convolution
  inputs = (prod(rest[lead : lead + contracted]),) if contracted else ()
  rows = rest[:-1] if weight.table else (*rest[:lead], *inputs)
  return [(weight.name.format(**numbers), Slot(path, index, rest, rows)) for index, numbers in indices]


def _blocks(model: Model, path: str, weight: Weight) -> int:
  """How often the parts of a fused tensor alternate."""
  if not weight.blocks:
    return 1
  module, _, leaf = path.rsplit("/", 2)
  other = f"{module}/{weight.blocks if weight.blocks != 'each' else weight.parts[0]}/{leaf}"
  outputs = model.struct(other).shape[sum(model.contracted[other]) :]
  return prod(outputs) if weight.blocks == "each" else outputs[0]
