"""Losses of preference pairs, each a function of the log-probabilities of a chosen and a rejected answer."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid


class PairLogProbs(NamedTuple):
  """Log-probabilities of answers, summed over their tokens; arrays of any one shape.

  Attributes:
    chosen: of the chosen answer under the policy.
    rejected: of the rejected one.
    reference_chosen: of the chosen answer under the reference model.
    reference_rejected: of the rejected one.
    chosen_tokens: tokens of the chosen answer.
    rejected_tokens: of the rejected one.
  """

  chosen: jax.Array
  rejected: jax.Array
  reference_chosen: jax.Array
  reference_rejected: jax.Array
  chosen_tokens: jax.Array
  rejected_tokens: jax.Array

  @property
  def log_ratio_difference(self) -> jax.Array:
    """How much more than the reference the policy prefers the chosen answer."""
    return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)

  @property
  def mean_log_ratio_difference(self) -> jax.Array:
    """The same with means over tokens in place of sums."""
    chosen = (self.chosen - self.reference_chosen) / self.chosen_tokens
    return chosen - (self.rejected - self.reference_rejected) / self.rejected_tokens

  @property
  def mean_chosen(self) -> jax.Array:
    """Log-probability of the chosen answer per token."""
    return self.chosen / self.chosen_tokens

  @property
  def mean_rejected(self) -> jax.Array:
    """Log-probability of the rejected answer per token."""
    return self.rejected / self.rejected_tokens


class LossParameters(NamedTuple):
  """Numbers of the losses.

  Attributes:
    beta: `dpo_beta`.
    label_smoothing: `dpo_label_smoothing`.
    gamma: `simpo_gamma`.
    desirable: `kto_desirable_weight`.
    undesirable: `kto_undesirable_weight`.
  """

  beta: float = 0.1
  label_smoothing: float = 0.0
  gamma: float = 0.5
  desirable: float = 1.0
  undesirable: float = 1.0


DEFAULT_PARAMETERS = LossParameters()


def sigmoid(pairs: PairLogProbs, p: LossParameters) -> jax.Array:
  """DPO (Rafailov et al. 2023); with label smoothing it is conservative DPO (cDPO, Mitchell 2023)."""
  return _smoothed(p.beta * pairs.log_ratio_difference, p.label_smoothing)


def sigmoid_norm(pairs: PairLogProbs, p: LossParameters) -> jax.Array:
  """Length-normalised DPO: the sigmoid loss of means over tokens."""
  return _smoothed(p.beta * pairs.mean_log_ratio_difference, p.label_smoothing)


def robust(pairs: PairLogProbs, p: LossParameters) -> jax.Array:
  """Robust DPO (Chowdhury et al. 2024): unbiased where a share of the labels, the smoothing, is swapped."""
  x, e = p.beta * pairs.log_ratio_difference, p.label_smoothing
  return (e * log_sigmoid(-x) - (1 - e) * log_sigmoid(x)) / (1 - 2 * e)


def hinge(pairs: PairLogProbs, p: LossParameters) -> jax.Array:
  """SLiC's hinge (Zhao et al. 2023) on the log-ratios of DPO."""
  return jax.nn.relu(1 - p.beta * pairs.log_ratio_difference)


def ipo(pairs: PairLogProbs, p: LossParameters) -> jax.Array:
  """IPO (Azar et al. 2023), on means over tokens."""
  return jnp.square(pairs.mean_log_ratio_difference - 1 / (2 * p.beta))


def simpo(pairs: PairLogProbs, p: LossParameters) -> jax.Array:
  """SimPO (Meng et al. 2024): means over tokens, a margin, and no reference."""
  return _smoothed(p.beta * (pairs.mean_chosen - pairs.mean_rejected) - p.gamma, p.label_smoothing)


def orpo(pairs: PairLogProbs, p: LossParameters) -> jax.Array:
  """ORPO (Hong et al. 2024): the chosen answer's loss per token and, times beta, that of the odds ratio."""
  log_odds = pairs.mean_chosen - pairs.mean_rejected - _log1mexp(pairs.mean_chosen) + _log1mexp(pairs.mean_rejected)
  return sft(pairs, p) - p.beta * log_sigmoid(log_odds)


def sft(pairs: PairLogProbs, p: LossParameters) -> jax.Array:
  """Loss per token of the chosen answer, to be combined with another one."""
  return -pairs.mean_chosen


def kto(pairs: PairLogProbs, labels: jax.Array, p: LossParameters) -> tuple[jax.Array, jax.Array]:
  """KTO (Ethayarajh et al. 2024): losses of labelled answers, and the estimate of the KL that they are compared with.

  Args:
    pairs: the labelled answers as chosen ones; as rejected ones, answers of other rows to the same prompts.
    labels: 1 for a desirable answer, -1 for another, 0 where there is none.
    p: the weights of both.
  """
  is_there = labels != 0
  other = jnp.where(is_there, pairs.rejected - pairs.reference_rejected, 0.0).sum() / jnp.maximum(is_there.sum(), 1)
  kl = jax.lax.stop_gradient(jnp.maximum(other, 0.0))
  weights = jnp.where(labels > 0, p.desirable, p.undesirable)
  return weights * (1 - jax.nn.sigmoid(labels * p.beta * (pairs.chosen - pairs.reference_chosen - kl))), kl


KTO = "kto"
"""The loss of labelled answers, in place of those of pairs."""

PairLoss = Callable[[PairLogProbs, LossParameters], jax.Array]

PAIR_LOSSES: dict[str, PairLoss] = {
  function.__name__: function for function in (sigmoid, sigmoid_norm, robust, hinge, ipo, simpo, orpo, sft)
}
REFERENCE_FREE = frozenset({"simpo", "orpo", "sft"})
"""Losses that need no reference model."""
OF_MEANS = REFERENCE_FREE | {"sigmoid_norm", "ipo"}
"""Losses of means over tokens."""


def _smoothed(x: jax.Array, e: float) -> jax.Array:
  return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


def _log1mexp(x: jax.Array) -> jax.Array:
  """log(1 - exp(x)) for x < 0, which is what remains of a probability; finite where it rounds to 1."""
  x = jnp.minimum(x, -1e-7)
  return jnp.where(x > -0.693, jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))
