"""The batch of the configured data, which an objective receives unless it declares another; the data-iterator state."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
  """Rows of tokens, already shifted: targets[b, s] is what follows inputs[b, s].

  Attributes:
    inputs: [B,S] tokens.
    targets: [B,S] tokens.
    positions: [B,S] position within the document.
    segments: [B,S] document number within the row from 1, 0 for padding; None where each row is one document.
    weights: [B,S] weight of each target in the loss: the loss mask.
    extra: [B,S,...] other values of targets by name, which an objective declares and its data brings.
    media: what the model's towers encode, `Media`; {} where rows are text alone.
    rotary_positions: [B,S,3] for RoPE of three components, where rows have media; None takes `positions`.
  """

  inputs: Any
  targets: Any
  positions: Any
  segments: Any
  weights: Any
  extra: Mapping[str, Any] = field(default_factory=dict)
  media: Mapping[str, Any] = field(default_factory=dict)
  rotary_positions: Any = None


IteratorState = dict[str, jax.Array | np.ndarray]
"""The data-iterator state: small arrays that, but for streamed data, do not depend on the number of hosts. When saved,
each process holds at least the part of its own rows; when restored, each has all of it."""


class BatchWithState(NamedTuple):
  """A batch with the data-iterator state after it, which the checkpoint of its step saves."""

  batch: Any  # a `Batch`, or what the objective declares
  iterator_state: Callable[[], IteratorState]  # called only when it is saved


class BatchSource(Protocol):
  """Data of an objective's own."""

  def batches(
    self, batch: Any, state: IteratorState | None, split: Literal["train", "eval"]
  ) -> Iterator[BatchWithState]:
    """Batches like an abstract one, from an iterator state on; None is the beginning.

    Every process of the run iterates alike, and the data ends on all of them with the same batch. `batch` has shape,
    dtype and sharding of each array. The iterator state of a batch is saved with the checkpoint of the step that used
    it and given back when the run resumes; the batches after it must then be the same, whatever the mesh.
    """
    ...
