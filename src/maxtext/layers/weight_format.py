"""How a weight is stored: one array in the run's weight dtype, or several, such as integers and their scales.

Only the weights of `Linear` and of experts have any format; the embedding may have that of `quantized_weight.py`. The
arrays of a format are sibling parameters, and the matmul reads them as they are stored: a weight of eight bits is never
dequantized outside of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx

from maxtext.layers.matmul_call import MatmulCall, Next, Site
from maxtext.layers.param_factory import ParamFactory


class WeightFormat(Protocol):
  """How weights are stored. Hashable: it is part of what a program depends on."""

  @property
  def per_item(self) -> int:
    """Values in one element of the array `weight` of a weight that is not stored plainly."""
    ...

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int], std: float
  ) -> dict[str, nnx.Variable]:
    """The arrays of a weight [inputs, outputs] whose initial values have this deviation, by the names that their paths
    end in: `weight` is one of them, the others begin with `weight_`. A format may store some sites in other ways."""
    ...

  def load(self, site: Site, arrays: Mapping[str, jax.Array]) -> "jax.Array | StoredWeight":
    """What a matmul is given: the array itself where it is stored plainly, or a `StoredWeight`."""
    ...

  def dequantize(self, arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """The weight as one array, for tests and exports."""
    ...

  def matmul(self, call: MatmulCall, next_: Next, x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """The result of a call from what is stored; `next_(call, x, array)` is the plain operation."""
    ...


@dataclass(frozen=True)
class StoredWeight:
  """The arrays of a weight that is not stored plainly, as one operand of a matmul. A pytree."""

  format: WeightFormat
  arrays: Mapping[str, jax.Array]


jax.tree_util.register_dataclass(StoredWeight, data_fields=["arrays"], meta_fields=["format"])


@dataclass(frozen=True)
class PlainFormat:
  """One array in the run's weight dtype."""

  @property
  def per_item(self) -> int:
    """One."""
    return 1

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int], std: float
  ) -> dict[str, nnx.Variable]:
    """`weight` alone."""
    shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
    return {"weight": factory("weight", shape, axes, std=std, contracted=len(inputs))}

  def load(self, site: Site, arrays: Mapping[str, jax.Array]) -> "jax.Array | StoredWeight":
    """The array."""
    return arrays["weight"]

  def dequantize(self, arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """The array, in another dtype."""
    return arrays["weight"].astype(dtype)

  def matmul(self, call: MatmulCall, next_: Next, x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """The plain operation."""
    return next_(call, x, arrays["weight"])
