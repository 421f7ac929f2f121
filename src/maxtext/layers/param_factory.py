"""The parameter factory: a value is a function of (seed, path, index), whatever the loop, mesh or process count."""

import dataclasses
import functools
import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.parameter_paths import join

# How the values of a buffer are combined that devices, or micro-batches of a pipeline, computed in parallel from an old
# value: the maximum, the old value plus the sum of all differences to it, the mean, or any, since all are equal.
Combine = Literal["max", "sum", "mean", "equal"]


class Buffer(nnx.Variable):
  """State of the model that gets no gradient: router biases, statistics of quantization.

  A buffer that the forward pass assigns to must say how values that were computed in parallel are combined (`combine`
  of `ParamFactory`). With gradient accumulation, micro-batches run one after the other, and each starts from the value
  that the one before assigned.
  """


def check_assigned(path: tuple[Any, ...], before: Any, after: nnx.Variable) -> None:
  """Raises where the forward pass of a module assigned to a buffer, whose value was `before`, that does not say how it
  is combined."""
  if after.combine is None and after.get_value() is not before:
    raise ValueError(
      f"the buffer {join(*path)} is assigned to in the forward pass, but does not say how values that devices or "
      'micro-batches find side by side are joined: make it with combine="max", "sum", "mean" or "equal".'
    )


class UpdateStatistic(Buffer):
  """A statistic over all micro-batches of one update; it is not part of the train state.

  It is zero at the start of an update, each micro-batch accumulates into it (by sum, maximum, ...), and after the
  update the layer's `end_update` reads it.
  """


@dataclass(frozen=True)
class ParamFactory:
  """Creates the variables of one module; `scope` gives the factory of a child. Copies of a module are stacked on
  leading dimensions.

  Attributes:
    seed: of the initial values; None creates shapes without values, which needs no trace.
    stack: the leading dimensions, outermost first, as (name, size).
  """

  seed: jax.typing.ArrayLike | None
  dtype: Any
  path: str = ""
  stack: tuple[tuple[str, int], ...] = ()

  @property
  def module_path(self) -> str:
    """The path of the module, with which the paths of its parameters begin."""
    return self.path.removeprefix("/")

  def scope(self, name: str | int, **copies: int) -> "ParamFactory":
    """The factory of a child module, or of stacked copies of it: scope("experts", expert=8)."""
    return dataclasses.replace(self, path=join(self.path, name), stack=(*self.stack, *copies.items()))

  def __call__(
    self,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    std: float = 0.0,
    fill: jax.typing.ArrayLike = 0.0,
    kind: type[nnx.Variable] = nnx.Param,
    dtype: Any = None,
    contracted: int = 0,
    combine: Combine | None = None,
  ) -> nnx.Variable:
    """A variable with logical axes (None is never sharded), normal around `fill`, truncated at three sigma.

    `contracted` is the number of leading dimensions that a matmul contracts, for optimizers of matrices. `combine` is
    for buffers that the forward pass assigns to; None for all others.
    """
    dtype = dtype or self.dtype
    shape, axes = (*(size for _, size in self.stack), *shape), (*(name for name, _ in self.stack), *axes)
    if self.seed is None:
      value: Any = jax.ShapeDtypeStruct(shape, dtype)
    else:
      value = jnp.full(shape, fill, dtype)
      if std:
        stream = jnp.asarray(self.seed, jnp.uint32) ^ jnp.uint32(zlib.crc32(join(self.path, name).encode()))
        value += (std * _normal(stream, shape)).astype(dtype)
    return kind(value, axes=axes, contracted=contracted, stacked=len(self.stack), combine=combine)


@functools.partial(jax.jit, static_argnums=1)  # traced once for all variables of a shape
def _normal(stream: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Each element from a hash of its own index: any shard can be computed alone, and it compiles in a tenth of the time
  of `jax.random`, which would be a quarter of a small run's start-up."""
  key = _mix(stream)
  # A stack of experts may have more than 2^32 elements, so an index is two integers: of leading and other dimensions.
  cut = next(i for i in range(min(1, len(shape)), len(shape) + 1) if math.prod(shape[i:]) <= 2**32)
  outer, inner = _index(shape, range(cut)), _index(shape, range(cut, len(shape)))
  bits = _mix(_mix(inner ^ _mix(key + 2)) + _mix(outer ^ _mix(key + 1)))
  symmetric = ((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-23 - 1.0
  mass = math.erf(3 / math.sqrt(2))
  deviation = math.sqrt(1 - 6 * math.exp(-4.5) / (math.sqrt(2 * math.pi) * mass))  # of a normal truncated at three
  return jax.lax.erf_inv(symmetric * mass) * (math.sqrt(2) / deviation)


def _index(shape: tuple[int, ...], dims: range) -> jax.Array:
  """The row-major index of each element in these dimensions."""
  index = jnp.zeros(shape, jnp.uint32)
  for dim in dims:
    stride = math.prod(shape[dim + 1 : dims.stop])
    index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
  return index


def _mix(x: jax.Array) -> jax.Array:
  """A mixing function of 32 bits, which is a bijection (two multiplications, as in murmur3)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
  x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
  return x ^ (x >> 15)
