"""Second moments of the inputs of weights, by which GPTQ (`kernels/gptq.py`) weighs what rounding does to outputs."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.matmul import Matmul, innermost
from maxtext.layers.matmul_call import ABSORBED, MatmulCall, Next, Site
from maxtext.layers.param_factory import Buffer, ParamFactory


@dataclass(frozen=True)
class InputMoments(Matmul):
  """Adds the products of all pairs of inputs of each token to a buffer of each weight. Results are not changed.

  Attributes:
    modules: whose inputs are summed.
  """

  name: str = "input_moments"
  modules: frozenset[str] = frozenset()

  def wants(self, site: Site) -> bool:
    """The matmuls of these modules with their whole weight."""
    return site.path in self.modules and site.role not in ABSORBED

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int]
  ) -> dict[str, nnx.Variable]:
    """The sums [F,F] of a weight with F inputs."""
    rows = prod(inputs.values())
    return {"sums": factory("sums", (rows, rows), (None, None), kind=Buffer, dtype=jnp.float32, combine="sum")}

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """The result, as it would be."""
    own["sums"][...] += _sums(call, innermost(next_), x.astype(jnp.float32))
    return next_(call, x, weight)


def _sums(call: MatmulCall, plain: Next, x: jax.Array) -> jax.Array:
  if call.group_sizes is not None:  # the weight gradient of a grouped matmul, with the inputs for a gradient
    return plain(dataclasses.replace(call.transposed("weight_gradient"), dtype=None, precision="highest"), x, x)
  if call.site.role == "experts":
    return jnp.einsum("xci,xcj->xij", x, x, precision="highest")
  first, _, result = call.terms
  tokens = x.reshape(-1, prod(x.shape[sum(c in result for c in first) :]))
  return jnp.matmul(tokens.T, tokens, precision="highest")


def sums_path(module: str) -> str:
  """The path of a module's sums."""
  return f"{module}/matmul/{InputMoments.name}/sums"
