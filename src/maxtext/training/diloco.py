"""DiLoCo: replicas that train apart and meet now and then (Douillard et al., 2023).

A replica is a slice of arrays whose first dimension is split over the mesh axis `diloco`; nothing crosses that axis
between meetings. At a meeting the mean of what the replicas moved by is a gradient for an outer optimizer, Nesterov's,
and all start again from its parameters, and from the mean of their buffers. Those are the run's: what is evaluated,
saved and handed on.
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
class Apart:
  """What stands in the place of the optimizer's state: of each replica [D,...], and of the outer optimizer."""

  params: Any
  buffers: Any
  opt_state: Any
  outer: Any


def together(state: TrainState) -> TrainState:
  """Every replica at the run's own parameters, when those came from elsewhere."""
  apart: Apart = state.opt_state
  params, buffers = (
    jax.tree.map(lambda new, old: jnp.broadcast_to(new, old.shape), *pair)
    for pair in ((state.params, apart.params), (state.buffers, apart.buffers))
  )
  return TrainState(state.step, state.params, state.buffers, Apart(params, buffers, apart.opt_state, apart.outer))


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
    apart = Apart(params, buffers, opt_state, self._outer.init(state.params))
    return TrainState(state.step, state.params, state.buffers, apart)

  def abstract(self, state: TrainState) -> TrainState:
    """The same of shapes, each replica where its part of the mesh is."""

    def replicated(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      assert isinstance(leaf.sharding, NamedSharding)
      sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(AXIS, *leaf.sharding.spec))
      return jax.ShapeDtypeStruct((self.replicas, *leaf.shape), leaf.dtype, sharding=sharding)

    def beside(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      owner = state.params.get(getattr(path[-1], "key", ""), state.step)
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=owner.sharding)

    outer = jax.tree_util.tree_map_with_path(beside, jax.eval_shape(self._outer.init, state.params))
    params, buffers, opt_state = jax.tree.map(replicated, (state.params, state.buffers, state.opt_state))
    return TrainState(state.step, state.params, state.buffers, Apart(params, buffers, opt_state, outer))

  def step(self, one: Callable[..., tuple[TrainState, dict[str, jax.Array]]]) -> Callable[..., Any]:
    """step(state, batch, frozen parameters) of all replicas, from that of one."""
    axes = TrainState(None, 0, 0, 0)  # type: ignore[arg-type]
    every = jax.vmap(one, in_axes=(axes, 0, None), out_axes=(axes, 0), spmd_axis_name=AXIS)

    def train_step(state: TrainState, batch: Any, frozen: Any) -> tuple[TrainState, dict[str, jax.Array]]:
      apart: Apart = state.opt_state
      parts = jax.tree.map(lambda x: x.reshape(self.replicas, -1, *x.shape[1:]), batch)
      moved, metrics = every(TrainState(state.step, apart.params, apart.buffers, apart.opt_state), parts, frozen)
      together = moved.step % self.period == 0
      ours = state.params, state.buffers
      (params, buffers), outer = jax.lax.cond(
        together, self._met, lambda ours, outer, *_: (ours, outer), ours, apart.outer, moved.params, moved.buffers
      )
      own, own_buffers = jax.tree.map(
        lambda new, own: jnp.where(together, new[None], own), (params, buffers), (moved.params, moved.buffers)
      )
      kept = Apart(own, own_buffers, moved.opt_state, outer)
      figures = {name: m.sum(0) if name == "tokens" else m.mean(0) for name, m in metrics.items()}
      return TrainState(moved.step, params, buffers, kept), figures

    return train_step

  @property
  def _outer(self) -> optax.GradientTransformation:
    return optax.sgd(self.learning_rate, self.momentum, nesterov=True)

  def _met(self, ours: tuple[Any, Any], outer: Any, moved: Any, buffers: Any) -> tuple[tuple[Any, Any], Any]:
    """The outer optimizer's update of the parameters that the replicas started from, and the buffers they agree on."""
    params, _ = ours
    back = jax.tree.map(lambda old, new: old - new.mean(0), params, moved)
    updates, outer = self._outer.update(back, outer, params)
    return (optax.apply_updates(params, updates), jax.tree.map(_agreed, buffers)), outer


def _agreed(buffer: jax.Array) -> jax.Array:
  """The mean over the replicas [D,...], but to the bit what they have in common: parameters that are not trained."""
  return jnp.where((buffer == buffer[:1]).all(0), buffer[0], buffer.mean(0).astype(buffer.dtype))
