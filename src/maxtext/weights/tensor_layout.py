"""Which parameters each Hugging Face tensor holds, by the family's weight table, and conversion in both directions."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from maxtext.configs import ConfigError
from maxtext.layers.parameter_paths import module_of, sibling
from maxtext.models.model import Model
from maxtext.models.weight_table import Table, Weight, find, layer_numbers


@dataclass(frozen=True)
class ParameterSlice:
  """The part of a parameter that a part of a tensor holds.

  Attributes:
    path: of the parameter.
    index: into the stacked parameter.
    shape: of that part.
    rows: sizes of the dimensions before the outputs, as in the file: experts, and inputs as one dimension.
  """

  path: str
  index: tuple[int, ...]
  shape: tuple[int, ...]
  rows: tuple[int, ...]


@dataclass
class TensorLayout:
  """One tensor of a Hugging Face file, and the parts of parameters that it holds, in order."""

  weight: Weight
  blocks: int = 1
  slices: list[ParameterSlice] = field(default_factory=list)

  def put_in_order(self) -> None:
    """Sorts the slices in the order of the tensor's parts."""
    if parts := self.weight.parts:
      self.slices.sort(key=lambda slice_: parts.index(module_of(slice_.path)))
      assert len(self.slices) == len(parts), (self, "a part is missing")

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape in the file."""
    rows = self.slices[0].rows
    outputs = sum(prod(slice_.shape) for slice_ in self.slices) // prod(rows)
    if self.weight.convolution:
      return outputs, 1, *rows
    if self.weight.transposed:
      return (*rows[:-1], outputs, *(self.weight.inputs or rows[-1:]))
    return (*rows, outputs)

  def with_rows(self, count: int) -> "TensorLayout":
    """The layout of a tensor with the same outputs and another number of inputs, such as scales, whose slices have the
    outputs as one dimension."""
    lead = self.slices[0].rows[:-1]
    rows = self.slices[0].rows
    slices = [
      replace(slice_, rows=(*lead, count), shape=(*lead, count, prod(slice_.shape) // prod(rows)))
      for slice_ in self.slices
    ]
    return TensorLayout(self.weight, self.blocks, slices)

  def split(self, tensor: np.ndarray) -> list[np.ndarray]:
    """The part of the tensor for each slice, as a view."""
    rows = self.slices[0].rows
    if self.weight.transposed or self.weight.convolution:
      tensor = tensor.reshape(*rows[:-1], -1, rows[-1]).swapaxes(-1, -2)
    widths = [prod(slice_.shape) // prod(rows) // self.blocks for slice_ in self.slices]
    blocked = tensor.reshape(*rows, self.blocks, sum(widths))
    pieces = np.split(blocked, np.cumsum(widths)[:-1], axis=-1)
    return [piece.reshape(slice_.shape) for piece, slice_ in zip(pieces, self.slices, strict=True)]

  def join(self, pieces: list[np.ndarray]) -> np.ndarray:
    """The tensor from the part of each slice."""
    return self._side_by_side(self._blocked(pieces)).reshape(self.shape)

  def join_in_rows(self, pieces: list[np.ndarray], most: int) -> Iterator[np.ndarray]:
    """The tensor in chunks of its first dimension, of about `most` bytes each, so that it is not in memory twice."""
    parts, rows = self._blocked(pieces), self.slices[0].rows
    if len(rows) > (self.weight.transposed or self.weight.convolution):  # the first dimension is one of ours
      for some in _row_chunks(rows[0], sum(part.nbytes for part in parts), most):
        yield self._side_by_side([part[some] for part in parts])
    else:
      tensor = self._side_by_side(parts)
      for some in _row_chunks(len(tensor), tensor.nbytes, most):
        yield tensor[some]

  def _blocked(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
    return [piece.reshape(*self.slices[0].rows, self.blocks, -1) for piece in pieces]

  def _side_by_side(self, parts: list[np.ndarray]) -> np.ndarray:
    blocked = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    tensor = blocked.reshape(*blocked.shape[:-2], -1)
    if self.weight.convolution:
      return tensor.swapaxes(-1, -2)[:, None]
    return tensor.swapaxes(-1, -2) if self.weight.transposed else tensor


def tensor_layouts(model: Model, table: Table) -> dict[str, TensorLayout]:
  """Every tensor of a model's Hugging Face files, by name.

  Raises:
    ConfigError: the table has no name for some parameters.
  """
  found: dict[str, TensorLayout] = {}
  unknown = []
  for path in model.weight_names:
    weight = find(table, path)
    if weight is None:
      unknown.append(path)
      continue
    for name, slice_ in _slices(model, path, weight):
      tensor = found.setdefault(name, TensorLayout(weight, _blocks(model, path, weight)))
      tensor.slices.append(slice_)
  if unknown:
    raise ConfigError(f"Parameters that have no name in the family's table: {', '.join(unknown)}.")
  for tensor in found.values():
    tensor.put_in_order()
  return found


def tensors_of_parameters(tensors: Mapping[str, TensorLayout]) -> dict[str, list[tuple[str, int]]]:
  """For each parameter, the tensors that hold it and the index of the slice in each."""
  found: dict[str, list[tuple[str, int]]] = {}
  for name, tensor in tensors.items():
    for number, slice_ in enumerate(tensor.slices):
      found.setdefault(slice_.path, []).append((name, number))
  return found


def check_all_used(wanted: Collection[str], there: Collection[str], ignored: Sequence[str] = ()) -> None:
  """Checks that every tensor is used, except those that match a pattern of `ignored`.

  Raises:
    ConfigError: tensors are missing or unused.
  """
  if missing := sorted(set(wanted) - set(there)):
    raise ConfigError(f"Tensors that are missing: {', '.join(missing)}.")
  left = sorted(set(there) - set(wanted))
  if left := [name for name in left if not any(re.fullmatch(pattern, name) for pattern in ignored)]:
    raise ConfigError(f"Tensors that no parameter takes: {', '.join(left)}.")


def from_tensors(model: Model, table: Table, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Parameters and buffers from named tensors; every tensor and every parameter must be used once.

  Raises:
    ConfigError: names what is missing or left over.
  """
  wanted = tensor_layouts(model, table)
  check_all_used(wanted, tensors)
  params: dict[str, np.ndarray] = {}
  for name, tensor in wanted.items():
    for slice_, piece in zip(tensor.slices, tensor.split(tensors[name]), strict=True):
      if slice_.path not in params:
        params[slice_.path] = np.empty(model.struct(slice_.path).shape, piece.dtype)
      params[slice_.path][slice_.index] = piece
  return params


def to_tensors(model: Model, table: Table, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The named tensors of a Hugging Face file from parameters and buffers."""
  return {
    name: tensor.join([np.asarray(params[slice_.path][slice_.index]) for slice_ in tensor.slices])
    for name, tensor in tensor_layouts(model, table).items()
  }


def _slices(model: Model, path: str, weight: Weight) -> list[tuple[str, ParameterSlice]]:
  """The tensors that hold one parameter, each with its slice."""
  shape, layers, (stacked, contracted) = (
    model.struct(path).shape,
    layer_numbers(model.spec, path),
    model.contracted[path],
  )
  indices: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((r,) if stacked else (), {"layer": n}) for r, n in enumerate(layers)
  ] or [((), {})]
  if "{expert}" in weight.name:
    indices = [((*i, e), {**n, "expert": e}) for i, n in indices for e in range(shape[1])]
  rest = shape[len(indices[0][0]) :]
  lead = stacked - len(indices[0][0])
  contracted += weight.convolution
  inputs = (prod(rest[lead : lead + contracted]),) if contracted else ()
  rows = rest[:-1] if weight.table else (*rest[:lead], *inputs)
  return [(weight.name.format(**numbers), ParameterSlice(path, index, rest, rows)) for index, numbers in indices]


def _blocks(model: Model, path: str, weight: Weight) -> int:
  """How often the parts of a fused tensor alternate."""
  if not weight.blocks:
    return 1
  other = sibling(path, weight.blocks if weight.blocks != "each" else weight.parts[0])
  outputs = model.struct(other).shape[sum(model.contracted[other]) :]
  return prod(outputs) if weight.blocks == "each" else outputs[0]


def _row_chunks(length: int, size: int, most: int) -> Iterator[slice]:
  step = max(1, length * most // max(size, 1))
  return (slice(i, min(i + step, length)) for i in range(0, length, step))
