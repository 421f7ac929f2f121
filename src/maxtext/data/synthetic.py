"""Synthetic data: tokens with the frequencies of words in a text."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from maxtext.data.batch import Batch, BatchWithState, IteratorState
from maxtext.data.hashing import splitmix64


def synthetic_batches(
  vocab: int, rows: int, length: int, seed: int, sharding: Sharding, position: IteratorState | None = None
) -> Iterator[BatchWithState]:
  """Infinite batches; each process makes only the rows that its devices hold."""

  def array(cell: Callable[[np.ndarray, np.ndarray], np.ndarray], dtype: type) -> jax.Array:
    def block_of(index: Any) -> np.ndarray:
      row, column = (np.arange(n, dtype=np.uint64)[i] for n, i in zip((rows, length), index, strict=True))
      return np.broadcast_to(cell(row[:, None], column[None]), (len(row), len(column))).astype(dtype)

    return jax.make_array_from_callback((rows, length), sharding, block_of)

  positions = array(lambda row, column: column, np.int32)
  weights = array(lambda row, column: np.ones(1), np.float32)
  for step in itertools.count(0 if position is None else int(position["batches"])):
    inputs = array(partial(_token, vocab, seed, step, 0), np.int32)
    targets = array(partial(_token, vocab, seed, step, 1), np.int32)
    yield BatchWithState(Batch(inputs, targets, positions, None, weights), partial(_after, step))


def _after(step: int) -> IteratorState:
  return {"batches": np.array(step + 1, np.int32)}


def _token(vocab: int, seed: int, step: int, shift: int, row: np.ndarray, column: np.ndarray) -> np.ndarray:
  """Token t has a probability of about 1/t, as words have, so that there is something to learn."""
  stream = splitmix64(splitmix64(splitmix64(np.array(seed, np.uint64)) ^ np.uint64(step)) ^ row)
  uniform = (splitmix64(stream ^ (column + np.uint64(shift))) >> np.uint64(11)) * 2.0**-53
  return np.floor(np.exp(uniform * np.log(vocab))) - 1
