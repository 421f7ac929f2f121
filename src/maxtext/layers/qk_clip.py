"""QK-clip: statistics of attention logits, by which query and key weights are scaled down where logits are too large.

Shapes: R stacked layers, H heads, D head dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.attention import largest_logits
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.layers.param_factory import ParamFactory, UpdateStatistic


def largest_logit(factory: ParamFactory, heads: int) -> nnx.Variable:
  """A statistic [H]: the largest logit of each head over all micro-batches of one update."""
  return factory("largest_logit", (heads,), (None,), kind=UpdateStatistic, dtype=jnp.float32, combine="max")


def track_max_logits(
  buffer: nnx.Variable | None, q: jax.Array, k: jax.Array, tokens: Tokens, scoring: ScoreSpec, precision: str
) -> None:
  """Raises the buffer, if there is one, to the largest logits of these queries and keys."""
  if buffer is not None:
    buffer.set_value(jnp.maximum(buffer[...], largest_logits(q, k, tokens, scoring, precision)))


def per_head(weight: jax.Array, factor: jax.Array) -> jax.Array:
  """A stacked weight [R,...,H,D] times a factor per head [R,H]."""
  inputs = weight.ndim - 3
  return weight * factor.reshape(factor.shape[0], *(1,) * inputs, factor.shape[1], 1).astype(weight.dtype)
