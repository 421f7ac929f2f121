"""Load balancing of context parallelism: token orders in which every device has the same causal work."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class LoadBalancedOrder:
  """How the tokens of a row are dealt to its parts.

  Attributes:
    kind: `dual_chunk_swap` gives part i of n the i-th and the i-th last of 2n chunks; `striped` every n-th token.
    parts: how many devices a row is split over.
  """

  kind: Literal["dual_chunk_swap", "striped"]
  parts: int

  @property
  def divisor(self) -> int:
    """What the length of a row must be a multiple of."""
    return self.parts if self.kind == "striped" else 2 * self.parts

  def apply(self, x: Any) -> Any:
    """[B,S,...] in the order of the text to the same in this order."""
    B, S, *rest = x.shape
    if self.kind == "striped":
      return x.reshape(B, S // self.parts, self.parts, *rest).swapaxes(1, 2).reshape(x.shape)
    chunks = x.reshape(B, 2, self.parts, -1, *rest)
    return _library(x).stack([chunks[:, 0], chunks[:, 1, ::-1]], axis=2).reshape(x.shape)

  def undo(self, x: Any) -> Any:
    """Back to the order of the text."""
    B, S, *rest = x.shape
    if self.kind == "striped":
      return x.reshape(B, self.parts, S // self.parts, *rest).swapaxes(1, 2).reshape(x.shape)
    pairs = x.reshape(B, self.parts, 2, -1, *rest)
    return _library(x).concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)

  def sequence(self, length: int) -> np.ndarray:
    """Which token of the text stands at each place."""
    return self.apply(np.arange(length, dtype=np.int32)[None])[0]


def _library(x: Any) -> Any:
  return x.__array_namespace__()
