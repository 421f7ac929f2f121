"""Everything a step carries to the next, as one pytree."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.models.model import Model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
  """The state of a run.

  Attributes:
    step: number of finished updates.
    params: what is trained.
    buffers: what the model carries but no gradient touches.
    opt_state: the optimizer's.
  """

  step: Any
  params: dict[str, Any]
  buffers: dict[str, Any]
  opt_state: Any


def initial_state(model: Model, optimizer: optax.GradientTransformation, seed: jax.Array) -> TrainState:
  """Traced, never run eagerly: `jax.jit` it with the shardings of `abstract_state`."""
  params, buffers = model.init(seed)
  return TrainState(jnp.zeros((), jnp.int32), params, buffers, optimizer.init(params))


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
  """Shapes, number formats and placement of the whole state. What the optimizer keeps per parameter lives with it."""
  replicated = NamedSharding(model.how.mesh, PartitionSpec())

  def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    owner = model.params.get(getattr(path[-1], "key", ""))
    if owner is not None and owner.shape == leaf.shape:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=owner.sharding)
    assert leaf.size <= 1024, f"{path} is large and belongs to no parameter"
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

  opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, model.params))
  step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
  return TrainState(step, model.params, model.buffers, opt_state)
