"""Pipeline parallelism: layers assigned to stages, and a batch sent through them in micro-batches.

Every stage is a slice of arrays whose first dimension is split over the mesh axis `stage`; all stages run at once, each
on another micro-batch, and hand their results to the next by shifting that dimension. Where there are more layers than
the stages take at once, micro-batches go round again.

Shapes: P stages, M micro-batches, R repeats of a cycle of layers, L of them in one visit to a stage, N visits,
B rows of a micro-batch.
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
  """How a stack is dealt to stages.

  Attributes:
    microbatches: parts of a batch; at least as many as keep every stage busy.
    per_visit: repeats of the cycle that a stage runs at a visit.
    repeats: of a stack that go through the stages, from the first on; those after them run as without stages.
    delay: ticks from a result to its use. With 2, results travel while the next are computed.
    gather_once: weights are gathered over FSDP before the first tick, and not at each.
  """

  stages: int
  microbatches: int
  per_visit: int
  repeats: int
  delay: int = 1
  gather_once: bool = False

  @property
  def visits(self) -> int:
    """How often a micro-batch goes round the stages."""
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
  """x [M*B,...] through all layers, to the same, what they leave, as means over the micro-batches, and their buffers.

  Args:
    run: (x, context, layers [L,...]) to (x, what each of them leaves [L,...], their buffers [L,...]), for one
      micro-batch.
    context: a pytree of arrays [M*B,...].
    layers: a pytree of arrays [R,...].
    ready: what is done to them [P,N,L,...] before the first tick.
    buffers: that `run` assigns to: [R,...] before, as every micro-batch finds them, and how its values are combined.
  """
  P, M, delay = pipeline.stages, pipeline.microbatches, pipeline.delay
  stage = jnp.arange(P)
  own = ready(jax.tree.map(lambda w: _placed(_dealt(pipeline, w), mesh), layers))
  contexts = jax.tree.map(lambda a: _micro(pipeline, a), context)
  every_stage = jax.vmap(run, spmd_axis_name=AXIS)

  # What a micro-batch is before its next visit waits at the first stage; the other stages' rows stay empty.
  waiting = _placed(jnp.where(_column(stage == 0, x.ndim + 2), _micro(pipeline, x)[None], 0), mesh)
  nothing = _placed(jnp.zeros((P, x.shape[0] // M, *x.shape[1:]), x.dtype), mesh)
  carry = (waiting, [nothing] * delay)

  def returned(waiting: jax.Array, arrived: jax.Array, tick: jax.Array) -> jax.Array:
    """Keeps what the last stage sent to the first."""
    number = (tick - delay * P) % M
    new = jax.lax.dynamic_update_index_in_dim(waiting, arrived, number, axis=1)
    return jnp.where(_column((stage == 0) & (tick >= delay * P), waiting.ndim), new, waiting)

  def one(carry: tuple[jax.Array, list[jax.Array]], tick: jax.Array) -> tuple[Any, Any]:
    waiting, (arrived, *later) = carry
    waiting = returned(waiting, arrived, tick)
    number = tick - delay * stage
    micro, visit = number % M, jnp.clip(number // M, 0, pipeline.visits - 1)
    x = jnp.where(_column(stage == 0, arrived.ndim), _chosen(waiting, micro), arrived)
    here = jax.tree.map(lambda a: jnp.take(a, micro, axis=0), contexts)
    y, left, assigned = every_stage(_placed(x, mesh), here, jax.tree.map(lambda w: _chosen(w, visit), own))
    busy = (number >= 0) & (number < M * pipeline.visits)
    left = jax.tree.map(lambda a: jnp.where(_column(busy, a.ndim), a, 0), left)
    reshard = [*later, _placed(y, mesh)]
    reshard[0] = jnp.roll(reshard[0], 1, axis=0)
    return (waiting, reshard), (visit, left, assigned)

  ticks = M * pipeline.visits + delay * (P - 1)
  (waiting, reshard), (visits, left, assigned) = jax.lax.scan(one, carry, jnp.arange(ticks))
  for late, arrived in enumerate(reshard):
    waiting = returned(waiting, arrived if late == 0 else jnp.roll(arrived, 1, axis=0), jnp.asarray(ticks + late))
  means = jax.tree.map(lambda a: _by_layer(pipeline, visits, a) / M, left)
  found = [
    _combined(pipeline, combine, visits, before, after)
    for (before, combine), after in zip(buffers, assigned, strict=True)
  ]
  return jnp.moveaxis(waiting[0], 0, 1).reshape(x.shape), means, found


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(mesh: Mesh, home: PartitionSpec, w: jax.Array) -> jax.Array:
  """A weight [P,N,L,...] whole over FSDP; `home` says how it is split but for P, N and L. Its gradient is split: else
  all of it would be summed, and kept, on every device."""
  whole = (tuple(axis for axis in mesh_axes_of(part) if axis not in _FSDP) or None for part in home)
  return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec(AXIS, None, None, *whole)))


def _gathered_forward(mesh: Mesh, home: PartitionSpec, w: jax.Array) -> tuple[jax.Array, None]:
  return gathered(mesh, home, w), None


def _gathered_backward(mesh: Mesh, home: PartitionSpec, kept: None, grad: jax.Array) -> tuple[jax.Array]:
  return (jax.lax.with_sharding_constraint(grad, NamedSharding(mesh, PartitionSpec(AXIS, None, None, *home))),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def _micro(pipeline: Pipeline, x: jax.Array) -> jax.Array:
  """Rows are dealt in turn, so that each device's rows are spread over all micro-batches and none has to move."""
  return jnp.moveaxis(x.reshape(-1, pipeline.microbatches, *x.shape[1:]), 1, 0)


def _dealt(pipeline: Pipeline, w: jax.Array) -> jax.Array:
  """[R,...] to [P,N,L,...]: consecutive layers at a visit, consecutive stages, then the next visit."""
  visits = w.reshape(pipeline.visits, pipeline.stages, pipeline.per_visit, *w.shape[1:])
  return jnp.moveaxis(visits, 1, 0)


def _by_layer(pipeline: Pipeline, visits: jax.Array, left: jax.Array) -> jax.Array:
  """What was left at each tick [T,P,L,...], at the visits [T,P], summed for each layer: [R,...]."""
  member = jax.nn.one_hot(visits, pipeline.visits, dtype=left.dtype)
  summed = jnp.einsum("tpn,tp...->np...", member, left)
  return summed.reshape(pipeline.repeats, *left.shape[3:])


def _combined(
  pipeline: Pipeline, combine: Combine, visits: jax.Array, before: jax.Array, after: jax.Array
) -> jax.Array:
  """A buffer [R,...] after all micro-batches, from what each tick [T,P] left of it [T,P,L,...]."""
  number = jnp.arange(visits.shape[0])[:, None] - pipeline.delay * jnp.arange(pipeline.stages)
  busy = (number >= 0) & (number < pipeline.microbatches * pipeline.visits)
  member = busy[:, :, None] & (visits[:, :, None] == jnp.arange(pipeline.visits))  # [T,P,N]
  member, after = member.reshape(*member.shape, *(1,) * (after.ndim - 2)), after[:, :, None]
  start = _dealt(pipeline, before)  # [P,N,L,...]
  if combine == "sum":
    found = start + jnp.where(member, after - start, 0).sum(0)
  elif combine == "mean":
    found = jnp.where(member, after, 0).sum(0) / pipeline.microbatches
  else:
    found = jnp.where(member, after, _least(after.dtype)).max(0)
  return jnp.moveaxis(found, 0, 1).reshape(before.shape).astype(before.dtype)


def _least(dtype: Any) -> Any:
  return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _chosen(x: jax.Array, index: jax.Array) -> jax.Array:
  """[P,N,...] at an index of each stage: [P,...]."""
  return jax.vmap(lambda a, i: jax.lax.dynamic_index_in_dim(a, i, keepdims=False))(x, index)


def _column(x: jax.Array, ndim: int) -> jax.Array:
  return x.reshape(-1, *(1,) * (ndim - 1))


def _placed(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Split over stages; how the rest is placed is left as it is."""
  spec = PartitionSpec(AXIS, *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
