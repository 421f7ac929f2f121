"""Policy optimization: answers that the policy wrote itself, each token weighted by the advantage of its answer.

A row holds one answer after its prompt. `weights` is 1 for the tokens that the policy wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from maxtext.checkpoint.metadata import Criterion
from maxtext.configs import MaxTextConfig
from maxtext.data.batch import Batch
from maxtext.data.reference_log_probs import REFERENCE
from maxtext.kernels.cross_entropy import cross_entropy, tiled
from maxtext.layers.router import ROUTED_EXPERTS
from maxtext.models import routed_experts
from maxtext.models.build import model_spec
from maxtext.models.decoder import Decoder
from maxtext.training.objectives.auxiliary import collect_auxiliary
from maxtext.training.objectives.base import (
  BATCH,
  LENGTH,
  Field,
  FrozenModel,
  Metrics,
  Models,
  Objective,
  StepContext,
  token_batch,
  token_field,
)
from maxtext.training.objectives.policy_losses import (
  CLIPPING,
  DEFAULT_PARAMETERS,
  PolicyLossParameters,
  kl_divergence,
  log_importance,
)

ADVANTAGES = "advantages"
SHARES = "loss_shares"
"""A token's share in the loss, times the number of rows: how answers are averaged."""
SAMPLED = "sampled_log_probs"
"""Log-probabilities by the engine that wrote the tokens, before temperature."""
OLD = "old_log_probs"
"""Log-probabilities, at the temperature of sampling, by the policy before the first of several updates."""


@dataclass(frozen=True)
class PolicyOptimization(Objective):
  """A policy loss over answers with advantages.

  Attributes:
    parameters: of the loss.
    temperature: at which answers were sampled; the policy that is trained has it too.
    several_updates: the data brings the log-probabilities of the policy before the first update; otherwise they are
      the current ones, and ratios are exactly 1.
    is_off_policy: answers were written by an older policy; the temperature is then 1, if tokens are corrected.
    importance_cap: largest weight by which such tokens are corrected; 0 corrects nothing.
    tiles: parts in which the logits are computed.
    replayed: numbers of a token's vector of experts that the rollouts bring (`replayed_experts`); 0 are none.
  """

  parameters: PolicyLossParameters = DEFAULT_PARAMETERS
  temperature: float = 1.0
  several_updates: bool = False
  is_off_policy: bool = False
  importance_cap: float = 0.0
  tiles: int = 1
  replayed: int = 0

  maxima: ClassVar[frozenset[str]] = frozenset({"mismatch_max", "off_policy_max", "ratio_deviation"})
  criterion: ClassVar[Criterion] = Criterion("eval_pass_rate", highest=True)

  @staticmethod
  def of(config: MaxTextConfig, temperature: float) -> "PolicyOptimization":
    """As configured."""
    c = config
    high = c.grpo_epsilon if c.epsilon_high is None else c.epsilon_high
    sequence = c.loss_algo == "gspo-token"
    parameters = PolicyLossParameters(c.grpo_epsilon, high, c.grpo_beta, sequence, c.rl_clipping)
    lags, cap = c.off_policy_steps > 0, c.importance_sampling_cap
    several = c.num_iterations > 1
    return PolicyOptimization(parameters, temperature, several, lags, cap, c.num_vocab_tiling, replayed_experts(c))

  @property
  def frozen(self) -> Mapping[str, FrozenModel]:
    """The model that the run starts from, where the loss has its KL divergence."""
    return {REFERENCE: FrozenModel()} if self.parameters.beta else {}

  def batch(self, rows: int, length: int) -> Any:
    """Tokens, with what the rollouts bring for each."""
    names = (ADVANTAGES, SHARES, SAMPLED, *([OLD] if self.several_updates else []))
    extra = {n: token_field(rows, length, jnp.float32) for n in names}
    if self.replayed:
      extra[ROUTED_EXPERTS] = Field((rows, length, self.replayed), routed_experts.DTYPE, (BATCH, LENGTH, None))
    return replace(token_batch(rows, length), extra=extra)

  def __call__(self, models: Models, batch: Batch, context: StepContext) -> tuple[jax.Array, Metrics]:
    """The sum over rows; auxiliary losses of layers count for every row."""
    p, mask, rows = self.parameters, batch.weights, self.weight(batch)
    policy, auxiliary = token_log_probs(models.decoder, batch, self.temperature, self.tiles, replay=True)
    policy = jax.tree.map(lambda x: jnp.where(mask > 0, x, 0.0), policy)  # no number from where nothing was written
    old = batch.extra[OLD] * mask if self.several_updates else jax.lax.stop_gradient(policy.tempered)
    ratio = jnp.exp(log_importance(policy.tempered, old, mask, p.by_sequence))
    losses = CLIPPING[p.clipping](ratio, batch.extra[ADVANTAGES], policy.tempered, p)
    sampled = batch.extra[SAMPLED]
    known = self.several_updates and self.temperature == 1.0  # what the trainer said before the first update
    before = old if known else jax.lax.stop_gradient(policy.plain)
    figures = {"entropy": policy.entropy, "ratio_clipped": _is_clipped(ratio, batch.extra[ADVANTAGES], p)}
    if self.is_off_policy and self.importance_cap:
      weight = jnp.exp(before - sampled)
      losses *= jnp.minimum(weight, self.importance_cap)
      figures |= {"importance_truncated": (weight > self.importance_cap).astype(jnp.float32)}
    if p.beta:
      reference = token_log_probs(models.frozen[REFERENCE], batch, self.temperature, self.tiles)[0].tempered
      kl = kl_divergence(policy.tempered, jax.lax.stop_gradient(jnp.where(mask > 0, reference, 0.0)))
      losses += p.beta * kl
      figures["kl"] = kl
    is_engine = not self.is_off_policy and (known or not self.several_updates)
    what, difference = "mismatch" if is_engine else "off_policy", jnp.abs(before - sampled)
    figures |= {what: difference, f"{what}_kl": kl_divergence(sampled, before)}
    auxiliary_loss, metrics = collect_auxiliary(auxiliary)
    loss = (losses * mask * batch.extra[SHARES]).sum() + auxiliary_loss * rows
    tokens = jnp.maximum(mask.sum(-1), 1.0)
    means = {name: ((value * mask).sum(-1) / tokens).sum() for name, value in figures.items()}
    extremes = {f"{what}_max": (difference * mask).max(), "ratio_deviation": (jnp.abs(ratio - 1.0) * mask).max()}
    return loss, {name: mean * rows for name, mean in metrics.items()} | means | jax.lax.stop_gradient(extremes)

  def weight(self, batch: Batch) -> jax.Array:
    """Answers."""
    return jnp.float32(batch.inputs.shape[0])

  def tokens(self, batch: Batch) -> jax.Array:
    """Tokens that the model reads."""
    return (batch.segments > 0).sum(dtype=jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogProbs:
  """What the model says of targets, each [B,S].

  Attributes:
    tempered: log-probabilities at the temperature of sampling.
    plain: log-probabilities at temperature 1.
    entropy: of the whole distribution at temperature 1, without a gradient.
  """

  tempered: jax.Array
  plain: jax.Array
  entropy: jax.Array


def replayed_experts(config: MaxTextConfig) -> int:
  """Numbers of the vector of experts that a token is routed to as the engine chose; 0 where routers choose."""
  return routed_experts.vector_size(model_spec(config).groups) if config.routing_replay else 0


def token_log_probs(
  decoder: Decoder, batch: Batch, temperature: float, tiles: int, replay: bool = False
) -> tuple[TokenLogProbs, list[Any]]:
  """What a model says of the targets of a batch, and the auxiliary outputs of its layers; with `replay`, of the policy
  that wrote them, whose experts the batch may bring."""
  experts = batch.extra.get(ROUTED_EXPERTS) if replay else None
  hidden, auxiliary, _ = decoder.hidden(
    batch.inputs,
    batch.positions,
    batch.segments,
    media=batch.media,
    rotary_positions=batch.rotary_positions,
    routed_experts=experts,
  )

  def of_tile(hidden: jax.Array, targets: jax.Array) -> TokenLogProbs:
    logits = decoder.logits(hidden).astype(jnp.float32)
    plain = -cross_entropy(logits, targets, 0.0)
    tempered = plain if temperature == 1.0 else -cross_entropy(logits / temperature, targets, 0.0)
    return TokenLogProbs(tempered, plain, _entropy(jax.lax.stop_gradient(logits)))

  return tiled(of_tile, tiles, hidden, batch.targets), auxiliary


def _entropy(logits: jax.Array) -> jax.Array:
  log_probs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  return -(jnp.exp(log_probs) * log_probs).sum(-1)


def _is_clipped(ratio: jax.Array, advantages: jax.Array, p: PolicyLossParameters) -> jax.Array:
  above, below = (ratio > 1.0 + p.epsilon_high) & (advantages > 0), (ratio < 1.0 - p.epsilon) & (advantages < 0)
  return jax.lax.stop_gradient((above | below).astype(jnp.float32))
