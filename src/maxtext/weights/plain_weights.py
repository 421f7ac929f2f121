"""Plain weights that are read piece by piece, from wherever they are; and parameters that are placed from pieces.

A piece of a parameter is what stands at an index into its first dimensions: a layer, or an expert of a layer.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.stream import StreamReader
from maxtext.layers.lora import LoraMatmul, is_adapter
from maxtext.layers.quantized_weight import WeightRounding, array_paths
from maxtext.models.model import Model
from maxtext.weights.quantized import Codes

Index = tuple[int, ...]
Progress = Callable[[int, int, int, int], None]
"""Called with: parts done, all parts, bytes done, all bytes."""
Pieces = Iterable[tuple[Index, Callable[[], Mapping[str, np.ndarray]]]]


def no_progress(count: int, all_count: int, size: int, all_size: int) -> None:
  """Reports nothing."""


class PlainWeights(Protocol):
  """Parameters that can be read by path and index."""

  def indices(self, path: str) -> list[Index]:
    """The indices of the pieces of a parameter."""
    ...

  def piece(self, path: str, index: Index) -> np.ndarray:
    """A piece of a parameter."""
    ...

  def codes(self, path: str, index: Index, rounding: WeightRounding) -> Codes | None:
    """A piece [..., inputs, outputs] that is stored in this format already; None for any other."""
    ...

  def skip(self, path: str, index: Index) -> None:
    """Called in place of `piece` for one that is written already."""
    ...

  def check(self) -> None:
    """Called when every piece was read or skipped; raises if they are not what was saved."""
    ...


class CheckpointWeights:
  """The parameters of a checkpoint as plain weights: multiplied out where they are at rest in few bits, and with
  adapters merged into them.

  Args:
    model: the abstract model with plain weights, and with the adapters that are merged.
    reader: of the checkpoint.
    rounding: of the weights that are at rest.
    lora: merges adapters into their weights; None where there are none.
  """

  def __init__(
    self, model: Model, reader: StreamReader, rounding: WeightRounding | None = None, lora: LoraMatmul | None = None
  ) -> None:
    self._model, self._reader, self._rounding, self._lora = model, reader, rounding, lora
    self._there = reader.parameters
    own = (*model.params, *model.buffers)
    self._adapters = {name for name in own if is_adapter(name)} if lora else set[str]()
    plain = [name for name in (*model.weight_names, *self._adapters) if f"{name}_scale" not in self._there]
    reader.check_shapes({name: model.struct(name) for name in plain})

  def indices(self, path: str) -> list[Index]:
    """One for each layer; experts of a layer are read at once."""
    shape = self._model.struct(path).shape
    return list(product(*map(range, shape[: min(1, self._model.contracted[path][0])])))

  def piece(self, path: str, index: Index) -> np.ndarray:
    """A piece of a parameter, with its adapter in it."""
    weight = self._at_rest(path, index) if f"{path}_scale" in self._there else self._read(path, index)
    names = self._lora.paths(path.removesuffix("/weight")) if self._lora and path.endswith("/weight") else ()
    if not names or not self._adapters.issuperset(names):
      return weight
    assert self._lora is not None
    adapter = [self._read(name, index) for name in names]
    return self._lora.merge(weight, self._model.contracted[path][0] - len(index), *adapter)

  def _read(self, name: str, index: Index) -> np.ndarray:
    return self._reader.read(name, index, len(self._model.struct(name).shape))

  def _at_rest(self, path: str, index: Index) -> np.ndarray:
    """The weight in float32, multiplied out."""
    assert self._rounding is not None, "a checkpoint of weights at rest records their format"
    arrays: dict[str, Any] = {
      leaf: self._reader.read(name, index, len(self._reader.stored_shape(name)))
      for leaf, name in array_paths(path).items()
      if name in self._there
    }
    stacked, contracted = self._model.contracted[path]
    if not contracted:
      return np.asarray(self._rounding.decode_rows({leaf: jnp.asarray(a) for leaf, a in arrays.items()}, np.float32))
    shape = self._model.struct(path).shape[len(index) :]
    return np.asarray(self._rounding.decode(arrays, shape, stacked - len(index), np.float32))

  def codes(self, path: str, index: Index, rounding: WeightRounding) -> Codes | None:
    """None: the weights of a checkpoint at rest are read as they are."""
    return None

  def skip(self, path: str, index: Index) -> None:
    """Reads it again, so that what was saved can be checked as a whole."""
    self.piece(path, index)

  def check(self) -> None:
    """Compares the checksums of all that was read."""
    self._reader.check(self._reader.take_sums())


def place(structs: Mapping[str, jax.ShapeDtypeStruct], pieces: Pieces) -> dict[str, jax.Array]:
  """Parameters on their devices from pieces that hold a part of each; a process reads those that its devices hold."""
  shards = {name: _Shards(struct) for name, struct in structs.items()}
  for index, read in pieces:
    if any(one.holds(index) for one in shards.values()):
      found = read()
      for name, one in shards.items():
        one.put(index, found[name])
  return {name: one.array() for name, one in shards.items()}


class _Shards:
  """What the devices of this process hold of one array."""

  def __init__(self, struct: jax.ShapeDtypeStruct) -> None:
    assert struct.sharding is not None
    self._struct, self._sharding = struct, struct.sharding
    held_here = self._sharding.addressable_devices_indices_map(struct.shape).values()
    regions = {_bounds(index, struct.shape) for index in held_here}
    self._shards = {region: np.empty([b - a for a, b in region], struct.dtype) for region in regions}

  def holds(self, index: Index) -> bool:
    return any(_within(index, region) for region in self._shards)

  def put(self, index: Index, piece: np.ndarray) -> None:
    for region, shard in self._shards.items():
      if _within(index, region):
        place = tuple(i - a for i, (a, _) in zip(index, region, strict=False))
        shard[place] = piece[tuple(slice(a, b) for a, b in region[len(index) :])]

  def array(self) -> jax.Array:
    shape = self._struct.shape
    return jax.make_array_from_callback(
      shape, self._sharding, lambda index: self._shards[_bounds(index, shape)], dtype=self._struct.dtype
    )


def _within(index: Index, region: tuple[tuple[int, int], ...]) -> bool:
  return all(a <= i < b for i, (a, b) in zip(index, region, strict=False))


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  whole = index or (slice(None),) * len(shape)
  return tuple(
    (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(whole, shape, strict=True)
  )
