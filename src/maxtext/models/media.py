"""Images and other media of a batch, as arrays, and their place among the tokens.

Shapes: B rows, S tokens of a row, M inputs of a tower in a row, T patches of an input, P values of a patch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TowerInputs:
  """What one tower encodes.

  Attributes:
    inputs: [B,M,T,P]; inputs that no token refers to are padding.
    indices: [B,S] the feature of each token, counted over all M inputs of its row; -1 for tokens of text.
  """

  inputs: jax.Array
  indices: jax.Array

  def spans(self, features: int) -> jax.Array:
    """[B,S] the number from 1 of the input whose features a token has, of which one input has so many; 0 for text."""
    return jnp.where(self.indices >= 0, self.indices // features + 1, 0)


Media = Mapping[str, TowerInputs]
"""The media of a batch, by the name of the tower."""
