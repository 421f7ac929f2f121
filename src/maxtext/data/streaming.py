"""Streamed data, which can only be read in order. Its iterator state depends on the number of hosts.

Every group of processes that holds the same rows reads its own part of the data, as the `datasets` library splits it,
and fills its rows one after the other. Documents are shuffled within windows of `shuffle_buffer` documents. The state
is that of a stream (see `packing`) and, as bytes, the library's state at the start of the stream's window.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.batch_size_rampup import BatchSizeSchedule
from maxtext.data.options import DataOptions
from maxtext.data.order import permutation
from maxtext.data.packing import Packing
from maxtext.data.sources.encoding import make_encoding
from maxtext.data.sources.hf import load
from maxtext.data.spans import check_token_ids
from maxtext.data.splits import Split
from maxtext.data.streams import PackedStreams, Rows

_CURSOR_BYTES = 4096
WIDTH = 3 + _CURSOR_BYTES // 4
"""Size of the iterator state, in int32."""


def streamed_rows(
  options: DataOptions,
  split: Split,
  packing: Packing,
  sizes: BatchSizeSchedule,
  state: np.ndarray,
  batch: int,
  group: tuple[int, int],
  share: tuple[int, int],
) -> Iterator[Rows]:
  """The rows of one group of processes, starting with a batch.

  Args:
    state: int32[WIDTH], the iterator state of the group; zeros are the beginning.
    group: its index, and the number of groups.
    share: the number of its blocks of rows, and of all blocks.
  """
  documents = _Windows(options, split, group, state)
  stream = PackedStreams(documents, packing, [0], state[None, :3], media=options.media)
  for number in itertools.count(batch):
    rows = stream.rows([0] * (sizes.of(number) * share[0] // share[1]))
    after = np.concatenate([rows.after[0], documents.cursor(int(rows.after[0, 0]))])
    yield rows._replace(after=np.tile(after, (share[0], 1)))


def check(options: DataOptions, split: Split) -> None:
  """Raises `ConfigError` if the data cannot be opened; reads none of it."""
  make_encoding(options, split)
  load(options.hub, split, streaming=True)


class _Windows:
  """The documents of one group, shuffled within windows that are read one after the other."""

  def __init__(self, options: DataOptions, split: Split, group: tuple[int, int], state: np.ndarray) -> None:
    from datasets.distributed import split_dataset_by_node

    self._data = split_dataset_by_node(load(options.hub, split, streaming=True), *group)
    self._encoding, self._epochs = make_encoding(options, split), split.epochs
    self._size = options.shuffle_buffer if split.shuffle else 1
    self._seed, self._vocab_size, self._group = options.seed, options.vocab_size, group[0]
    cursor = bytes(state[3:].tobytes()).rstrip(b"\0")
    self._epoch: int = 0
    if cursor:
      self._epoch, library = json.loads(cursor)
      self._data.load_state_dict(library)
    self._next = int(state[0]) // self._size  # the window that is read next
    self._cursors = {self._next: state[3:]}  # the library has a state only after the first read
    self._held: dict[int, list[np.ndarray]] = {}
    self._rows = self._read_on()

  def read(self, wanted: Sequence[tuple[int, int]]) -> list[np.ndarray | None]:
    """The tokens of documents (0, k)."""
    found = []
    for _, k in wanted:
      window, place = divmod(k, self._size)
      self._read_to(window)
      documents = self._held[window]
      table = permutation(len(documents), self._seed, window)
      found.append(documents[table[place]] if place < len(documents) else None)
    return found

  def cursor(self, first: int) -> np.ndarray:
    """The library's state at the start of a document's window, as int32; earlier windows are dropped."""
    window = first // self._size
    self._read_to(window)
    for old in [number for number in self._cursors if number < window]:
      del self._cursors[old], self._held[old]
    return self._cursors[window]

  def _read_to(self, window: int) -> None:
    while self._next <= window:
      if self._next not in self._cursors:
        self._cursors[self._next] = self._here()
      first = self._next * self._size
      rows = enumerate(itertools.islice(self._rows, self._size), first)
      self._held[self._next] = [self._tokens(number, values) for number, values in rows]
      self._next += 1

  def _tokens(self, number: int, values: list[Any]) -> np.ndarray:
    try:
      tokens = self._encoding(values)
      check_token_ids(tokens, self._vocab_size)
      return tokens
    except ConfigError as error:
      raise ConfigError(f"Document {number} of the stream of group {self._group}: {error}") from None

  def _here(self) -> np.ndarray:
    cursor = json.dumps([self._epoch, self._data.state_dict()]).encode()
    if len(cursor) > _CURSOR_BYTES:
      raise RunError(f"A position in this streamed data takes {len(cursor)} bytes: read it from files on disk.")
    return np.frombuffer(cursor.ljust(_CURSOR_BYTES, b"\0"), np.int32)

  def _read_on(self) -> Iterator[list[Any]]:
    while self._epoch < self._epochs:
      self._data.set_epoch(self._epoch)
      for row in self._data:
        yield [*(row[column] for column in self._encoding.columns), *map(row.get, self._encoding.image_columns)]
      self._epoch += 1
