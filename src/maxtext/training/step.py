"""One update, as a pure function of pytrees."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from maxtext.data.batch import Batch
from maxtext.mesh.explicit import is_explicit
from maxtext.models.decoder import Decoder
from maxtext.models.model import Model, Params
from maxtext.training.state import Shardings, TrainState, update_shardings

Metrics = dict[str, jax.Array]


class Objective(Protocol):
  """A loss as a sum over a batch, and what the sum is divided by."""

  def __call__(self, decoder: Decoder, batch: Any) -> tuple[jax.Array, Metrics]:
    """The sum that is minimised, and sums that are only reported."""
    ...

  def weight(self, batch: Any) -> jax.Array:
    """What all of these are divided by; known before the forward pass."""
    ...


class Gradients(NamedTuple):
  """What a batch says about the parameters."""

  loss: jax.Array
  metrics: Metrics
  grads: Params
  buffers: Params


def make_train_step(
  model: Model,
  objective: Objective,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule | None,
  *,
  updated: Shardings | None = None,
  clip: float = 0.0,
  accumulation: int = 1,
  grad_dtype: jax.typing.DTypeLike = jnp.float32,
  after: Callable[[Params, Params], tuple[Params, Params]] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """Builds step(state, batch) to (state, metrics).

  Args:
    schedule: learning rate by step, for the metric of that name; None reports none.
    updated: where each parameter's gradient is summed and its update computed; None is where it lives.
    clip: largest gradient norm; 0 is no limit. Apart from the optimizer, so that its state does not depend on it.
    accumulation: micro-batches that a batch holds.
    grad_dtype: number format in which gradients are summed and reach the optimizer.
    after: what happens to parameters and buffers, with what layers measured, once the optimizer is done.
  """
  optimizer = optax.with_extra_args_support(optimizer)
  places = updated or update_shardings(model, over_data=False)

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    found = gradients(
      model,
      objective,
      state.params,
      state.buffers,
      batch,
      placed=places,
      accumulation=accumulation,
      grad_dtype=grad_dtype,
    )
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in found.grads.values()))
    factor = jnp.minimum(1.0, clip / (norm + 1e-16)) if clip else 1.0
    grads = {n: (g * factor).astype(g.dtype) for n, g in found.grads.items()}
    params = _placed(state.params, places)
    updates, opt_state = optimizer.update(grads, state.opt_state, params, loss=found.loss, grad_norm=norm)
    before = optax.tree_utils.tree_get(state.opt_state, "skipped_steps")
    metrics = found.metrics | {
      "loss": found.loss,
      "grad_norm": norm,
      **_learning_rate(schedule, state.step if before is None else state.step - before),
      "tokens": objective.weight(batch),
    }
    params, buffers = optax.apply_updates(params, updates), found.buffers
    if before is not None:  # an update that is left out leaves everything as it was, buffers too
      metrics["skipped_steps"] = skipped = optax.tree_utils.tree_get(opt_state, "skipped_steps")
      start = _zeros(model.statistics) | state.buffers
      buffers = {n: jnp.where(skipped == before, b, start[n]) for n, b in buffers.items()}
    if after is not None:
      params, buffers = after(params, buffers)
    buffers = model.end_update(params, buffers)
    return TrainState(state.step + 1, params, buffers, opt_state), metrics

  return train_step


def gradients(
  model: Model,
  objective: Objective,
  params: Params,
  buffers: Params,
  batch: Batch,
  *,
  placed: Shardings | None = None,
  accumulation: int = 1,
  grad_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Gradients:
  """Gradients of the whole batch, one micro-batch at a time, each kept where `placed` says, or where its parameter
  lives; and the buffers after it, with what layers measured over all of it."""
  total, places = objective.weight(batch), placed or update_shardings(model, over_data=False)
  buffers = _zeros(model.statistics) | buffers

  def loss_of(params: Params, buffers: Params, part: Batch) -> tuple[jax.Array, tuple[Metrics, Params]]:
    decoder = model.bind(params | buffers)
    loss, metrics = objective(decoder, part)
    return loss / total, ({n: m / total for n, m in metrics.items()}, model.buffers_of(decoder))

  def one(buffers: Params, part: Batch) -> Gradients:
    (loss, (metrics, buffers)), grads = jax.value_and_grad(loss_of, has_aux=True)(params, buffers, part)
    return Gradients(loss, metrics, _placed({n: g.astype(grad_dtype) for n, g in grads.items()}, places), buffers)

  if accumulation == 1:
    return one(buffers, batch)

  def add(carry: Gradients, part: Batch) -> tuple[Gradients, None]:
    new = one(carry.buffers, part)
    loss, metrics, grads = jax.tree.map(jnp.add, carry[:3], new[:3])
    return Gradients(loss, metrics, grads, new.buffers), None

  # Rows are dealt in turn, so that each device's rows are spread over all micro-batches and none has to move.
  parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, accumulation, *x.shape[1:]), 1, 0), batch)
  shapes = jax.eval_shape(one, buffers, jax.tree.map(lambda x: x[0], parts))
  zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  start = Gradients(zero.loss, zero.metrics, _placed(zero.grads, places), buffers)
  return jax.lax.scan(add, start, parts)[0]


def evaluation_sums(model: Model, objective: Objective, params: Params, buffers: Params, batch: Batch) -> Metrics:
  """The objective's sums over a batch, with `loss` and the `weight` they are divided by."""
  loss, metrics = objective(model.bind(params | buffers), batch)
  return metrics | {"loss": loss, "weight": objective.weight(batch)}


def _learning_rate(schedule: optax.Schedule | None, step: jax.Array) -> Metrics:
  return {} if schedule is None else {"learning_rate": jnp.asarray(schedule(step))}


def _zeros(structs: dict[str, jax.ShapeDtypeStruct]) -> Params:
  return {n: jnp.zeros(s.shape, s.dtype) for n, s in structs.items()}


def _placed(arrays: Params, shardings: Shardings) -> Params:
  if all(s.mesh.size == 1 for s in shardings.values()):
    return arrays
  own = {n: shardings[n] for n in arrays}
  if any(is_explicit(s.mesh) for s in own.values()):
    return jax.tree.map(jax.sharding.reshard, arrays, own)
  return jax.lax.with_sharding_constraint(arrays, own)
