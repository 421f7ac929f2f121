"""Pre-training: predict the next token."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.data.batch import Batch
from maxtext.kernels.cross_entropy import is_hit, tiled, tiled_cross_entropy
from maxtext.models.decoder import Decoder
from maxtext.training.objectives.auxiliary import collect_auxiliary
from maxtext.training.objectives.base import Metrics, Models, Objective, StepContext


@dataclass(frozen=True)
class LanguageModeling(Objective):
  """Weighted cross-entropy, and the auxiliary losses of layers.

  Attributes:
    z_loss: weight of the squared log of the softmax's normaliser.
    tiles: parts in which the logits are computed.
    mtp_weight: weight of multi-token prediction, where the model has its layers.
    next_token_only: leaves all but the next token's cross-entropy out, as evaluation does.
    mtp_eval_layer: layer of multi-token prediction, from 1, whose acceptance rate is measured with `next_token_only`; 0
      is none.
  """

  z_loss: float = 0.0
  tiles: int = 1
  mtp_weight: float = 0.0
  next_token_only: bool = False
  mtp_eval_layer: int = 0

  def __call__(self, models: Models, batch: Batch, context: StepContext) -> tuple[jax.Array, Metrics]:
    """The sum of the losses of all targets, each times its weight; auxiliary losses count for every target."""
    decoder = models.decoder
    hidden, auxiliary, _ = decoder.hidden(
      batch.inputs, batch.positions, batch.segments, media=batch.media, rotary_positions=batch.rotary_positions
    )
    losses = tiled_cross_entropy(hidden, decoder.logits, batch.targets, self.z_loss, self.tiles)
    if self.next_token_only:
      return (losses * batch.weights).sum(), self._mtp_acceptance(decoder, hidden, batch)
    further, metrics = self.further_losses(decoder, hidden, auxiliary, batch)
    return (losses * batch.weights).sum() + further, metrics

  def further_losses(
    self, decoder: Decoder, hidden: jax.Array, auxiliary: list[Any], batch: Batch
  ) -> tuple[jax.Array, Metrics]:
    """The loss beside the next token's, of multi-token prediction and of layers, and its parts by name."""
    mtp_losses, mtp_auxiliary = self._mtp_loss(decoder, hidden, batch)
    auxiliary_loss, metrics = collect_auxiliary([*auxiliary, *mtp_auxiliary])
    weight = self.weight(batch)
    metrics |= mtp_losses
    loss = (auxiliary_loss + sum(mtp_losses.values())) * weight
    return loss, {name: mean * weight for name, mean in metrics.items()}

  def tokens(self, batch: Batch) -> jax.Array:
    """Tokens that the model reads, also those without a weight in the loss."""
    if batch.segments is None:
      return jnp.float32(batch.inputs.size)
    return (batch.segments > 0).sum(dtype=jnp.float32)

  def _mtp_loss(self, decoder: Decoder, hidden: jax.Array, batch: Batch) -> tuple[dict[str, jax.Array], list[Any]]:
    """The weighted mean loss of multi-token prediction over its layers, by name, and their auxiliary outputs."""
    if not decoder.mtp:
      return {}, []
    places = batch.positions, batch.segments, batch.rotary_positions
    states, auxiliary = decoder.mtp_hidden(hidden, batch.targets, *places)
    losses = []
    for distance, state in enumerate(states, 1):
      targets, weights = _further_targets(batch, distance)
      own = tiled_cross_entropy(state, decoder.logits, targets, self.z_loss, self.tiles)
      losses.append((own * weights).sum() / jnp.maximum(weights.sum(), 1e-6))
    return {"mtp_loss": self.mtp_weight * jnp.stack(losses).mean()}, auxiliary

  def _mtp_acceptance(self, decoder: Decoder, hidden: jax.Array, batch: Batch) -> Metrics:
    """How many of its targets a multi-token prediction layer finds most likely, and the number of these targets."""
    if not self.mtp_eval_layer:
      return {}
    places = batch.positions, batch.segments, batch.rotary_positions
    states, _ = decoder.mtp_hidden(hidden, batch.targets, *places)
    targets, weights = _further_targets(batch, self.mtp_eval_layer)
    state = states[self.mtp_eval_layer - 1]
    hits = tiled(lambda state, targets: is_hit(decoder.logits(state), targets), self.tiles, state, targets)
    counted = weights > 0
    sums = {"mtp_acceptance_rate": hits & counted, "mtp_acceptance_rate_weight": counted}
    return {name: values.sum(dtype=jnp.float32) for name, values in sums.items()}


def _further_targets(batch: Batch, distance: int) -> tuple[jax.Array, jax.Array]:
  """The tokens [B,S] that are so many positions after the targets, and their weights: 0 beyond the row or document."""
  known = jnp.arange(batch.targets.shape[1]) < batch.targets.shape[1] - distance
  if batch.segments is not None:
    known = known & (jnp.roll(batch.segments, -distance, axis=1) == batch.segments)
  targets, weights = (jnp.roll(a, -distance, axis=1) for a in (batch.targets, batch.weights))
  return targets, weights * known
