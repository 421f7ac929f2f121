"""The only place where a weight meets an activation, so that quantization and LoRA hook in once."""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.how import How, LinearHook
from maxtext.layers.make import Make


class Linear(nnx.Module):
  """Contracts the last dimensions of x with the first of the weight.

  Args:
    make: factory of this module's variables.
    inputs: named dimensions that are contracted, with their sizes.
    outputs: named dimensions that appear instead.
    name: the name under which the output may be kept for the backward pass.
  """

  def __init__(self, make: Make, inputs: Mapping[str, int], outputs: Mapping[str, int], how: How, name: str) -> None:
    self.how, self.inputs, self.name = how, len(inputs), name
    shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
    self.weight = make("weight", shape, axes, std=(how.init_scale / prod(inputs.values())) ** 0.5)
    self.extra = nnx.List(
      [nnx.Dict(h.variables(make.at(f"extra{i}"), inputs, outputs)) for i, h in enumerate(how.linear_hooks)]
    )

  def __call__(self, x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """`dtype` is that of the product, unlike the run's."""
    dtype = dtype or self.how.dtype
    product: Callable[[jax.Array, jax.Array], jax.Array] = self._product
    for hook, variables in zip(self.how.linear_hooks, self.extra, strict=True):
      product = partial(_hooked, hook, product, {n: v[...] for n, v in variables.items()})
    return checkpoint_name(product(x.astype(dtype), self.weight[...].astype(dtype)), self.name)

  def _product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.tensordot(x, weight, self.inputs, precision=self.how.precision)


def _hooked(
  hook: LinearHook,
  product: Callable[[jax.Array, jax.Array], jax.Array],
  own: Mapping[str, jax.Array],
  x: jax.Array,
  weight: jax.Array,
) -> jax.Array:
  return hook(product, x, weight, own)
