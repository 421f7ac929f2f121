"""Merge-aware LoRA: matmuls see the base with its adapter in it, rounded to the format in which it will be stored.

Merging an adapter into a base of few bits rounds the sum once more, and ruins what the adapter learnt unless it was
trained through that rounding. Gradients pass it as if it were not there (straight-through).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext.layers.lora import LoraMatmul
from maxtext.layers.matmul_call import MatmulCall, Next
from maxtext.layers.quantized_weight import WeightRounding, round_weight
from maxtext.layers.weight_format import StoredWeight


@dataclass(frozen=True)
class MergedLora(LoraMatmul):
  """LoRA's adapters, merged in every matmul.

  Attributes:
    rounding: of the merged weight.
  """

  rounding: WeightRounding = field(default_factory=lambda: WeightRounding("int8", 0))

  def merge(self, weight: np.ndarray, stacked: int, *adapter: np.ndarray) -> np.ndarray:
    """A weight with its adapter in it, in float32, by the operations of the training step."""
    return np.asarray(_merged(weight, *adapter, self.scale, stacked))

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """The result of the merged weight, rounded where the format wants it."""
    a, b = own["a"][...], own["b"][...]
    stacked = int(call.site.role == "experts")
    if isinstance(weight, StoredWeight):
      arrays = weight.arrays
      weight = self.rounding.decode(arrays, (*a.shape[:-1], *b.shape[stacked + 1 :]), stacked, jnp.float32)
    # What is merged must be what the file has, so XLA may not fuse it with what is around it.
    merged = jax.lax.optimization_barrier(_merged(weight, a, b, self.scale, stacked))
    contracted = a.ndim - 1 - stacked
    if self.rounding.wants(call.site.of_weight):
      merged = round_weight(self.rounding, stacked, contracted, merged, call.dtype)
    return next_(call, x, merged)


@partial(jax.jit, static_argnums=(3, 4))
def _merged(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float, stacked: int) -> jax.Array:
  """W + scale A B in float32."""
  multiply = partial(jnp.tensordot, axes=1, precision="highest")
  product = jax.vmap(multiply)(a, b) if stacked else multiply(a, b)
  return weight.astype(jnp.float32) + product * jnp.float32(scale)
