"""N:M sparsity of weights in training: of every M weights along the inputs, the N of largest magnitude are used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.matmul import Matmul, UnfitWeightError
from maxtext.layers.matmul_call import MatmulCall, Next, Site
from maxtext.layers.param_factory import Buffer, ParamFactory


def is_mask(path: str) -> bool:
  """Whether a buffer is the mask of a weight."""
  return path.endswith("/matmul/sparsity/mask")


@dataclass(frozen=True)
class SparseMatmul(Matmul):
  """Masks the weights of linear layers and experts. The masks are buffers, so they are saved with the model.

  A weight outside its mask gets no gradient; weight decay shrinks it. It may come back when masks are made again.

  Attributes:
    kept, block: N and M.
    start: first step with masks; the weights are dense before it.
    every: steps after which masks are made again.
  """

  name: str = "sparsity"
  kept: int = 2
  block: int = 4
  start: int = 50
  every: int = 10

  def wants(self, site: Site) -> bool:
    """Linear layers and experts."""
    return site.role in ("linear", "experts", "mla_absorb_key", "mla_absorb_value")

  def variables(
    self, factory: ParamFactory, site: Site, inputs: Mapping[str, int], outputs: Mapping[str, int]
  ) -> dict[str, nnx.Variable]:
    """The mask, and the number of updates so far."""
    if (rows := math.prod(inputs.values())) % self.block:
      raise UnfitWeightError(
        f"weight_sparsity_m={self.block} does not divide the {rows} inputs of {site.path}: choose a divisor."
      )
    shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
    mask = factory("mask", shape, axes, fill=1.0, kind=Buffer, dtype=jnp.bool_, contracted=len(inputs))
    return {"mask": mask, "updates": factory("updates", (), (), kind=Buffer, dtype=jnp.int32)}

  def __call__(
    self, call: MatmulCall, own: Mapping[str, nnx.Variable], next_: Next, x: jax.Array, weight: Any
  ) -> jax.Array:
    """The result of the weights inside the mask."""
    return next_(call, x, jnp.where(own["mask"][...], weight, 0))

  def end_update(self, site: Site, own: Mapping[str, nnx.Variable], weight: nnx.Variable | None) -> None:
    """Makes the mask again where it is time."""
    assert weight is not None
    updates = own["updates"][...] + 1
    mask = own["mask"]
    since = updates.max() - max(self.start, 1)  # the same for all copies of a module
    due = (since >= 0) & (since % self.every == 0)
    values, first = weight[...], mask.get_metadata()["stacked"]
    made = jax.lax.cond(
      due, lambda v, m: largest(v, first, mask.contracted, self.kept, self.block), lambda v, m: m, values, mask[...]
    )
    mask.set_value(made)
    own["updates"].set_value(updates)


def largest(weight: jax.Array, first: int, contracted: int, kept: int, block: int) -> jax.Array:
  """Which weights are among the `kept` largest of their block; of equal ones the first.

  Blocks are consecutive along the dimensions from `first`, `contracted` of them, taken as one.
  """
  shape, inputs = weight.shape, math.prod(weight.shape[first : first + contracted])
  blocks = jnp.abs(weight).reshape(*shape[:first], inputs // block, block, *shape[first + contracted :])
  rank = jnp.argsort(jnp.argsort(-blocks, axis=first + 1, stable=True), axis=first + 1, stable=True)
  return (rank < kept).reshape(shape)
