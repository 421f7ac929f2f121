"""Leaving out updates that come from a spike."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class SpikeState(NamedTuple):
  """The last losses and gradient norms (the oldest is overwritten), how many came, and how many were left out."""

  history: jax.Array  # [2, interval]
  seen: jax.Array
  skipped_steps: jax.Array
  inner: Any


def skip_spikes(
  inner: optax.GradientTransformation, interval: int, deviations: float
) -> optax.GradientTransformationExtraArgs:
  """Leaves parameters and the inner state as they are where the loss or the gradient norm is no number, or lies more
  than `deviations` standard deviations above its mean over the last `interval` steps; half of those must be there.

  `update` takes `loss` and `grad_norm`.
  """

  def init(params: Any) -> SpikeState:
    zero = jnp.zeros((), jnp.int32)
    return SpikeState(jnp.zeros((2, interval), jnp.float32), zero, zero, inner.init(params))

  def update(
    grads: Any, state: SpikeState, params: Any = None, *, loss: jax.Array, grad_norm: jax.Array, **_: Any
  ) -> tuple[Any, SpikeState]:
    now = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    finite = jnp.isfinite(now).all()
    here = jnp.arange(interval) < state.seen
    mean = jnp.mean(state.history, axis=1, where=here)
    deviation = jnp.std(state.history, axis=1, where=here)
    enough = state.seen >= max(2, interval // 2)
    good = finite & (~enough | (now <= mean + deviations * deviation).all())
    updates, new = inner.update(grads, state.inner, params)
    kept_updates, kept = jax.tree.map(
      lambda a, b: jnp.where(good, a, b), (updates, new), (jax.tree.map(jnp.zeros_like, updates), state.inner)
    )
    history = jnp.where(finite, state.history.at[:, state.seen % interval].set(now), state.history)
    return kept_updates, SpikeState(history, state.seen + finite, state.skipped_steps + ~good, kept)

  return optax.GradientTransformationExtraArgs(init, update)
