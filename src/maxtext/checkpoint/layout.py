"""Where the layers' dimension of stacked parameters is, in a checkpoint of parameters.

Inside a run it is always dimension 0. Parameters that are handed on may have it elsewhere (`param_scan_axis`), or each
layer apart (`force_unroll`): `groups/0/layers/0/...` then becomes `groups/0/layers/0.3/...` for repeat 3, which is
the fourth. The change is made here, at the border, and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.layers.parameter_paths import LayerPath


@dataclass(frozen=True)
class Layout:
  """How stacked parameters are stored: `stacked` is the layers' dimension, None where each layer is apart."""

  stacked: int | None

  def stored(self, name: str, struct: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that hold a parameter, with where this run wants them."""
    found = LayerPath.parse(name)
    if not found or self.stacked == 0:
      return {name: struct}
    parts = _parts(struct)
    if self.stacked is None:
      piece = _struct(struct, struct.shape[1:], parts[1:])
      return {found.unstacked(i): piece for i in range(struct.shape[0])}
    to = self._dimension(len(struct.shape))
    return {name: _struct(struct, _moved(struct.shape, to), _moved(parts, to))}

  def load(self, name: str, struct: jax.ShapeDtypeStruct, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """The parameter as the run holds it, from the arrays that hold it."""
    stored = list(self.stored(name, struct))
    if self.stacked == 0 or not LayerPath.parse(name):
      return arrays[name]
    if self.stacked is None:
      return jax.jit(lambda *pieces: jnp.stack(pieces), out_shardings=struct.sharding)(*(arrays[n] for n in stored))
    back = self._dimension(len(struct.shape))
    return jax.jit(lambda x: jnp.moveaxis(x, back, 0), out_shardings=struct.sharding)(arrays[name])

  def store(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays that hold a parameter, from the parameter."""
    found = LayerPath.parse(name)
    if not found or self.stacked == 0:
      return {name: array}
    if self.stacked is None:
      return {found.unstacked(i): layer for i, layer in enumerate(array)}
    return {name: np.ascontiguousarray(np.moveaxis(array, 0, self._dimension(array.ndim)))}

  def place(self, name: str, index: tuple[int, ...], dims: int) -> tuple[str, tuple[int | slice, ...]]:
    """Where a part of a parameter of that many dimensions is: the array that holds it, and the place in that."""
    found = LayerPath.parse(name)
    where = index + (slice(None),) * (dims - len(index))
    if not found or self.stacked == 0:
      return name, where
    if self.stacked is None:
      return found.unstacked(index[0]), where[1:]
    return name, _moved(where, self._dimension(dims))

  def layers(self, name: str, dims: int) -> int | None:
    """The layers' dimension of the array of that name; None where it has none."""
    return None if self.stacked is None or not LayerPath.parse(name) else self._dimension(dims)

  def _dimension(self, dims: int) -> int:
    """An array with fewer dimensions has its layers last."""
    assert self.stacked is not None
    return min(self.stacked, dims - 1)


def _struct(like: jax.ShapeDtypeStruct, shape: tuple, parts: tuple) -> jax.ShapeDtypeStruct:
  assert isinstance(like.sharding, NamedSharding)
  return jax.ShapeDtypeStruct(shape, like.dtype, sharding=NamedSharding(like.sharding.mesh, PartitionSpec(*parts)))


def _parts(struct: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
  """How each dimension is split."""
  assert isinstance(struct.sharding, NamedSharding)
  spec = tuple(struct.sharding.spec)
  return spec + (None,) * (len(struct.shape) - len(spec))


def _moved(values: tuple, to: int) -> tuple:
  rest = list(values[1:])
  return (*rest[:to], values[0], *rest[to:])
