"""One update, as a pure function of pytrees."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import optax

from maxtext.data.batch import Batch
from maxtext.models.decoder import Decoder
from maxtext.models.model import Model, Params
from maxtext.train.state import TrainState

Metrics = dict[str, jax.Array]


class Objective(Protocol):
  """A loss as a sum over a batch, and what the sum is divided by."""

  def __call__(self, decoder: Decoder, batch: Batch) -> jax.Array: ...

  def weight(self, batch: Batch) -> jax.Array: ...


def make_train_step(
  model: Model,
  objective: Objective,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  *,
  accumulation: int = 1,
  grad_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """Builds step(state, batch) to (state, metrics). With accumulation the batch holds that many micro-batches."""

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    loss, grads = gradients(
      model, objective, state.params, state.buffers, batch, accumulation=accumulation, grad_dtype=grad_dtype
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      "loss": loss,
      "grad_norm": optax.tree.norm(grads),
      "learning_rate": jnp.asarray(schedule(state.step)),
      "tokens": objective.weight(batch),
    }
    return TrainState(state.step + 1, params, state.buffers, opt_state), metrics

  return train_step


def gradients(
  model: Model,
  objective: Objective,
  params: Params,
  buffers: Params,
  batch: Batch,
  *,
  accumulation: int = 1,
  grad_dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array, Params]:
  """Loss and gradients of the whole batch, one micro-batch at a time; gradients are placed like the parameters."""
  total = objective.weight(batch)

  def loss_of(params: Params, part: Batch) -> jax.Array:
    return objective(model.bind(params | buffers), part) / total

  def one(part: Batch) -> tuple[jax.Array, Params]:
    loss, grads = jax.value_and_grad(loss_of)(params, part)
    return loss, _like_params({n: g.astype(grad_dtype) for n, g in grads.items()}, model)

  if accumulation == 1:
    return one(batch)

  def add(carry: tuple[jax.Array, Params], part: Batch) -> tuple[tuple[jax.Array, Params], None]:
    return jax.tree.map(jnp.add, carry, one(part)), None

  # Rows are dealt in turn, so that each device's rows are spread over all micro-batches and none has to move.
  parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, accumulation, *x.shape[1:]), 1, 0), batch)
  zeros = _like_params({n: jnp.zeros(p.shape, grad_dtype) for n, p in params.items()}, model)
  return jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), parts)[0]


def _like_params(grads: Params, model: Model) -> Params:
  if model.how.mesh.size == 1:
    return grads
  return jax.lax.with_sharding_constraint(grads, {n: model.abstract[n].sharding for n in grads})
