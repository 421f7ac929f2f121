"""The only place where a weight meets an activation, so that quantization and LoRA hook in once."""

from collections.abc import Mapping
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.how import How, Product
from maxtext.layers.make import Make
from maxtext.mesh import explicit


class Linear(nnx.Module):
  """Contracts the last dimensions of x with the first of the weight.

  Args:
    make: factory of this module's variables.
    inputs: named dimensions that are contracted, with their sizes.
    outputs: named dimensions that appear instead.
    name: the name under which the output may be kept for the backward pass.
    tied: has no weight of its own and is called with another module's.
    bias: adds a learned bias to the product.
  """

  def __init__(
    self,
    make: Make,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    how: How,
    name: str,
    tied: bool = False,
    bias: bool = False,
  ) -> None:
    self.how, self.inputs, self.name = how, len(inputs), name
    shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
    std = (how.init_scale / prod(inputs.values())) ** 0.5
    self.weight = None if tied else make("weight", shape, axes, std=std, contracted=len(inputs))
    self.bias = make("bias", tuple(outputs.values()), tuple(outputs)) if bias else None
    hooks = {hook.name: hook.variables(make.at(hook.name), inputs, outputs) for hook in how.linear_hooks}
    self.hooks = nnx.Dict({name: nnx.Dict(variables) for name, variables in hooks.items()})

  def __call__(
    self, x: jax.Array, weight: jax.Array | None = None, dtype: jax.typing.DTypeLike | None = None
  ) -> jax.Array:
    """`weight` is given where it is tied; `dtype` is that of the product where it is not the run's."""
    product = self._hooked(partial(self._product, dtype or self.how.dtype))
    if self.weight is not None:
      weight = self.weight[...]
    assert weight is not None
    y = product(x, weight)
    if self.bias is not None:
      bias = self.bias[...].astype(y.dtype)
      y = y + (explicit.match_sharding(bias, y, self.how.mesh) if self.how.explicit else bias)
    return checkpoint_name(y, self.name)

  def _hooked(self, product: Product) -> Product:
    for hook in self.how.linear_hooks:
      product = partial(hook, product, self.hooks[hook.name])
    return product

  def _product(self, dtype: jax.typing.DTypeLike, x: jax.Array, weight: jax.Array) -> jax.Array:
    x, weight = x.astype(dtype), weight.astype(dtype)
    if self.how.explicit:
      return explicit.matmul(x, weight, self.inputs, self.how.precision, self.how.mesh)
    return jnp.tensordot(x, weight, self.inputs, precision=self.how.precision)
