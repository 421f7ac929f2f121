"""DoRA (Liu et al., 2024): LoRA whose weights keep magnitudes of their own, m (W + scale A B) / ||W + scale A B||.

The norm is that of each output over all inputs, and a constant to gradients, as in the paper and in PEFT. A magnitude
is stored as its difference to ||W||: it starts at zero whatever weights a run starts from, and weight decay leads it
back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.layers.lora import LoraMatmul, adapter_paths
from maxtext.layers.matmul import PlainMatmul, UnfitWeightError, innermost
from maxtext.layers.matmul_call import MatmulCall, Next, Site
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.weight_format import StoredWeight
from maxtext.mesh import explicit


@dataclass(frozen=True)
class DoraMatmul(LoraMatmul):
  """LoRA's, with the difference of each output's magnitude to that of the weight, in float32."""

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int]
  ) -> dict[str, nnx.Variable]:
    """A, B and the magnitudes' differences."""
    if site.role == "experts":  # devices that split the inputs of an expert know a part of its norms
      raise UnfitWeightError(
        f"use_dora=true, and {site.path} are weights of experts, whose magnitudes are not supported: leave them out of "
        "lora_targets, or leave use_dora out."
      )
    magnitude = factory("magnitude", tuple(outputs.values()), tuple(outputs), dtype=jnp.float32)
    return super().variables(factory, site, inputs, outputs) | {"magnitude": magnitude}

  def paths(self, module: str) -> tuple[str, ...]:
    """Those of LoRA and of the magnitudes' differences."""
    return *adapter_paths(module), magnitude_path(module)

  def merge(self, weight: np.ndarray, stacked: int, *adapter: np.ndarray) -> np.ndarray:
    """A weight with its adapter in it, in its own dtype."""
    a, b, difference = adapter
    inputs, updated = range(stacked, a.ndim - 1), self.updated(weight, stacked, a, b)
    factor = _factor(norm(weight, inputs) + difference, norm(updated, inputs))
    return (updated * np.expand_dims(factor, tuple(inputs))).astype(weight.dtype)

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """LoRA's result times each output's new magnitude over its norm; where a contraction sums over the outputs, as an
    absorbed one does, the factor is on x."""
    first, letters, result = call.terms
    outputs = letters[own["a"].ndim - 1 :]
    of_result = outputs[-1] in result
    factor = self._factors(call, own, weight)
    if not of_result:
      return super().__call__(call, own, next_, _scale(x, first, factor, outputs), weight)
    y, plain = super().__call__(call, own, next_, x, weight), innermost(next_)
    if isinstance(plain, PlainMatmul) and plain.mesh is not None:
      factor = explicit.match_sharding(factor, y, plain.mesh)
    return _scale(y, result, factor, outputs)

  def _factors(self, call: MatmulCall, own: Mapping[str, nnx.Variable], weight: Any) -> jax.Array:
    """Of each output of the weight, or of the part of it that is contracted."""
    a, b, difference = (own[name][...] for name in ("a", "b", "magnitude"))
    if isinstance(weight, StoredWeight):
      weight = weight.format.dequantize(weight.arrays, jnp.float32)
      weight = weight.reshape(*a.shape[:-1], *weight.shape[1:])  # its contracted dimensions are stored as one
    inputs = a.ndim - 1

    def run(weight: jax.Array, a: jax.Array, b: jax.Array, difference: jax.Array) -> jax.Array:
      part = (..., slice(*call.part)) if call.part else ...
      weight, b, difference = weight[part].astype(jnp.float32), b[part], difference[part]
      updated = weight + jax.lax.stop_gradient(jnp.tensordot(a, b, 1)) * self.scale
      return _factor(norm(weight, range(inputs)) + difference, norm(updated, range(inputs)))

    sharding = jax.typeof(difference).sharding
    if not explicit.is_explicit(sharding.mesh):
      return run(weight, a, b, difference)
    return explicit.auto_axes(
      run, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec)), weight, a, b, difference
    )


def magnitude_path(module: str) -> str:
  """The path of the differences of magnitudes beside the weight of a module."""
  return adapter_paths(module)[0].removesuffix("a") + "magnitude"


def norm(weight: Any, inputs: range) -> Any:
  """The norm of each output of a weight, in float32."""
  library = np if isinstance(weight, np.ndarray) else jnp
  return library.sqrt(library.sum(library.square(weight.astype(np.float32)), axis=tuple(inputs)))


def _factor(magnitude: Any, after: Any) -> Any:
  """The magnitudes over the norms; 1 for outputs without weights."""
  library = np if isinstance(after, np.ndarray) else jnp
  return library.where(after == 0, 1.0, magnitude / library.where(after == 0, 1.0, after))


def _scale(x: jax.Array, letters: str, factor: jax.Array, outputs: str) -> jax.Array:
  """x times the factor, whose dimensions are those of the letters `outputs` of x."""
  order = sorted(range(len(outputs)), key=lambda i: letters.index(outputs[i]))
  shape = [size if letter in outputs else 1 for letter, size in zip(letters, x.shape, strict=True)]
  return (x.astype(jnp.float32) * factor.transpose(order).reshape(shape)).astype(x.dtype)
