"""The update rule of a run."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxtext.configs import MaxTextConfig
from maxtext.configs.types import OptimizerType
from maxtext.optim.schedules import learning_rate
from maxtext.optim.spikes import skip_spikes

Matrices = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def make_optimizer(config: MaxTextConfig, matrices: Matrices) -> optax.GradientTransformation:
  """The optimizer of a configuration; clipping is the step's.

  Args:
    config: the run.
    matrices: for each weight that is a matrix in some of its dimensions, those summed over and those that appear.
  """
  optimizer = _OPTIMIZERS[config.opt_type](config, matrices)
  if not config.skip_step_on_spikes:
    return optimizer
  return skip_spikes(optimizer, config.skip_step_interval, config.skip_step_scaling_factor)


def _adamw(c: MaxTextConfig, _: Matrices) -> optax.GradientTransformation:
  return optax.adamw(
    learning_rate(c),
    b1=c.adam_b1,
    b2=c.adam_b2,
    eps=c.adam_eps,
    eps_root=c.adam_eps_root,
    weight_decay=c.adam_weight_decay,
    mu_dtype=_moment_dtype(c),
    mask=_decayed(c),
  )


def _adam_pax(c: MaxTextConfig, _: Matrices) -> optax.GradientTransformation:
  return optax.chain(
    _corrected_moments(c.adam_b1, c.adam_b2, c.adam_eps, c.adam_eps_root, _moment_dtype(c)),
    optax.add_decayed_weights(c.adam_weight_decay, _decayed(c)),
    optax.scale_by_learning_rate(learning_rate(c)),
  )


def _sgd(c: MaxTextConfig, _: Matrices) -> optax.GradientTransformation:
  return optax.sgd(learning_rate(c))


def _muon(c: MaxTextConfig, matrices: Matrices) -> optax.GradientTransformation:
  """Muon on the layers' matrices, each layer on its own; AdamW with Nesterov momentum on embedding, head and norms."""
  from optax.contrib import MuonDimensionNumbers, muon

  def dimensions(params: dict[str, Any]) -> dict[str, Any]:
    return {path: MuonDimensionNumbers(*matrices[path]) if path in matrices else None for path in params}

  return muon(
    learning_rate(c),
    beta=c.muon_beta,
    eps=c.adam_eps,
    weight_decay=c.muon_weight_decay,
    weight_decay_mask=_decayed(c),
    mu_dtype=_moment_dtype(c),
    adam_b1=c.adam_b1,
    adam_b2=c.adam_b2,
    adam_eps_root=c.adam_eps_root,
    adam_weight_decay=c.adam_weight_decay,
    muon_weight_dimension_numbers=dimensions,
    consistent_rms=c.muon_consistent_rms,
  )


_OPTIMIZERS: Mapping[OptimizerType, Callable[[MaxTextConfig, Matrices], optax.GradientTransformation]] = {
  OptimizerType.ADAMW: _adamw,
  OptimizerType.ADAM_PAX: _adam_pax,
  OptimizerType.SGD: _sgd,
  OptimizerType.MUON: _muon,
}


def _moment_dtype(config: MaxTextConfig) -> str:
  """Always named: left open, it would follow the gradients after the first step."""
  return config.mu_dtype or config.weight_dtype.value


def _decayed(config: MaxTextConfig) -> Callable[[dict[str, Any]], dict[str, bool]]:
  patterns = [re.compile(pattern) for pattern in config.adamw_mask]
  return lambda params: {path: not any(p.search(path) for p in patterns) for path in params}


class _Moments(NamedTuple):
  steps: jax.Array
  mu: Any
  nu: Any


def _corrected_moments(
  b1: float, b2: float, eps: float, eps_root: float, mu_dtype: str
) -> optax.GradientTransformation:
  """Adam whose stored moments need no correction: the decay itself starts at 0 and grows to b1 and b2."""

  def init(params: Any) -> _Moments:
    mu = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=mu_dtype), params)
    return _Moments(jnp.zeros((), jnp.int32), mu, jax.tree.map(jnp.zeros_like, params))

  def decay(b: float, steps: jax.Array) -> jax.Array:
    t = steps.astype(jnp.float32)
    return b * (1 - b**t) / (1 - b ** (t + 1))

  def update(grads: Any, state: _Moments, params: Any = None) -> tuple[Any, _Moments]:
    d1, d2 = decay(b1, state.steps), decay(b2, state.steps)
    mu = jax.tree.map(lambda m, g: ((1 - d1) * g + d1 * m).astype(m.dtype), state.mu, grads)
    nu = jax.tree.map(lambda v, g: ((1 - d2) * jnp.square(g) + d2 * v).astype(v.dtype), state.nu, grads)
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), mu, nu)
    return updates, _Moments(state.steps + 1, mu, nu)

  return optax.GradientTransformation(init, update)
