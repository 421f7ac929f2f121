"""Root-mean-square norm."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.make import Make


@dataclass(frozen=True)
class Norm:
  """Normalise in float32, cast, then scale."""

  epsilon: float = 1e-6


class RMSNorm(nnx.Module):
  """Scales the last dimension to unit root mean square, times a weight."""

  def __init__(self, make: Make, spec: Norm, width: int) -> None:
    self.spec = spec
    self.scale = make("scale", (width,), ("norm",), fill=1.0)

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.spec.epsilon)
    return y.astype(x.dtype) * self.scale[...].astype(x.dtype)
