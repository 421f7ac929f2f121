"""JSON lines with random access, by an index of line offsets that is built at opening."""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext.configs.errors import RunError
from maxtext.data.records import Shard


def json_lines_shard(path: str) -> Shard:
  """The shard of a whole file."""
  lines = len(_index(path))
  return Shard(path, lines, lines * 16)


class JsonLinesReader:
  """Reads lines of an open file."""

  def __init__(self, path: str) -> None:
    self._path, self._places = path, _index(path)
    self._file = os.open(path, os.O_RDONLY)

  def read(self, places: list[int]) -> list[bytes]:
    """The lines with these numbers, without the empty ones."""
    return [os.pread(self._file, size, start) for start, size in self._places[places].tolist()]

  def __del__(self) -> None:
    if hasattr(self, "_file"):
      os.close(self._file)


def json_values(line: bytes, columns: Sequence[str], images: Sequence[str] = ()) -> list[Any]:
  """The values of some fields of the object in a line, the last of `images`; a field that a line leaves out is None."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    raise RunError("not a JSON object.") from None
  if not isinstance(row, dict):
    raise RunError("not a JSON object.")
  if not any(column in row for column in columns):
    has = ", ".join(map(str, row)) or "nothing"
    raise RunError(f"no {' or '.join(columns)}; it has {has}. Set the *_data_columns keys.")
  return [row.get(column) for column in (*columns, *images)]


def _index(path: str) -> np.ndarray:
  """Offset and size of every line that is not empty."""
  places: list[tuple[int, int]] = []
  offset = 0
  with open(path, "rb") as file:
    for line in file:
      if line.strip():
        places.append((offset, len(line)))
      offset += len(line)
  return np.array(places, np.int64).reshape(-1, 2)
