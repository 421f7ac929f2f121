"""The parameter factory: a value is a function of (seed, path, repeat), whatever the scan, mesh or process count."""

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Buffer(nnx.Variable):
  """What the step carries but no gradient touches: router biases, statistics of quantization."""


@dataclass(frozen=True)
class Make:
  """Makes the variables of one module; `at` goes one module down. Inside a stack each is stacked on dimension 0."""

  key: jax.Array
  dtype: Any
  path: str = ""
  repeats: int | None = None

  def at(self, name: str | int, repeats: int | None = None) -> "Make":
    """The factory of a child module, or of a stack of `repeats` copies of it."""
    return dataclasses.replace(self, path=f"{self.path}/{name}", repeats=repeats or self.repeats)

  def __call__(
    self,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    std: float = 0.0,
    fill: float = 0.0,
    kind: type[nnx.Variable] = nnx.Param,
  ) -> Any:
    """A variable with named dimensions: normal, cut at three deviations, around `fill`."""

    def one(key: jax.Array) -> jax.Array:
      value = jnp.full(shape, fill, self.dtype)
      return value + std * jax.random.truncated_normal(key, -3, 3, shape, self.dtype) if std else value

    key = jax.random.fold_in(self.key, zlib.crc32(f"{self.path}/{name}".encode()))
    if self.repeats is None:
      return kind(one(key), axes=axes)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(self.repeats))
    return kind(jax.vmap(one)(keys), axes=("layers", *axes))
