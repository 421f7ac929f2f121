"""The one form in which every objective receives data."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
  """Rows of tokens, already shifted: targets[b, s] is what follows inputs[b, s].

  Attributes:
    inputs: [B,S] tokens.
    targets: [B,S] tokens.
    positions: [B,S] position within the document.
    segments: [B,S] document number within the row from 1, 0 for padding; None where each row is one document.
    weights: [B,S] share of each target in the loss.
  """

  inputs: Any
  targets: Any
  positions: Any
  segments: Any
  weights: Any
