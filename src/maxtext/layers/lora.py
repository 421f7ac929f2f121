"""LoRA: low-rank adapters beside frozen weights, y = x W + scale (x A) B, as an implementation of the matmul seam."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext.layers.matmul import Matmul, innermost
from maxtext.layers.matmul_call import MatmulCall, Next, Site
from maxtext.layers.param_factory import ParamFactory

_FOLDER = "/matmul/lora/"
_ADAPTED = ("linear", "experts", "mla_absorb_key", "mla_absorb_value")


def is_adapter(path: str) -> bool:
  """Whether a parameter belongs to an adapter."""
  return _FOLDER in path


def adapter_paths(module: str) -> tuple[str, str]:
  """The paths of A and B beside the weight of a module."""
  return f"{module}{_FOLDER}a", f"{module}{_FOLDER}b"


def adapted_module(path: str) -> str:
  """The module that a parameter of an adapter is beside."""
  return path.partition(_FOLDER)[0]


@dataclass(frozen=True)
class LoraMatmul(Matmul):
  """Adapters A [inputs, rank] and B [rank, outputs] in float32; B is zero at first, so that nothing changes.

  Attributes:
    scale: multiplies A B.
    targets: patterns of the paths of modules with adapters, among those with a linear or expert weight.
  """

  name: str = "lora"
  rank: int = 8
  scale: float = 1.0
  targets: tuple[str, ...] = ("layers/",)

  def wants(self, site: Site) -> bool:
    """Linear and expert weights of the targets."""
    return site.role in _ADAPTED and any(re.search(pattern, site.path) for pattern in self.targets)

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int]
  ) -> dict[str, nnx.Variable]:
    """A and B; they have the logical axes of the weight, and the rank is on every device."""
    std, sizes = prod(inputs.values()) ** -0.5, (*inputs.values(), self.rank)
    a = factory("a", sizes, (*inputs, None), std=std, dtype=jnp.float32, contracted=len(inputs))
    b = factory("b", (self.rank, *outputs.values()), (None, *outputs), dtype=jnp.float32, contracted=1)
    return {"a": a, "b": b}

  def paths(self, module: str) -> tuple[str, ...]:
    """The paths of the parameters beside the weight of a module."""
    return adapter_paths(module)

  def merge(self, weight: np.ndarray, stacked: int, *adapter: np.ndarray) -> np.ndarray:
    """A weight [stacked..., inputs..., outputs...] with its adapter in it, in its own dtype."""
    return self.updated(weight, stacked, *adapter).astype(weight.dtype)

  def updated(self, weight: np.ndarray, stacked: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """W + scale A B in float32."""
    lead, rank = weight.shape[:stacked], a.shape[-1]
    update = np.matmul(a.reshape(*lead, -1, rank), b.reshape(*lead, rank, -1)) * np.float32(self.scale)
    return weight.astype(np.float32) + update.reshape(weight.shape)

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """The result of the weight and that of the adapter, which is not quantized."""
    operands = own["a"][...], own["b"][...]
    if call.part is None:
      calls = call.low_rank()
    else:
      calls, operands = _absorbed(call, *operands)
    plain = innermost(next_)
    narrow = plain(calls[0], x, operands[0])
    return next_(call, x, weight) + plain(calls[1], narrow * self.scale, operands[1])


def _absorbed(
  call: MatmulCall, a: jax.Array, b: jax.Array
) -> tuple[tuple[MatmulCall, MatmulCall], tuple[jax.Array, jax.Array]]:
  """The two calls, with their operands, in place of a contraction with a part of the weight's last dimension, which may
  sum over the weight's outputs instead of its inputs."""
  first, weight, result = call.terms
  by_input, by_output = weight[: a.ndim - 1] + "z", "z" + weight[a.ndim - 1 :]
  narrow = "".join(c for c in first if c in result) + "z"
  order = [(by_input, a), (by_output, b[..., slice(*call.part or ())])]
  if not any(c in first for c in by_input):
    order.reverse()
  (one, left), (other, right) = order
  down, up = f"{first},{one}->{narrow}", f"{narrow},{other}->{result}"
  plain = replace(call, part=None)
  return (replace(plain, contraction=down), replace(plain, contraction=up)), (left, right)
