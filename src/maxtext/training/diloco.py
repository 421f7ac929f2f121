"""DiLoCo: replicas that train separately and synchronise every few steps (Douillard et al., 2023).

A replica is a slice of arrays whose first dimension is split over the mesh axis `diloco`; nothing crosses that axis
between outer steps. In an outer step the mean change of the replicas is a gradient for the outer optimizer (SGD with
Nesterov momentum), and all replicas start again from its parameters and from the mean of their buffers. Those are the
parameters of the run: they are evaluated, saved and returned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.training.state import TrainState

AXIS = "diloco"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DilocoState:
  """Takes the place of the optimizer state: parameters, buffers and inner optimizer state of each replica [D,...], and
  the outer optimizer state."""

  params: Any
  buffers: Any
  opt_state: Any
  outer: Any


def broadcast_params(state: TrainState) -> TrainState:
  """Sets every replica to the run's parameters, when those were loaded."""
  replicas: DilocoState = state.opt_state
  params, buffers = (
    jax.tree.map(lambda new, old: jnp.broadcast_to(new, old.shape), *pair)
    for pair in ((state.params, replicas.params), (state.buffers, replicas.buffers))
  )
  opt_state = DilocoState(params, buffers, replicas.opt_state, replicas.outer)
  return TrainState(state.step, state.params, state.buffers, opt_state)


@dataclass(frozen=True)
class Diloco:
  """Wraps a train step."""

  replicas: int
  period: int
  learning_rate: float
  momentum: float

  def initial(self, state: TrainState) -> TrainState:
    """The first state, of the first state of one replica."""

    def every(x: jax.Array) -> jax.Array:
      return jnp.broadcast_to(x, (self.replicas, *x.shape))

    params, buffers, opt_state = jax.tree.map(every, (state.params, state.buffers, state.opt_state))
    diloco_state = DilocoState(params, buffers, opt_state, self._outer.init(state.params))
    return TrainState(state.step, state.params, state.buffers, diloco_state)

  def abstract(self, state: TrainState) -> TrainState:
    """The same of shapes, each replica where its part of the mesh is."""

    def replicated(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      assert isinstance(leaf.sharding, NamedSharding)
      sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(AXIS, *leaf.sharding.spec))
      return jax.ShapeDtypeStruct((self.replicas, *leaf.shape), leaf.dtype, sharding=sharding)

    def place_outer(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      owner = state.params.get(getattr(path[-1], "key", ""), state.step)
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=owner.sharding)

    outer = jax.tree_util.tree_map_with_path(place_outer, jax.eval_shape(self._outer.init, state.params))
    params, buffers, opt_state = jax.tree.map(replicated, (state.params, state.buffers, state.opt_state))
    return TrainState(state.step, state.params, state.buffers, DilocoState(params, buffers, opt_state, outer))

  def step(self, one: Callable[..., tuple[TrainState, dict[str, jax.Array]]]) -> Callable[..., Any]:
    """step(state, batch, frozen parameters) of all replicas, from that of one."""
    axes = TrainState(None, 0, 0, 0)  # type: ignore[arg-type]
    every = jax.vmap(one, in_axes=(axes, 0, None), out_axes=(axes, 0), spmd_axis_name=AXIS)

    def train_step(state: TrainState, batch: Any, frozen: Any) -> tuple[TrainState, dict[str, jax.Array]]:
      replicas: DilocoState = state.opt_state
      parts = jax.tree.map(lambda x: x.reshape(self.replicas, -1, *x.shape[1:]), batch)
      reshard, metrics = every(
        TrainState(state.step, replicas.params, replicas.buffers, replicas.opt_state), parts, frozen
      )
      synchronise = reshard.step % self.period == 0
      ours = state.params, state.buffers
      (params, buffers), outer = jax.lax.cond(
        synchronise,
        self._outer_step,
        lambda ours, outer, *_: (ours, outer),
        ours,
        replicas.outer,
        reshard.params,
        reshard.buffers,
      )
      own, own_buffers = jax.tree.map(
        lambda new, own: jnp.where(synchronise, new[None], own), (params, buffers), (reshard.params, reshard.buffers)
      )
      diloco_state = DilocoState(own, own_buffers, reshard.opt_state, outer)
      totals = {name: m.sum(0) if name == "tokens" else m.mean(0) for name, m in metrics.items()}
      return TrainState(reshard.step, params, buffers, diloco_state), totals

    return train_step

  @property
  def _outer(self) -> optax.GradientTransformation:
    return optax.sgd(self.learning_rate, self.momentum, nesterov=True)

  def _outer_step(self, ours: tuple[Any, Any], outer: Any, reshard: Any, buffers: Any) -> tuple[tuple[Any, Any], Any]:
    """The outer optimizer's update of the parameters that the replicas started from, and the buffers they agree on."""
    params, _ = ours
    back = jax.tree.map(lambda old, new: old - new.mean(0), params, reshard)
    updates, outer = self._outer.update(back, outer, params)
    return (optax.apply_updates(params, updates), jax.tree.map(_mean_buffer, buffers)), outer


def _mean_buffer(buffer: jax.Array) -> jax.Array:
  """The mean over the replicas [D,...], but to the bit what they have in common: parameters that are not trained."""
  return jnp.where((buffer == buffer[:1]).all(0), buffer[0], buffer.mean(0).astype(buffer.dtype))
