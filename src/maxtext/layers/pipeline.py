"""Pipeline parallelism: layers assigned to stages, and a batch sent through them in micro-batches.

Every stage is a slice of arrays whose first dimension is split over the mesh axis `stage`; all stages run at once, each
on another micro-batch, and send their results to the next by shifting that dimension. A circular pipeline has more
layers than the stages run at once, and micro-batches pass through all stages several times (circular repeats).

Shapes: P stages, M micro-batches, R repeats of a cycle of layers, L of them that a stage runs per iteration, N circular
repeats, T iterations, B rows of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.layers.param_factory import Combine
from maxtext.mesh.rules import mesh_axes_of

AXIS = "stage"
_FSDP = ("fsdp", "fsdp_transpose")


@dataclass(frozen=True)
class Pipeline:
  """How the layers of a stack are assigned to stages.

  Attributes:
    microbatches: number of micro-batches, at least as many as keep every stage busy.
    per_visit: repeats of the cycle that a stage runs per iteration.
    repeats: how many repeats of the stack, from the first on, are pipelined; the others run after the pipeline.
    delay: iterations from a result to its use. With 2, results are sent while the next ones are computed.
    gather_once: weights are gathered over FSDP before the first iteration, and not in each.
  """

  stages: int
  microbatches: int
  per_visit: int
  repeats: int
  delay: int = 1
  gather_once: bool = False

  @property
  def visits(self) -> int:
    """Circular repeats: how often a micro-batch passes through all stages."""
    return self.repeats // (self.stages * self.per_visit)


def pipelined(
  pipeline: Pipeline,
  mesh: Mesh,
  run: Callable[..., tuple[jax.Array, Any, list[jax.Array]]],
  x: jax.Array,
  context: Any,
  layers: Any,
  ready: Callable[[Any], Any] = lambda layers: layers,
  buffers: Sequence[tuple[jax.Array, Combine]] = (),
) -> tuple[jax.Array, Any, list[jax.Array]]:
  """Runs x [M*B,...] through all layers.

  Args:
    run: (x, context, layers [L,...]) to (x, auxiliary outputs [L,...], buffers [L,...]), for one micro-batch.
    context: a pytree of arrays [M*B,...].
    layers: a pytree of arrays [R,...].
    ready: applied to the layers [P,N,L,...] before the first iteration.
    buffers: that `run` assigns to: their old values [R,...], from which every micro-batch starts, and how the new
      values are combined.

  Returns:
    The output [M*B,...], auxiliary outputs [R,...] as means over the micro-batches, and the new values of the buffers.
  """
  P, M, delay = pipeline.stages, pipeline.microbatches, pipeline.delay
  stage = jnp.arange(P)
  own = ready(jax.tree.map(lambda w: _constrain(_assign(pipeline, w), mesh), layers))
  contexts = jax.tree.map(lambda a: _micro(pipeline, a), context)
  every_stage = jax.vmap(run, spmd_axis_name=AXIS)

  # Activations of micro-batches wait at the first stage for their next circular repeat; other stages' rows are zeros.
  waiting = _constrain(jnp.where(_column(stage == 0, x.ndim + 2), _micro(pipeline, x)[None], 0), mesh)
  nothing = _constrain(jnp.zeros((P, x.shape[0] // M, *x.shape[1:]), x.dtype), mesh)
  carry = (waiting, [nothing] * delay)

  def returned(waiting: jax.Array, arrived: jax.Array, iteration: jax.Array) -> jax.Array:
    """Stores what the last stage sent to the first."""
    number = (iteration - delay * P) % M
    new = jax.lax.dynamic_update_index_in_dim(waiting, arrived, number, axis=1)
    return jnp.where(_column((stage == 0) & (iteration >= delay * P), waiting.ndim), new, waiting)

  def one(carry: tuple[jax.Array, list[jax.Array]], iteration: jax.Array) -> tuple[Any, Any]:
    waiting, (arrived, *later) = carry
    waiting = returned(waiting, arrived, iteration)
    number = iteration - delay * stage
    micro, repeat = number % M, jnp.clip(number // M, 0, pipeline.visits - 1)
    x = jnp.where(_column(stage == 0, arrived.ndim), _index_each(waiting, micro), arrived)
    here = jax.tree.map(lambda a: jnp.take(a, micro, axis=0), contexts)
    y, aux, assigned = every_stage(_constrain(x, mesh), here, jax.tree.map(lambda w: _index_each(w, repeat), own))
    busy = (number >= 0) & (number < M * pipeline.visits)
    aux = jax.tree.map(lambda a: jnp.where(_column(busy, a.ndim), a, 0), aux)
    in_flight = [*later, _constrain(y, mesh)]
    in_flight[0] = jnp.roll(in_flight[0], 1, axis=0)
    return (waiting, in_flight), (repeat, aux, assigned)

  iterations = M * pipeline.visits + delay * (P - 1)
  (waiting, in_flight), (circular_repeats, aux, assigned) = jax.lax.scan(one, carry, jnp.arange(iterations))
  for late, arrived in enumerate(in_flight):
    waiting = returned(waiting, arrived if late == 0 else jnp.roll(arrived, 1, axis=0), jnp.asarray(iterations + late))
  means = jax.tree.map(lambda a: _by_layer(pipeline, circular_repeats, a) / M, aux)
  found = [
    _combined(pipeline, combine, circular_repeats, before, after)
    for (before, combine), after in zip(buffers, assigned, strict=True)
  ]
  return jnp.moveaxis(waiting[0], 0, 1).reshape(x.shape), means, found


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(mesh: Mesh, home: PartitionSpec, w: jax.Array) -> jax.Array:
  """A weight [P,N,L,...] gathered over FSDP; `home` is its partition without P, N and L. The gradient is sharded:
  otherwise all of it would be summed, and stored, on every device."""
  whole = (tuple(axis for axis in mesh_axes_of(part) if axis not in _FSDP) or None for part in home)
  return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec(AXIS, None, None, *whole)))


def _gathered_forward(mesh: Mesh, home: PartitionSpec, w: jax.Array) -> tuple[jax.Array, None]:
  return gathered(mesh, home, w), None


def _gathered_backward(mesh: Mesh, home: PartitionSpec, saved: None, grad: jax.Array) -> tuple[jax.Array]:
  return (jax.lax.with_sharding_constraint(grad, NamedSharding(mesh, PartitionSpec(AXIS, None, None, *home))),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def _micro(pipeline: Pipeline, x: jax.Array) -> jax.Array:
  """Splits rows into micro-batches in a round-robin, so that all of them have rows of every device and none is sent."""
  return jnp.moveaxis(x.reshape(-1, pipeline.microbatches, *x.shape[1:]), 1, 0)


def _assign(pipeline: Pipeline, w: jax.Array) -> jax.Array:
  """[R,...] to [P,N,L,...]: consecutive layers in a stage, consecutive stages, then the next circular repeat."""
  circular_repeats = w.reshape(pipeline.visits, pipeline.stages, pipeline.per_visit, *w.shape[1:])
  return jnp.moveaxis(circular_repeats, 1, 0)


def _by_layer(pipeline: Pipeline, circular_repeats: jax.Array, aux: jax.Array) -> jax.Array:
  """Sums the outputs of iterations [T,P,L,...], at circular repeats [T,P], for each layer: [R,...]."""
  member = jax.nn.one_hot(circular_repeats, pipeline.visits, dtype=aux.dtype)
  summed = jnp.einsum("tpn,tp...->np...", member, aux)
  return summed.reshape(pipeline.repeats, *aux.shape[3:])


def _combined(
  pipeline: Pipeline, combine: Combine, circular_repeats: jax.Array, before: jax.Array, after: jax.Array
) -> jax.Array:
  """The new value of a buffer [R,...], from those that iterations assigned [T,P,L,...], at circular repeats [T,P]."""
  number = jnp.arange(circular_repeats.shape[0])[:, None] - pipeline.delay * jnp.arange(pipeline.stages)
  busy = (number >= 0) & (number < pipeline.microbatches * pipeline.visits)
  member = busy[:, :, None] & (circular_repeats[:, :, None] == jnp.arange(pipeline.visits))  # [T,P,N]
  member, after = member.reshape(*member.shape, *(1,) * (after.ndim - 2)), after[:, :, None]
  start = _assign(pipeline, before)  # [P,N,L,...]
  if combine == "sum":
    found = start + jnp.where(member, after - start, 0).sum(0)
  elif combine == "mean":
    found = jnp.where(member, after, 0).sum(0) / pipeline.microbatches
  else:
    found = jnp.where(member, after, _least(after.dtype)).max(0)
  return jnp.moveaxis(found, 0, 1).reshape(before.shape).astype(before.dtype)


def _least(dtype: Any) -> Any:
  return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _index_each(x: jax.Array, index: jax.Array) -> jax.Array:
  """[P,N,...] at an index of each stage: [P,...]."""
  return jax.vmap(lambda a, i: jax.lax.dynamic_index_in_dim(a, i, keepdims=False))(x, index)


def _column(x: jax.Array, ndim: int) -> jax.Array:
  return x.reshape(-1, *(1,) * (ndim - 1))


def _constrain(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Sharded over stages; the sharding of other dimensions is unconstrained."""
  spec = PartitionSpec(AXIS, *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
