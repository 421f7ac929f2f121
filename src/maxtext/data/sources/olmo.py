"""`dataset_type=olmo_grain`: sequences of a fixed length in raw token files, listed by an index.

The index is {"sequence_length": n, "dtype": "int32", "files": [path or {"path": path}, ...]}. A file is an array of
tokens, with or without NumPy's header; an incomplete sequence at its end is ignored.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.data.documents import DataSource, TokenCounts
from maxtext.data.options import DataOptions, OlmoOptions
from maxtext.data.order import FEW_SHARDS
from maxtext.data.records import Records, Shard
from maxtext.data.splits import Split

# A sequence is filtered out if an n-gram up to this length repeats this often in a row.
LONGEST_PERIOD, MOST_REPEATS = 13, 32


def open_olmo(options: DataOptions, split: Split) -> list[DataSource]:
  """Opens the sequences of an index."""
  olmo = options.olmo
  if not olmo.index_path:
    raise ConfigError("dataset_type=olmo_grain needs olmo_index_path: write the JSON index of the token files.")
  if split.name == "eval":
    raise ConfigError("dataset_type=olmo_grain has no evaluation data: leave eval_interval out.")
  length, dtype, paths = _index(olmo)
  if length not in (options.length, options.length + 1):
    raise ConfigError(
      f"olmo_index_path={olmo.index_path} has sequences of {length} tokens: write max_target_length={length}."
    )
  return [DataSource(_Sequences(paths, length, dtype, olmo.ngram_filter, split.threads))]


def is_repetitive(tokens: np.ndarray) -> bool:
  """Whether an n-gram of up to `LONGEST_PERIOD` tokens repeats `MOST_REPEATS` times or more in a row."""
  for period in range(1, LONGEST_PERIOD + 1):
    differ = np.flatnonzero(tokens[period:] != tokens[:-period])
    runs = np.diff(differ, prepend=-1, append=max(len(tokens) - period, 0)) - 1
    if runs.max() >= (MOST_REPEATS - 1) * period:
      return True
  return False


class _Sequences:
  """Every sequence is a document; a filtered one is an empty document."""

  window = FEW_SHARDS

  def __init__(self, paths: list[Path], length: int, dtype: np.dtype, ngram_filter: bool, threads: int) -> None:
    shards = [Shard(str(path), len(_array(path, dtype)) // length, 0) for path in paths]
    self.sizes = [shard.records for shard in shards]
    self.counts = TokenCounts(sum(self.sizes) * length, [length] * len(paths))
    self._ngram_filter = ngram_filter
    self._records = Records(shards, lambda shard: _SequenceReader(_array(Path(shard.path), dtype), length), threads)
    self.identity = {
      "documents": sum(self.sizes),
      "files": [[path.name, size] for path, size in zip(paths, self.sizes, strict=True)],
      "length": length,
      "ngram_filter": ngram_filter,
    }

  def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
    """The sequences with these numbers."""
    return self._records.read(numbers)

  def tokens(self, record: np.ndarray) -> np.ndarray:
    """The tokens of a sequence; none if it is filtered out."""
    return record[:0] if self._ngram_filter and is_repetitive(record) else record

  def where(self, number: int) -> str:
    """Describes the file and position of a sequence, for messages."""
    return self._records.where(number)


class _SequenceReader:
  def __init__(self, tokens: np.ndarray, length: int) -> None:
    self._sequences = tokens[: len(tokens) // length * length].reshape(-1, length)

  def read(self, places: list[int]) -> list[np.ndarray]:
    """The sequences at these indices."""
    return list(self._sequences[places])


def _index(olmo: OlmoOptions) -> tuple[int, np.dtype, list[Path]]:
  path = Path(olmo.index_path).expanduser()
  try:
    index: dict[str, Any] = json.loads(path.read_text())
    listed = [file if isinstance(file, str) else file["path"] for file in index["files"]]
    length, dtype = int(index["sequence_length"]), np.dtype(index.get("dtype", "int32"))
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise ConfigError(f"olmo_index_path={path} is not an index of token files: {error!r}.") from None
  before, after = olmo.remap_from, olmo.remap_to
  files = [Path(after + file.removeprefix(before) if before and file.startswith(before) else file) for file in listed]
  if missing := [str(file) for file in files if not file.exists()]:
    raise ConfigError(f"{missing[0]}, listed in {path}, is not there: see olmo_path_remap_from and olmo_path_remap_to.")
  return length, dtype, files


def _array(path: Path, dtype: np.dtype) -> np.ndarray:
  with path.open("rb") as file:
    header = file.read(6) == b"\x93NUMPY"
  return np.load(path, mmap_mode="r") if header else np.memmap(path, dtype, mode="r")
