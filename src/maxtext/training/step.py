"""One update, as a pure function of pytrees."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxtext.mesh.explicit import is_explicit
from maxtext.models.decoder import Decoder
from maxtext.models.model import Model, Params
from maxtext.training.learn_to_init import MappedModel
from maxtext.training.objectives.base import Metrics, Models, Objective, StepContext
from maxtext.training.state import Shardings, TrainState, update_shardings
from maxtext.training.teacher import TEACHER

Frozen = Mapping[str, tuple[Model, Params]]
"""Frozen models with their parameters and buffers, by name."""


class Gradients(NamedTuple):
  """Loss, metrics and gradients of a batch, and the buffers after it."""

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
  post_update: Callable[[Params, Params], tuple[Params, Params]] | None = None,
  frozen: Mapping[str, Model] | None = None,
  seed: int = 0,
) -> Callable[..., tuple[TrainState, Metrics]]:
  """Builds step(state, batch) to (state, metrics); with frozen models it is step(state, batch, their parameters).

  Args:
    schedule: learning rate by step, for the metric of that name; None reports none.
    updated: where each parameter's gradient is summed and its update computed; None is where it lives.
    clip: largest gradient norm; 0 is no limit. Apart from the optimizer, so that its state does not depend on it.
    accumulation: micro-batches that a batch holds.
    grad_dtype: dtype in which gradients are summed and reach the optimizer.
    post_update: applied to parameters and buffers, with what layers measured, once the optimizer is done.
    frozen: the objective's frozen models, by name.
    seed: of the objective's random keys.
  """
  optimizer = optax.with_extra_args_support(optimizer)
  places = updated or update_shardings(model, over_data=False)

  def train_step(state: TrainState, batch: Any, frozen_params: Mapping[str, Params] | None = None) -> Any:
    others = {name: (other, (frozen_params or {})[name]) for name, other in (frozen or {}).items()}
    find = partial(_gradients_of_maps, model) if isinstance(model, MappedModel) else partial(gradients, model)
    found = find(
      objective,
      state.params,
      state.buffers,
      batch,
      placed=places,
      accumulation=accumulation,
      grad_dtype=grad_dtype,
      frozen=others,
      context=partial(StepContext, state.step, seed),
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
      "tokens": objective.tokens(batch),
    }
    params, buffers = optax.apply_updates(params, updates), found.buffers
    if before is not None:  # an update that is left out leaves everything as it was, buffers too
      metrics["skipped_steps"] = skipped = optax.tree_utils.tree_get(opt_state, "skipped_steps")
      start = _zeros(model.statistics) | state.buffers
      buffers = {n: jnp.where(skipped == before, b, start[n]) for n, b in buffers.items()}
    if isinstance(model, MappedModel):
      buffers = buffers | model.weights(params, others[TEACHER][1])
    if post_update is not None:
      params, buffers = post_update(params, buffers)
    buffers = model.end_update(params, buffers)
    if before is not None:
      buffers = {n: jnp.where(skipped == before, b, state.buffers[n]) for n, b in buffers.items()}
    return TrainState(state.step + 1, params, buffers, opt_state), metrics

  return train_step


def gradients(
  model: Model,
  objective: Objective,
  params: Params,
  buffers: Params,
  batch: Any,
  *,
  placed: Shardings | None = None,
  accumulation: int = 1,
  grad_dtype: jax.typing.DTypeLike = jnp.float32,
  frozen: Frozen | None = None,
  context: Callable[[jax.typing.ArrayLike], StepContext] | None = None,
) -> Gradients:
  """Gradients of the whole batch, one micro-batch at a time, each sharded as `placed` says, or as its parameter; and
  the buffers after it, with what layers measured over all of it. `context` makes the objective's context from the
  number of a micro-batch."""
  context = context or partial(StepContext, 0, 0)
  total, places = objective.weight(batch), placed or update_shardings(model, over_data=False)
  buffers = _zeros(model.statistics) | buffers

  def loss_of(params: Params, buffers: Params, part: Any, here: StepContext) -> tuple[jax.Array, Any]:
    decoder = model.bind(params | buffers)
    if decoder.has_dropout:
      decoder.dropout_key = nnx.Variable(here.key("dropout"))
    loss, metrics = objective(_models(decoder, frozen), part, here)
    means = {n: m if n in objective.maxima else m / total for n, m in metrics.items()}
    return loss / total, (means, model.buffers_of(decoder))

  def one(buffers: Params, part: Any, here: StepContext) -> Gradients:
    loss_here = jax.value_and_grad(partial(loss_of, here=here), has_aux=True)
    (loss, (metrics, buffers)), grads = loss_here(params, buffers, part)
    return Gradients(loss, metrics, _placed({n: g.astype(grad_dtype) for n, g in grads.items()}, places), buffers)

  if accumulation == 1:
    return one(buffers, batch, context(0))

  def add(carry: Gradients, numbered: tuple[Any, jax.Array | None]) -> tuple[Gradients, None]:
    part, number = numbered
    new = one(carry.buffers, part, context(0 if number is None else number))
    metrics = {
      n: jnp.maximum(m, new.metrics[n]) if n in objective.maxima else m + new.metrics[n]
      for n, m in carry.metrics.items()
    }
    grads = jax.tree.map(jnp.add, carry.grads, new.grads)
    return Gradients(carry.loss + new.loss, metrics, grads, new.buffers), None

  # Rows are dealt in turn, so that each device's rows are spread over all micro-batches and none has to move.
  parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, accumulation, *x.shape[1:]), 1, 0), batch)
  first = context(0)
  shapes = jax.eval_shape(partial(one, here=first), buffers, jax.tree.map(lambda x: x[0], parts))
  zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  start = Gradients(zero.loss, zero.metrics, _placed(zero.grads, places), buffers)
  numbers = jnp.arange(accumulation, dtype=jnp.uint32) if first.uses_key else None
  return jax.lax.scan(add, start, (parts, numbers))[0]


def _gradients_of_maps(
  model: MappedModel,
  objective: Objective,
  maps: Params,
  buffers: Params,
  batch: Any,
  *,
  placed: Shardings,
  grad_dtype: jax.typing.DTypeLike,
  frozen: Frozen,
  **options: Any,
) -> Gradients:
  """As `gradients`, of maps: those of the weights, summed over all micro-batches, go back through the maps once."""
  weights, pull_back = jax.vjp(partial(model.weights, teacher=frozen[TEACHER][1]), maps)
  own = {name: buffers[name] for name in model.student.buffers}
  found = gradients(model.student, objective, weights, own, batch, grad_dtype=grad_dtype, frozen=frozen, **options)
  (grads,) = pull_back({name: found.grads[name].astype(weight.dtype) for name, weight in weights.items()})
  grads = _placed({name: grad.astype(grad_dtype) for name, grad in grads.items()}, placed)
  return found._replace(grads=grads, buffers=buffers | found.buffers)


def evaluation_sums(
  model: Model,
  objective: Objective,
  params: Params,
  buffers: Params,
  batch: Any,
  *,
  frozen: Frozen | None = None,
  context: StepContext | None = None,
) -> Metrics:
  """The objective's sums over a batch, with `loss` and the `weight` they are divided by."""
  models = _models(model.bind(params | buffers), frozen)
  loss, metrics = objective(models, batch, context or StepContext())
  return metrics | {"loss": loss, "weight": objective.weight(batch)}


def _models(decoder: Decoder, frozen: Frozen | None) -> Models:
  return Models(decoder, {name: model.bind(params) for name, (model, params) in (frozen or {}).items()})


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
