"""Data as a function of the batch's number: the shortest `BatchSource`."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from maxtext.data.batch import BatchWithState, IteratorState


@dataclass(frozen=True)
class IndexedBatches:
  """Batches that a function makes from their number, so that a position is that number.

  Attributes:
    make: returns the whole batch number n, counted from 0, as NumPy arrays in the tree that the objective declares, or
      None where the data has ended. It is called on every process and must be deterministic.
    make_eval: the same for evaluation; None where there is none.
  """

  make: Callable[[int], Any]
  make_eval: Callable[[int], Any] | None = None

  def batches(
    self, batch: Any, state: IteratorState | None, split: Literal["train", "eval"]
  ) -> Iterator[BatchWithState]:
    """See `BatchSource`."""
    make = self.make if split == "train" else self.make_eval
    for number in itertools.count(0 if state is None else int(state["batches"])):
      made = None if make is None else make(number)
      if made is None:
        return
      yield BatchWithState(jax.tree.map(_placed, batch, made), partial(_after, number))


def _placed(struct: jax.ShapeDtypeStruct, array: Any) -> jax.Array:
  host = np.asarray(array, struct.dtype)
  assert host.shape == struct.shape, f"an array of the batch is {list(host.shape)}, declared as {list(struct.shape)}"
  return jax.make_array_from_callback(host.shape, struct.sharding, lambda index: host[index])


def _after(number: int) -> IteratorState:
  return {"batches": np.array(number + 1, np.int32)}
