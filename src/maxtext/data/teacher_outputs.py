"""Saved outputs of a teacher: packed rows with the likeliest next tokens of every position, in ArrayRecord shards.

`manifest.json` says what was saved and which shards there are; it is written again after each shard, so a folder is
valid at any moment, and what began it can go on.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError, plural
from maxtext.data.batch import Batch, BatchWithState, IteratorState
from maxtext.data.fingerprint import check_same_data, to_array
from maxtext.data.local_rows import LocalRows
from maxtext.data.output_folder import OutputFolder
from maxtext.data.prepared_corpus import INDEX_BYTES, open_array_record
from maxtext.data.records import Records, Shard
from maxtext.data.safe_paths import resolve_inside

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
    vocab_size: tokens that the distributions are of.
    rows_per_batch: of the batches that were saved one after the other.
    model: digest of the teacher's parameters.
    data: what the rows were made of, and in which order.
    shards: (file, rows), in order.
  """

  top_k: PositiveInt
  temperature: PositiveFloat
  length: PositiveInt
  vocab_size: PositiveInt
  rows_per_batch: PositiveInt
  model: str
  data: Any
  shards: tuple[tuple[str, NonNegativeInt], ...] = ()

  @staticmethod
  def read(folder: str) -> "SavedOutputs | None":
    """What is in a folder; None where there is nothing.

    Raises:
      ConfigError: the folder is none, or its manifest cannot be read.
    """
    path = local_folder(folder)
    try:
      content = json.loads((path / _MANIFEST).read_bytes())
      schema = content.pop("schema") if isinstance(content, dict) else None
      if schema != _SCHEMA:
        raise ValueError(f"its schema is {schema}, and this version reads {_SCHEMA}")
      return TypeAdapter(SavedOutputs).validate_json(json.dumps(content), strict=True)
    except FileNotFoundError:
      return None
    except (OSError, ValueError, KeyError, ValidationError) as error:
      reason = f"{len(error.errors())} wrong values" if isinstance(error, ValidationError) else str(error)
      raise ConfigError(
        f"offline_data_dir={folder}: {_MANIFEST} cannot be read ({reason}): choose another folder."
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
    seed: of the order of later epochs; None keeps the first one.
  """

  folder: str
  saved: SavedOutputs
  epochs: int
  seed: int | None

  def check(self, vocab_size: int, length: int, temperature: float) -> None:
    """Raises where a run's model, rows or temperature are others than those that were saved."""
    s = self.saved
    if not s.rows:
      raise ConfigError(f"offline_data_dir={self.folder} has no rows yet: `maxtext data teacher` writes them.")
    given = {"max_target_length": (length, s.length), "distill_temperature": (temperature, s.temperature)}
    for key, (ours, theirs) in given.items():
      if ours != theirs:
        raise ConfigError(
          f"{key}={ours}, and offline_data_dir={self.folder} was saved with {key}={theirs}: write that."
        )
    if s.vocab_size > vocab_size or s.top_k > s.vocab_size:
      raise ConfigError(
        f"offline_data_dir={self.folder} has tokens of {s.vocab_size:,} kinds, and vocab_size={vocab_size}."
      )

  def batches(self, batch: Batch, state: IteratorState | None) -> Iterator[BatchWithState]:
    """Batches like an abstract one, from an iterator state on."""
    total, about = batch.inputs.shape[0], to_array(self._about)
    local = LocalRows.of(batch.inputs.sharding, total, self.saved.length)
    if state is not None:
      check_same_data(np.asarray(state.get("about", to_array({}))), self._about)
    used, first = (0, 0) if state is None else (int(state["rows"]), int(state["batches"]))
    for number in count(first):
      if used + total > self.epochs * self.saved.rows:
        self._log_end(number, total)
        return
      rows = self._rows([self._place(used + int(n)) for n in local.numbers(total)])

      def place(name: str, like: Any, rows: np.ndarray = rows) -> jax.Array:
        return local.array(rows[name].astype(like.dtype), total, like.sharding)

      fields: dict[str, Any] = {name: place(name, getattr(batch, name)) for name in (*_TOKEN_FIELDS, "weights")}
      made = Batch(
        **fields,
        extra={name: place(name, like) for name, like in batch.extra.items()},
      )
      used += total
      yield BatchWithState(made, partial(_state, number + 1, used, about))

  @property
  def _about(self) -> dict[str, Any]:
    saved = self.saved
    return {"teacher": saved.model, "data": saved.data, "rows": saved.rows, "top_k": saved.top_k, "seed": self.seed}

  def _log_end(self, batches: int, total: int) -> None:
    there = plural(self.saved.rows, "row")
    if not batches:
      raise ConfigError(f"offline_data_dir={self.folder} has {there}, and a batch takes {total}.")
    if not jax.process_index():
      again = f"num_epoch={self.epochs} is how often it is read"
      _LOG.info(f"data: ended after {plural(batches, 'batch')} ({there}); {again}.")

  def _place(self, row: int) -> int:
    """Where a row of the run is saved."""
    epoch, place = divmod(row, self.saved.rows)
    return place if not epoch or self.seed is None else int(_order(self.seed, epoch, self.saved.rows)[place])

  def _rows(self, places: list[int]) -> np.ndarray:
    found = np.empty(len(places), self.saved.record)
    for number, record in enumerate(self._records.read(places)):
      if len(record) != self.saved.record.itemsize:
        raise RunError(f"{self._records.where(places[number])} is damaged: a row has {len(record)} bytes.")
      found[number] = np.frombuffer(record, self.saved.record)[0]
    return found

  @cached_property
  def _records(self) -> Records:
    folder = local_folder(self.folder)
    shards = [Shard(str(resolve_inside(folder, file)), rows, rows * INDEX_BYTES) for file, rows in self.saved.shards]
    return Records(shards, open_array_record)


def local_folder(folder: str) -> Path:
  """The folder of saved outputs, which is on a disk."""
  if "://" in folder:
    raise ConfigError(f"offline_data_dir={folder} must be a folder on a disk: copy it there.")
  return Path(folder).expanduser()


def _state(batches: int, rows: int, about: np.ndarray) -> IteratorState:
  return {"batches": np.array(batches, np.int32), "rows": np.array(rows, np.int64), "about": about}


@cache
def _order(seed: int, epoch: int, rows: int) -> np.ndarray:
  return np.random.default_rng([seed, epoch]).permutation(rows)
