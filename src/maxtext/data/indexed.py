"""Data as a function of the batch's number: the shortest `BatchSource`."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from maxtext.data.batch import BatchWithState, IteratorState
from maxtext.data.iterable import place_batch, state_after


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
      yield BatchWithState(place_batch(batch, made, number), partial(state_after, number))
