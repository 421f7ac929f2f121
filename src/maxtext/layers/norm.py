"""Norms of the last dimension: by root mean square, or by mean and variance."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.param_factory import ParamFactory


def unit_rms(x: jax.Array, epsilon: float, axis: int | tuple[int, ...] = -1) -> jax.Array:
  """x over its root mean square along those dimensions, computed and returned in float32.

  Args:
    x: of any dtype.
    epsilon: added to the mean square, so that zeros give zeros.
    axis: dimensions of the mean.
  """
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axis, keepdims=True) + epsilon)


class NormLayer(Protocol):
  """A norm with its weights: x [..., width] to the same shape."""

  def __call__(self, x: jax.Array) -> jax.Array: ...


class NormSpec(Protocol):
  """The spec of a norm."""

  def build(self, factory: ParamFactory, width: int) -> NormLayer: ...


@dataclass(frozen=True)
class RMSNormSpec:
  """Unit root mean square, computed in float32, times a learned scale.

  Attributes:
    offset: added to the learned scale, which then starts at 1 - offset.
    scaled: the norm has a learned scale.
    scale_in_float32: scale before the result is cast to the dtype of activations; always so with an offset.
  """

  epsilon: float = 1e-6
  offset: float = 0.0
  scaled: bool = True
  scale_in_float32: bool = False

  def build(self, factory: ParamFactory, width: int) -> "RMSNorm":
    """The layer."""
    return RMSNorm(factory, self, width)


@dataclass(frozen=True)
class LayerNormSpec:
  """Zero mean and unit variance, in float32, times a learned scale, plus a learned bias."""

  epsilon: float = 1e-5

  def build(self, factory: ParamFactory, width: int) -> "LayerNorm":
    """The layer."""
    return LayerNorm(factory, self, width)


class RMSNorm(nnx.Module):
  """The layer of `RMSNormSpec`."""

  def __init__(self, factory: ParamFactory, spec: RMSNormSpec, width: int) -> None:
    self.spec = spec
    self.scale = factory("scale", (width,), ("norm",), fill=1.0 - spec.offset) if spec.scaled else None

  def __call__(self, x: jax.Array) -> jax.Array:
    y = unit_rms(x, self.spec.epsilon)
    if self.scale is None:
      return y.astype(x.dtype)
    if self.spec.offset or self.spec.scale_in_float32:
      return (y * (self.spec.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * self.scale[...].astype(x.dtype)


class LayerNorm(nnx.Module):
  """The layer of `LayerNormSpec`."""

  def __init__(self, factory: ParamFactory, spec: LayerNormSpec, width: int) -> None:
    self.epsilon = spec.epsilon
    self.scale = factory("scale", (width,), ("norm",), fill=1.0)
    self.bias = factory("bias", (width,), ("norm",))

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = unit_rms(y, self.epsilon)
    return (y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
