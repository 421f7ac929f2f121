"""Losses of policy optimization (GRPO and its relatives), token by token. Shapes: B answers, S tokens.

What a method averages over, and what it subtracts from rewards, is decided where a batch is made; see
`maxtext.rl.advantages`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class PolicyLossParameters:
  """Parameters of a policy loss.

  Attributes:
    epsilon: how far below 1 a ratio of probabilities counts.
    epsilon_high: how far above 1.
    beta: weight of the KL divergence from the reference model.
    by_sequence: one ratio for all tokens of an answer, the geometric mean of theirs (GSPO-token).
    clipping: a name of `CLIPPING`.
  """

  epsilon: float = 0.2
  epsilon_high: float = 0.2
  beta: float = 0.0
  by_sequence: bool = False
  clipping: str = "ppo"


DEFAULT_PARAMETERS = PolicyLossParameters()


def log_importance(log_probs: jax.Array, old: jax.Array, mask: jax.Array, by_sequence: bool) -> jax.Array:
  """Logarithm of the ratio of the policy to the one that is improved, [B,S], with the gradient of each token's own."""
  difference = log_probs - old
  if not by_sequence:
    return difference
  mean = (difference * mask).sum(-1, keepdims=True) / jnp.maximum(mask.sum(-1, keepdims=True), 1.0)
  return jax.lax.stop_gradient(mean) + log_probs - jax.lax.stop_gradient(log_probs)


def _ppo(ratio: jax.Array, advantages: jax.Array, log_probs: jax.Array, p: PolicyLossParameters) -> jax.Array:
  clipped = jnp.clip(ratio, 1.0 - p.epsilon, 1.0 + p.epsilon_high)
  return -jnp.minimum(ratio * advantages, clipped * advantages)


def _cispo(ratio: jax.Array, advantages: jax.Array, log_probs: jax.Array, p: PolicyLossParameters) -> jax.Array:
  weight = jax.lax.stop_gradient(jnp.minimum(ratio, 1.0 + p.epsilon_high))
  return -weight * advantages * log_probs


CLIPPING: Mapping[str, Callable[[jax.Array, jax.Array, jax.Array, PolicyLossParameters], jax.Array]] = {
  "ppo": _ppo,
  "cispo": _cispo,
}
"""Losses of tokens [B,S] from ratios, advantages and log-probabilities: PPO's, whose clipped tokens have no gradient,
and CISPO's, which clips weights and keeps every token's gradient."""


def kl_divergence(log_probs: jax.Array, reference: jax.Array) -> jax.Array:
  """An estimate of each token's KL divergence from a reference that is never negative: exp(d) - d - 1."""
  d = reference - log_probs
  return jnp.exp(d) - d - 1.0
