"""Load balancing of context parallelism: token orders in which causal attention costs every device the same."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class LoadBalancedOrder:
  """How the tokens of a row are assigned to its shards.

  Attributes:
    kind: `dual_chunk_swap` gives shard i of n the i-th and the i-th last of 2n chunks; `striped` every n-th token.
    parts: number of shards of a row.
  """

  kind: Literal["dual_chunk_swap", "striped"]
  parts: int

  @property
  def divisor(self) -> int:
    """The length of a row must be a multiple of this."""
    return self.parts if self.kind == "striped" else 2 * self.parts

  def apply(self, x: Any) -> Any:
    """Reorders [B,S,...] from the order of the text to this order."""
    B, S, *rest = x.shape
    if self.kind == "striped":
      return x.reshape(B, S // self.parts, self.parts, *rest).swapaxes(1, 2).reshape(x.shape)
    chunks = x.reshape(B, 2, self.parts, -1, *rest)
    return _library(x).stack([chunks[:, 0], chunks[:, 1, ::-1]], axis=2).reshape(x.shape)

  def undo(self, x: Any) -> Any:
    """Reorders [B,S,...] from this order to the order of the text."""
    B, S, *rest = x.shape
    if self.kind == "striped":
      return x.reshape(B, self.parts, S // self.parts, *rest).swapaxes(1, 2).reshape(x.shape)
    pairs = x.reshape(B, self.parts, 2, -1, *rest)
    return _library(x).concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)

  def sequence(self, length: int) -> np.ndarray:
    """The index in the text of each token in this order, [length]."""
    return self.apply(np.arange(length, dtype=np.int32)[None])[0]


def _library(x: Any) -> Any:
  return x.__array_namespace__()
