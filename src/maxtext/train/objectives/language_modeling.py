"""Pre-training: predict the next token."""

from dataclasses import dataclass

import jax

from maxtext.data.batch import Batch
from maxtext.kernels.cross_entropy import tiled_cross_entropy
from maxtext.models.decoder import Decoder


@dataclass(frozen=True)
class LanguageModeling:
  """Weighted cross-entropy."""

  z_loss: float = 0.0
  tiles: int = 1

  def __call__(self, decoder: Decoder, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum of the losses of all targets, each times its weight."""
    hidden, _, _ = decoder.hidden(batch.inputs, batch.positions, batch.segments)
    losses = tiled_cross_entropy(hidden, decoder.logits, batch.targets, self.z_loss, self.tiles)
    return (losses * batch.weights).sum(), {}

  def weight(self, batch: Batch) -> jax.Array:
    """What the sum is divided by."""
    return batch.weights.sum()
