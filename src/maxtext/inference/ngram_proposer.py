"""Prompt lookup (n-gram) proposer: draft tokens for speculative decoding without a draft model.

The draft tokens are those that followed the most recent occurrence of the last n tokens. The engine verifies every
draft token, so a wrong one costs only its position in the step.

Shapes: B rows, T tokens of a sequence, W draft tokens.
"""

import jax
import jax.numpy as jnp

_MAX_NGRAM = 3  # longest n-gram that is compared; a longer match wins, then the most recent one


def propose(token_ids: jax.Array, last: jax.Array, count: int) -> jax.Array:
  """Proposes `count` draft tokens [B,W] after the sequences [B,T] whose last token is at index `last` [B].

  The tokens after the best match are copied. Where the copy reaches the end of the sequence it wraps around to the
  match, so a short period repeats.
  """
  T = token_ids.shape[1]
  indices = jnp.arange(T)
  matched, run = jnp.zeros(token_ids.shape, jnp.int32), jnp.ones(token_ids.shape, bool)
  for back in range(_MAX_NGRAM):
    token = jnp.take_along_axis(token_ids, jnp.maximum(last - back, 0)[:, None], axis=1)
    run &= (jnp.roll(token_ids, back, axis=1) == token) & (indices >= back)
    matched += run
  score = jnp.where(indices < last[:, None], matched * T + indices, -1)
  best = jnp.argmax(score, axis=1)[:, None]
  period = jnp.maximum(last[:, None] - best, 1)
  return jnp.take_along_axis(token_ids, jnp.minimum(best + 1 + jnp.arange(count) % period, T - 1), axis=1)
