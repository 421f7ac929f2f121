"""Batches from any Python iterable, as `maxtext.train(data=...)` takes them."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, cast

import jax
import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.errors import plural
from maxtext.data.batch import Batch, BatchSource, BatchWithState, IteratorState

_LOG = logging.getLogger(__name__)

Batches = Iterable[Any] | Callable[[], Iterable[Any]]
"""Batches: an iterable, or a function that returns one, such as a generator function."""


@dataclass(frozen=True)
class IterableBatches:
  """The whole batches of an iterable, in its order.

  A resumed run skips the batches that it has used, so the iterable must begin anew and give the same batches every
  time: prefer a function, a list or a class with `__iter__` over a generator, which can be read only once. Every
  process of a run iterates over all rows.

  Attributes:
    train: the batches. A batch is a tree of NumPy arrays as the objective declares it; where that is the batch of the
      configured data, an array of tokens [rows, max_target_length + 1] will do, whose rows are one document each.
    evaluation: the same for evaluation; None where there is none.
  """

  train: Batches
  evaluation: Batches | None = None

  def batches(
    self, batch: Any, state: IteratorState | None, split: Literal["train", "eval"]
  ) -> Iterator[BatchWithState]:
    """See `BatchSource`."""
    source = self.train if split == "train" else self.evaluation
    if source is None:
      return
    skipped = 0 if state is None else int(state["batches"])
    iterable = source() if callable(source) else source
    used = skipped
    for made in islice(iterable, skipped, None):
      yield BatchWithState(place_batch(batch, made, used), partial(state_after, used))
      used += 1
    if not used and split == "train":
      raise ConfigError("data: there is no batch. A generator that was read before has ended: give a function instead.")
    if split == "train" and not jax.process_index():
      _LOG.info(f"data: ended after {plural(used, 'batch')}.")


def as_batch_source(data: "BatchSource | Batches | None") -> BatchSource | None:
  """What `maxtext.train(data=...)` takes, as a `BatchSource`.

  Raises:
    ConfigError: it is neither a source, nor an iterable, nor a function.
  """
  if data is None or hasattr(data, "batches"):
    return cast(BatchSource | None, data)
  if isinstance(data, str | bytes | dict | np.ndarray) or not (callable(data) or isinstance(data, Iterable)):
    raise ConfigError(
      f"data is a {type(data).__name__}: it must be an iterable over batches, a function that returns one, or an "
      f"object with batches(batch, state, split), such as IndexedBatches."
    )
  return IterableBatches(data)


def place_batch(abstract: Any, made: Any, number: int) -> Any:
  """A batch of NumPy arrays on the devices, checked against its declaration.

  Args:
    abstract: the tree of the batch, with shape, dtype and sharding of each array.
    made: the batch.
    number: of the batch, counted from 0, for messages.

  Raises:
    ConfigError: it has other arrays, shapes or dtypes than declared.
  """
  if isinstance(abstract, Batch) and not isinstance(made, Batch) and hasattr(made, "__array__"):
    made = _from_tokens(abstract, np.asarray(made), number)
  declared, structure = jax.tree_util.tree_flatten_with_path(abstract)
  arrays = dict(jax.tree_util.tree_flatten_with_path(made)[0])
  if arrays.keys() != dict(declared).keys():
    names = [", ".join(map(_name, paths)) or "nothing" for paths in (arrays, dict(declared))]
    raise ConfigError(f"data: batch {number} has {names[0]}, and the objective declares {names[1]}.")
  placed = [_placed(struct, arrays[path], _name(path), number) for path, struct in declared]
  return jax.tree.unflatten(structure, placed)


def state_after(number: int) -> IteratorState:
  """The iterator state after a batch, which is how many batches were used."""
  return {"batches": np.array(number + 1, np.int32)}


def _from_tokens(abstract: Batch, tokens: np.ndarray, number: int) -> Batch:
  rows, length = abstract.inputs.shape
  if tokens.shape != (rows, length + 1):
    raise ConfigError(
      f"data: batch {number} is an array {list(tokens.shape)}; tokens are [{rows}, {length + 1}], rows (devices x "
      f"per_device_batch_size) by max_target_length + 1."
    )
  positions, ones = np.broadcast_to(np.arange(length), (rows, length)), np.ones((rows, length))
  segments = None if abstract.segments is None else ones.astype(np.int32)
  return Batch(tokens[:, :-1], tokens[:, 1:], positions, segments, ones)


def _placed(struct: jax.ShapeDtypeStruct, array: Any, name: str, number: int) -> jax.Array:
  host = np.asarray(array)
  if host.shape != struct.shape:
    raise ConfigError(f"data: batch {number}: {name} is {list(host.shape)}, declared as {list(struct.shape)}.")
  if np.issubdtype(struct.dtype, np.integer) and host.dtype.kind not in "iub":
    raise ConfigError(f"data: batch {number}: {name} is {host.dtype}, declared as {struct.dtype}.")
  host = host.astype(struct.dtype)
  return jax.make_array_from_callback(host.shape, struct.sharding, lambda index: host[index])


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator=".") or "the array"
