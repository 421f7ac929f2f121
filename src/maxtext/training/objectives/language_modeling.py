"""Pre-training: predict the next token."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.data.batch import Batch
from maxtext.kernels.cross_entropy import tiled_cross_entropy
from maxtext.models.decoder import Decoder
from maxtext.training.objectives.base import Metrics, Models, Objective, StepContext
from maxtext.training.objectives.reports import gathered


@dataclass(frozen=True)
class LanguageModeling(Objective):
  """Weighted cross-entropy, and the losses that layers report."""

  z_loss: float = 0.0
  tiles: int = 1
  further_weight: float = 0.0  # of tokens after the next one, where the model predicts them
  alone: bool = False  # only the next token's cross-entropy, which is what evaluation measures

  def __call__(self, models: Models, batch: Batch, context: StepContext) -> tuple[jax.Array, Metrics]:
    """The sum of the losses of all targets, each times its weight; what layers report counts for every target."""
    decoder = models.decoder
    hidden, reports, _ = decoder.hidden(batch.inputs, batch.positions, batch.segments)
    losses = tiled_cross_entropy(hidden, decoder.logits, batch.targets, self.z_loss, self.tiles)
    if self.alone:
      return (losses * batch.weights).sum(), {}
    further, more = self._further(decoder, hidden, batch)
    own, figures = gathered([*reports, *more])
    weight = self.weight(batch)
    figures |= further
    loss = (losses * batch.weights).sum() + (own + sum(further.values())) * weight
    return loss, {name: mean * weight for name, mean in figures.items()}

  def _further(self, decoder: Decoder, hidden: jax.Array, batch: Batch) -> tuple[dict[str, jax.Array], list[Any]]:
    """The weighted mean loss of tokens after the next one, over the layers that predict them."""
    if not decoder.ahead:
      return {}, []
    states, reports = decoder.further(hidden, batch.targets, batch.positions, batch.segments)
    losses = []
    for distance, state in enumerate(states, 1):
      known = jnp.arange(batch.targets.shape[1]) < batch.targets.shape[1] - distance
      if batch.segments is not None:
        known = known & (jnp.roll(batch.segments, -distance, axis=1) == batch.segments)
      targets, weights = (jnp.roll(a, -distance, axis=1) for a in (batch.targets, batch.weights))
      weights = weights * known
      own = tiled_cross_entropy(state, decoder.logits, targets, self.z_loss, self.tiles)
      losses.append((own * weights).sum() / jnp.maximum(weights.sum(), 1e-6))
    return {"mtp_loss": self.further_weight * jnp.stack(losses).mean()}, reports
