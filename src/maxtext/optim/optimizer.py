"""The update rule of a run."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxtext.configs.types import OptimizerType
from maxtext.optim.options import AdamOptions, OptimizerOptions
from maxtext.optim.schedules import learning_rate
from maxtext.optim.spikes import skip_spikes

Matrices = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def make_optimizer(options: OptimizerOptions, matrices: Matrices) -> optax.GradientTransformation:
  """The optimizer of a run; clipping is the step's.

  Args:
    options: which, and its numbers.
    matrices: for each weight that is a matrix in some of its dimensions, those summed over and those that appear.
  """
  optimizer = _OPTIMIZERS[options.kind](options, matrices)
  spikes = options.spikes
  return optimizer if spikes is None else skip_spikes(optimizer, spikes.interval, spikes.deviations)


def _adamw(o: OptimizerOptions, _: Matrices) -> optax.GradientTransformation:
  return optax.adamw(
    learning_rate(o.schedule),
    b1=o.adam.b1,
    b2=o.adam.b2,
    eps=o.adam.eps,
    eps_root=o.adam.eps_root,
    weight_decay=o.adam.weight_decay,
    mu_dtype=o.moment_dtype,
    mask=_decayed(o),
  )


def _adam_pax(o: OptimizerOptions, _: Matrices) -> optax.GradientTransformation:
  return optax.chain(
    _corrected_moments(o.adam, o.moment_dtype),
    optax.add_decayed_weights(o.adam.weight_decay, _decayed(o)),
    optax.scale_by_learning_rate(learning_rate(o.schedule)),
  )


def _sgd(o: OptimizerOptions, _: Matrices) -> optax.GradientTransformation:
  return optax.sgd(learning_rate(o.schedule))


def _muon(o: OptimizerOptions, matrices: Matrices) -> optax.GradientTransformation:
  """Muon on the layers' matrices, each layer on its own; AdamW with Nesterov momentum on embedding, head and norms."""
  from optax.contrib import MuonDimensionNumbers, muon

  def dimensions(params: dict[str, Any]) -> dict[str, Any]:
    return {path: MuonDimensionNumbers(*matrices[path]) if path in matrices else None for path in params}

  return muon(
    learning_rate(o.schedule),
    beta=o.muon.beta,
    eps=o.adam.eps,
    weight_decay=o.muon.weight_decay,
    weight_decay_mask=_decayed(o),
    mu_dtype=o.moment_dtype,
    adam_b1=o.adam.b1,
    adam_b2=o.adam.b2,
    adam_eps_root=o.adam.eps_root,
    adam_weight_decay=o.adam.weight_decay,
    muon_weight_dimension_numbers=dimensions,
    consistent_rms=o.muon.consistent_rms,
  )


_OPTIMIZERS: Mapping[OptimizerType, Callable[[OptimizerOptions, Matrices], optax.GradientTransformation]] = {
  OptimizerType.ADAMW: _adamw,
  OptimizerType.ADAM_PAX: _adam_pax,
  OptimizerType.SGD: _sgd,
  OptimizerType.MUON: _muon,
}


def _decayed(options: OptimizerOptions) -> Callable[[dict[str, Any]], dict[str, bool]]:
  patterns = [re.compile(pattern) for pattern in options.undecayed]
  return lambda params: {path: not any(p.search(path) for p in patterns) for path in params}


class _Moments(NamedTuple):
  steps: jax.Array
  mu: Any
  nu: Any


def _corrected_moments(adam: AdamOptions, mu_dtype: str) -> optax.GradientTransformation:
  """Adam whose stored moments need no correction: the decay itself starts at 0 and grows to b1 and b2."""

  def init(params: Any) -> _Moments:
    mu = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=mu_dtype), params)
    return _Moments(jnp.zeros((), jnp.int32), mu, jax.tree.map(jnp.zeros_like, params))

  def decay(b: float, steps: jax.Array) -> jax.Array:
    t = steps.astype(jnp.float32)
    return b * (1 - b**t) / (1 - b ** (t + 1))

  def update(grads: Any, state: _Moments, params: Any = None) -> tuple[Any, _Moments]:
    d1, d2 = decay(adam.b1, state.steps), decay(adam.b2, state.steps)
    mu = jax.tree.map(lambda m, g: ((1 - d1) * g + d1 * m).astype(m.dtype), state.mu, grads)
    nu = jax.tree.map(lambda v, g: ((1 - d2) * jnp.square(g) + d2 * v).astype(v.dtype), state.nu, grads)
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + adam.eps_root) + adam.eps), mu, nu)
    return updates, _Moments(state.steps + 1, mu, nu)

  return optax.GradientTransformation(init, update)
