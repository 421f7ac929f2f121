"""Preference optimization (DPO and its relatives) on packed pairs.

A row holds pairs, one after the other: segments 1 and 2 are the chosen and the rejected answer of the first pair, each
after its prompt, segments 3 and 4 those of the second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.configs import MaxTextConfig
from maxtext.data.batch import Batch
from maxtext.data.documents import LABEL
from maxtext.data.reference_log_probs import REFERENCE
from maxtext.kernels.cross_entropy import tiled_cross_entropy
from maxtext.mesh.explicit import auto_axes
from maxtext.models.decoder import Decoder
from maxtext.training.objectives.auxiliary import collect_auxiliary
from maxtext.training.objectives.base import (
  FrozenModel,
  Metrics,
  Models,
  Objective,
  StepContext,
  token_batch,
  token_field,
)
from maxtext.training.objectives.preference_losses import (
  DEFAULT_PARAMETERS,
  KTO,
  OF_MEANS,
  PAIR_LOSSES,
  REFERENCE_FREE,
  LossParameters,
  PairLogProbs,
  kto,
)


@dataclass(frozen=True)
class PreferenceOptimization(Objective):
  """A weighted sum of pair losses, as a mean over pairs.

  Attributes:
    losses: names of `PAIR_LOSSES`, and their weights.
    parameters: of the losses.
    precomputed: the data brings the reference model's log-probabilities; otherwise a frozen model computes them.
    tiles: parts in which the logits are computed.
  """

  losses: tuple[tuple[str, float], ...] = (("sigmoid", 1.0),)
  parameters: LossParameters = DEFAULT_PARAMETERS
  precomputed: bool = True
  tiles: int = 1

  @staticmethod
  def of(config: MaxTextConfig) -> "PreferenceOptimization":
    """As configured."""
    c = config
    weights = c.dpo_loss_weights or [1.0] * len(c.dpo_loss_type)
    return PreferenceOptimization(
      tuple(zip(c.dpo_loss_type, weights, strict=True)),
      LossParameters(
        c.dpo_beta, c.dpo_label_smoothing, c.simpo_gamma, c.kto_desirable_weight, c.kto_undesirable_weight
      ),
      c.precompute_ref_log_probs,
      c.num_vocab_tiling,
    )

  @property
  def needs_reference(self) -> bool:
    """Whether a loss compares the policy with a reference model."""
    return any(name not in REFERENCE_FREE for name, _ in self.losses)

  @property
  def is_labelled(self) -> bool:
    """Whether the data is single answers with labels, in place of pairs."""
    return self.losses[0][0] == KTO

  @property
  def reads_reference(self) -> bool:
    """Whether the data must bring the reference model's log-probabilities."""
    return self.needs_reference and self.precomputed

  @property
  def frozen(self) -> Mapping[str, FrozenModel]:
    """The model that the run starts from, where the data does not bring its log-probabilities."""
    return {REFERENCE: FrozenModel()} if self.needs_reference and not self.precomputed else {}

  def batch(self, rows: int, length: int) -> Any:
    """The batch of the configured data, with log-probabilities of the reference where they are precomputed."""
    brought = {REFERENCE: self.reads_reference, LABEL: self.is_labelled}
    extra = {name: token_field(rows, length, jnp.float32) for name, is_brought in brought.items() if is_brought}
    return replace(token_batch(rows, length), extra=extra)

  def __call__(self, models: Models, batch: Batch, context: StepContext) -> tuple[jax.Array, Metrics]:
    """The sum of the losses of all pairs; auxiliary losses of layers count for every pair."""
    policy, auxiliary = answer_log_probs(models.decoder, batch, self.tiles)
    tokens = pair_sums((batch.weights > 0).astype(jnp.float32), batch.segments)
    reference = self._reference(models, batch, policy)
    is_pair = tokens.min(-1) > 0
    counts = jnp.maximum(tokens, 1.0)
    pairs = PairLogProbs(
      policy[..., 0], policy[..., 1], reference[..., 0], reference[..., 1], counts[..., 0], counts[..., 1]
    )
    losses, figures = self._labelled(pairs, batch) if self.is_labelled else self._paired(pairs)
    auxiliary_loss, metrics = collect_auxiliary(auxiliary)
    count = self.weight(batch)
    loss = jnp.where(is_pair, losses, 0.0).sum() + auxiliary_loss * count
    own = {name: jnp.where(is_pair, value, 0.0).sum() for name, value in figures.items()}
    return loss, {name: mean * count for name, mean in metrics.items()} | own

  def weight(self, batch: Batch) -> jax.Array:
    """Pairs."""
    return (batch.segments.max(axis=1) // 2).sum().astype(jnp.float32)

  def tokens(self, batch: Batch) -> jax.Array:
    """Tokens that the model reads."""
    return (batch.segments > 0).sum(dtype=jnp.float32)

  def _reference(self, models: Models, batch: Batch, policy: jax.Array) -> jax.Array:
    if not self.needs_reference:
      return jnp.zeros_like(policy)
    if self.precomputed:
      return pair_sums(batch.extra[REFERENCE], batch.segments)
    return jax.lax.stop_gradient(answer_log_probs(models.frozen[REFERENCE], batch, self.tiles)[0])

  def _paired(self, pairs: PairLogProbs) -> tuple[jax.Array, Metrics]:
    losses = [weight * PAIR_LOSSES[name](pairs, self.parameters) for name, weight in self.losses]
    return sum(losses, jnp.zeros(())), self._figures(pairs)

  def _labelled(self, pairs: PairLogProbs, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Losses and figures of labelled answers: `reward_margin` is how much more than others desirable ones gained."""
    labels = pair_sums(batch.extra[LABEL], batch.segments)[..., 0]
    losses, kl = kto(pairs, labels, self.parameters)
    reward = self.parameters.beta * (pairs.chosen - pairs.reference_chosen)
    figures = {
      "reward_margin": labels * reward,
      "reward_accuracy": (labels * (reward - self.parameters.beta * kl) > 0).astype(jnp.float32),
      "kl": jnp.broadcast_to(kl, reward.shape),
      "log_prob": pairs.chosen,
    }
    weight = self.losses[0][1]
    return weight * losses, figures

  def _figures(self, pairs: PairLogProbs) -> Metrics:
    """Rewards as the first loss compares them: beta times the log-ratio to the reference, or the log-probability where
    there is none; per token for losses of means."""
    chosen, rejected = pairs.chosen - pairs.reference_chosen, pairs.rejected - pairs.reference_rejected
    if self.losses[0][0] in OF_MEANS:
      chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    beta = self.parameters.beta
    return {
      "chosen_reward": beta * chosen,
      "rejected_reward": beta * rejected,
      "reward_margin": beta * (chosen - rejected),
      "reward_accuracy": (chosen > rejected).astype(jnp.float32),
      "chosen_log_prob": pairs.chosen,
      "rejected_log_prob": pairs.rejected,
    }


def answer_log_probs(decoder: Decoder, batch: Batch, tiles: int) -> tuple[jax.Array, list[Any]]:
  """Log-probabilities [B,P,2] of the chosen and the rejected answer of each pair, 0 where a row has fewer; and the
  auxiliary outputs of the layers."""
  hidden, auxiliary, _ = decoder.hidden(
    batch.inputs, batch.positions, batch.segments, media=batch.media, rotary_positions=batch.rotary_positions
  )
  losses = tiled_cross_entropy(hidden, decoder.logits, batch.targets, 0.0, tiles)
  return pair_sums(-losses * batch.weights, batch.segments), auxiliary


def pair_sums(values: jax.Array, segments: jax.Array) -> jax.Array:
  """The sums [B,P,2] over the two segments of each pair, from values [B,S] of tokens in any order."""
  rows, length = values.shape
  pairs = length // 2  # a sequence has at least one input

  def sums(values: jax.Array, segments: jax.Array) -> jax.Array:
    found = jax.vmap(lambda v, s: jax.ops.segment_sum(v, s, 2 * pairs + 1))(values, segments)
    return found[:, 1:].reshape(rows, pairs, 2)

  own = jax.typeof(values).sharding
  sharding = NamedSharding(own.mesh, PartitionSpec(own.spec[0], None, None)) if own.spec else own
  return auto_axes(sums, sharding, values, segments)
