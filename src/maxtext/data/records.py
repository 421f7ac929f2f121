"""Random access to records in many files, with a limit on open files.

A reader costs a file handle and an index in memory, so only the least recently used few stay open, however many shards
there are. Records are read in bulk: a call costs time in proportion to the shard, a record in a large call little.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from maxtext.configs.errors import RunError

MOST_OPEN = 256
MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Shard:
  """A file, or a part of one, that is opened as a whole."""

  path: str
  records: int
  open_bytes: int  # memory that it takes while open
  part: int = 0


class Reader(Protocol):
  """An open shard."""

  def read(self, places: list[int]) -> Sequence[Any]:
    """The records at these places."""
    ...


class Records:
  """The records of all shards, with consecutive numbers."""

  def __init__(self, shards: Sequence[Shard], open_shard: Callable[[Shard], Reader], threads: int = 1) -> None:
    """`threads` shards are read at a time."""
    self.shards, self._open_shard, self._threads = shards, open_shard, threads
    self._ends = np.cumsum([shard.records for shard in shards])
    self._open: OrderedDict[int, Reader] = OrderedDict()
    self._open_bytes = 0
    self._lock = threading.Lock()
    self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

  def read(self, numbers: Sequence[int]) -> list[Any]:
    """The records with these numbers."""
    found: list[Any] = [None] * len(numbers)
    wanted = np.asarray(numbers, np.int64)
    order = np.argsort(wanted, kind="stable")
    shards = np.searchsorted(self._ends, wanted[order], side="right")
    cuts = np.flatnonzero(np.diff(shards)) + 1

    def read_group(group: np.ndarray) -> None:
      number = int(np.searchsorted(self._ends, wanted[group[0]], side="right"))
      first = self._ends[number] - self.shards[number].records
      places = (wanted[group] - first).tolist()
      try:
        records = self._reader(number).read(places)
      except RunError:
        raise
      except RuntimeError as error:  # what ArrayRecord raises where a checksum of its own is wrong
        reason = str(error).splitlines()[0]
        raise RunError(f"{self.shards[number].path} is damaged: {reason}. Copy or write the file again.") from None
      for place, record in zip(group.tolist(), records, strict=True):
        found[place] = record

    groups = [group for group in np.split(order, cuts) if len(group)]
    for _ in self._pool.map(read_group, groups) if self._pool and len(groups) > 1 else map(read_group, groups):
      pass
    return found

  def where(self, number: int) -> str:
    """The file of a record, and its number there, from 0."""
    shard = int(np.searchsorted(self._ends, number, side="right"))
    path = self.shards[shard].path
    first = next(i for i, other in enumerate(self.shards) if other.path == path)
    return f"{path}, record {number - int(self._ends[first]) + self.shards[first].records}"

  @property
  def open_shards(self) -> int:
    """How many are open now."""
    return len(self._open)

  def _reader(self, number: int) -> Reader:
    with self._lock:
      if number in self._open:
        self._open.move_to_end(number)
        return self._open[number]
    reader = self._open_shard(self.shards[number])
    with self._lock:
      if number not in self._open:
        self._open[number] = reader
        self._open_bytes += self.shards[number].open_bytes
      while len(self._open) > MOST_OPEN or (self._open_bytes > MOST_BYTES and len(self._open) > 1):
        # A thread that still reads from it holds a reference; it closes after that.
        dropped, _ = self._open.popitem(last=False)
        self._open_bytes -= self.shards[dropped].open_bytes
    return reader
