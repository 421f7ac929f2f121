"""Saved outputs of a teacher: packed rows with the likeliest next tokens of every position, in ArrayRecord shards.

`manifest.json` says what was saved and which shards there are; it is written again after each shard, so a folder is
valid at any moment, and what began it can go on.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError, plural
from maxtext.data.batch import Batch, BatchWithState, IteratorState
from maxtext.data.local_rows import LocalRows
from maxtext.data.output_folder import OutputFolder
from maxtext.data.prepared_corpus import INDEX_BYTES, open_array_record
from maxtext.data.records import Reader, Shard

_LOG = logging.getLogger(__name__)
TEACHER_TOKENS, TEACHER_LOG_PROBS = "teacher_tokens", "teacher_log_probs"
"""Extra values [B,S,K] of a batch: the teacher's likeliest tokens, and their log-probabilities at its temperature."""
_MANIFEST = "manifest.json"
_SCHEMA = 1
_TOKEN_FIELDS = ("inputs", "targets", "positions", "segments")


@dataclass(frozen=True)
class SavedOutputs:
  """What a folder holds.

  Attributes:
    top_k: tokens that are kept of each distribution.
    temperature: that the teacher's logits were divided by.
    length: of a row.
    vocab_size: of the teacher.
    rows_per_batch: of the batches that were saved one after the other.
    model: digest of the teacher's parameters.
    data: what the rows were made of.
    shards: (file, rows), in order.
  """

  top_k: int
  temperature: float
  length: int
  vocab_size: int
  rows_per_batch: int
  model: str
  data: Any
  shards: tuple[tuple[str, int], ...] = field(default=())

  @staticmethod
  def read(folder: str) -> "SavedOutputs | None":
    """What is in a folder; None where there is nothing.

    Raises:
      ConfigError: its manifest cannot be read.
    """
    text = OutputFolder(folder).read(_MANIFEST)
    if text is None:
      return None
    try:
      found = json.loads(text)
      if found.pop("schema") != _SCHEMA:
        raise ValueError("its schema is another one")
      return SavedOutputs(**found | {"shards": tuple((str(file), int(rows)) for file, rows in found["shards"])})
    except (ValueError, KeyError, TypeError) as error:
      raise ConfigError(
        f"offline_data_dir={folder}: {_MANIFEST} cannot be read ({error}): write it to another folder."
      ) from None

  def write(self, folder: OutputFolder) -> None:
    """Writes the manifest."""
    folder.write(_MANIFEST, json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1).encode())

  @property
  def rows(self) -> int:
    """Of all shards."""
    return sum(rows for _, rows in self.shards)

  @property
  def record(self) -> np.dtype:
    """A row as it is stored."""
    numbers = [(name, np.int32, (self.length,)) for name in _TOKEN_FIELDS]
    kept = (self.length, self.top_k)
    return np.dtype(
      [*numbers, ("weights", np.float32, (self.length,)), (TEACHER_TOKENS, np.int32, kept),
       (TEACHER_LOG_PROBS, np.float32, kept)]
    )  # fmt: skip


@dataclass(frozen=True)
class TeacherOutputs:
  """Training data of saved outputs: first in the order in which they were saved, then in another for each epoch.

  Attributes:
    folder: of the shards.
    saved: what they are.
    epochs: how often they are read.
    seed: of the order of later epochs.
  """

  folder: str
  saved: SavedOutputs
  epochs: int
  seed: int

  def check(self, vocab_size: int, length: int, temperature: float) -> None:
    """Raises where a run's model, rows or temperature are others than those that were saved."""
    s = self.saved
    if not s.shards:
      raise ConfigError(f"offline_data_dir={self.folder} has no rows yet: `maxtext data teacher` writes them.")
    given = {"max_target_length": (length, s.length), "distill_temperature": (temperature, s.temperature)}
    for key, (ours, theirs) in given.items():
      if ours != theirs:
        raise ConfigError(
          f"{key}={ours}, and offline_data_dir={self.folder} was saved with {key}={theirs}: write that."
        )
    if s.vocab_size > vocab_size:
      raise ConfigError(
        f"offline_data_dir={self.folder} has tokens of {s.vocab_size:,} kinds, and vocab_size={vocab_size}."
      )

  def batches(self, batch: Batch, state: IteratorState | None) -> Iterator[BatchWithState]:
    """Batches like an abstract one, from an iterator state on."""
    total = batch.inputs.shape[0]
    local = LocalRows.of(batch.inputs.sharding, total, self.saved.length)
    used = 0 if state is None else int(state["rows"])
    for number in count(0 if state is None else int(state["batches"])):
      if used + total > self.epochs * self.saved.rows:
        if not number:
          raise ConfigError(
            f"offline_data_dir={self.folder} has {plural(self.saved.rows, 'row')}, and a batch takes {total}."
          )
        if not jax.process_index():
          there = plural(self.saved.rows, "row")
          _LOG.info(
            f"data: ended after {plural(number, 'batch')} ({there}); num_epoch={self.epochs} is how often it is read."
          )
        return
      rows = self._rows([self._place(used + int(n)) for n in local.numbers(total)])

      def place(name: str, like: Any, rows: np.ndarray = rows) -> jax.Array:
        return local.array(rows[name].astype(like.dtype), total, like.sharding)

      made = Batch(
        **{name: place(name, getattr(batch, name)) for name in (*_TOKEN_FIELDS, "weights")},
        extra={name: place(name, like) for name, like in batch.extra.items()},
      )
      used += total
      yield BatchWithState(made, partial(_state, number + 1, used))

  def _place(self, row: int) -> int:
    """Where a row of the run is saved."""
    epoch, place = divmod(row, self.saved.rows)
    return place if not epoch else int(_order(self.seed, epoch, self.saved.rows)[place])

  def _rows(self, places: list[int]) -> np.ndarray:
    starts = np.cumsum([0, *(rows for _, rows in self.saved.shards)])
    found = np.empty(len(places), self.saved.record)
    for number, place in enumerate(places):
      shard = int(np.searchsorted(starts, place, side="right")) - 1
      (record,) = _reader(self.folder, *self.saved.shards[shard]).read([place - int(starts[shard])])
      if len(record) != self.saved.record.itemsize:
        raise RunError(f"{self.saved.shards[shard][0]} in {self.folder} is damaged: a row has {len(record)} bytes.")
      found[number] = np.frombuffer(record, self.saved.record)[0]
    return found


def _state(batches: int, rows: int) -> IteratorState:
  return {"batches": np.array(batches, np.int32), "rows": np.array(rows, np.int64)}


@cache
def _order(seed: int, epoch: int, rows: int) -> np.ndarray:
  return np.random.default_rng([seed, epoch]).permutation(rows)


@cache
def _reader(folder: str, file: str, rows: int) -> Reader:
  return open_array_record(Shard(str(Path(folder) / file), rows, rows * INDEX_BYTES))
