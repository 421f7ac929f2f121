"""Pre-training: predict the next token."""

from dataclasses import dataclass

import jax

from maxtext.data.batch import Batch
from maxtext.kernels.cross_entropy import tiled_cross_entropy
from maxtext.models.decoder import Decoder
from maxtext.train.objectives.reports import gathered


@dataclass(frozen=True)
class LanguageModeling:
  """Weighted cross-entropy, and the losses that layers report."""

  z_loss: float = 0.0
  tiles: int = 1

  def __call__(self, decoder: Decoder, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum of the losses of all targets, each times its weight; what layers report counts for every target."""
    hidden, reports, _ = decoder.hidden(batch.inputs, batch.positions, batch.segments)
    losses = tiled_cross_entropy(hidden, decoder.logits, batch.targets, self.z_loss, self.tiles)
    own, figures = gathered(reports)
    weight = self.weight(batch)
    return (losses * batch.weights).sum() + own * weight, {name: mean * weight for name, mean in figures.items()}

  def weight(self, batch: Batch) -> jax.Array:
    """What the sum is divided by."""
    return batch.weights.sum()
