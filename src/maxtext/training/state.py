"""Everything a step carries to the next, as one pytree, and where it lives."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.models.model import Model

Shardings = dict[str, NamedSharding]


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


def abstract_state(
  model: Model,
  optimizer: optax.GradientTransformation,
  updated: Shardings,
  params_on_host: bool = False,
  optimizer_on_host: bool = False,
) -> TrainState:
  """Shapes, dtypes and placement of the whole state between steps. Optimizer state of a parameter lives where the
  parameter is updated; either may rest in the host's memory."""
  replicated = NamedSharding(model.execution.sharding.mesh, PartitionSpec())

  def rest(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, on_host: bool) -> jax.ShapeDtypeStruct:
    sharding = sharding.with_memory_kind("pinned_host") if on_host else sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    name = getattr(path[-1], "key", "")
    owner = model.params.get(name)
    if owner is not None and owner.shape == leaf.shape:
      return rest(leaf, updated[name], optimizer_on_host)
    assert leaf.size <= 2**20, f"{path} is large and belongs to no parameter"
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

  opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, model.params))
  step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
  params = {name: rest(p, p.sharding, params_on_host) for name, p in model.params.items()}
  return TrainState(step, params, model.buffers, opt_state)


def on_devices(tree: Any, resting: Any) -> Any:
  """Brings what rests in the host's memory to the devices; `resting` has the same tree with the shardings."""
  return jax.tree.map(
    lambda a, s: jax.device_put(a, s.with_memory_kind("device")) if s.memory_kind == "pinned_host" else a, tree, resting
  )


def update_shardings(model: Model, over_data: bool) -> Shardings:
  """Where each parameter is updated: where it lives, or split once more over the data axis, so that the replicas share
  the optimizer's state and its work."""
  return {n: _split_over_data(p.sharding, p.shape) if over_data else p.sharding for n, p in model.params.items()}


def _split_over_data(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
  """Splits the first dimension that can be; a small parameter may stay whole."""
  mesh, spec = sharding.mesh, [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
  local = sharding.shard_shape(shape)
  for i, (size, axes) in enumerate(zip(local, spec, strict=True)):
    if size % mesh.shape["data"] == 0:
      spec[i] = (*((axes,) if isinstance(axes, str) else axes or ()), "data")
      return NamedSharding(mesh, PartitionSpec(*spec))
  return sharding


def bytes_per_device(tree: Any) -> int:
  """Bytes of a tree of sharded shapes on one device."""
  return sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def total_bytes(tree: Any) -> int:
  """Bytes of a tree of shapes, each counted once, however many devices have it."""
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
