"""How fast the data of a configuration can be made, alone, and what bounds it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs.types import DatasetType
from maxtext.data.batch import Batch
from maxtext.data.dataloader import is_streamed, make_dataloader, make_packing
from maxtext.data.documents import DataSource, Documents
from maxtext.data.local_rows import LocalRows, place_rows
from maxtext.data.mixture import SourceMixture
from maxtext.data.options import DataOptions
from maxtext.data.sources import open_sources
from maxtext.data.spans import cut_long_documents
from maxtext.data.streams import PackedStreams


class Speed(NamedTuple):
  """Tokens a second, and how much of the rows they fill."""

  tokens_per_second: float
  filled: float


def abstract_batch(shape: tuple[int, int]) -> Batch:
  """A batch of so many rows of a length on all devices, split by rows."""
  mesh = Mesh(np.array(jax.devices()), ("rows",))
  sharding = NamedSharding(mesh, PartitionSpec("rows" if shape[0] % mesh.size == 0 else None))

  def array(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  whole = array(jnp.int32)
  return Batch(whole, whole, whole, whole, array(jnp.float32))


def speed(options: DataOptions, batch: Batch, seconds: float) -> Speed:
  """Of the feed of such batches, with its processes and threads, after the first batch."""
  feed = make_dataloader(options, batch)
  jax.block_until_ready(next(feed).batch)
  start, tokens, cells = time.perf_counter(), 0, 0
  for fed in feed:
    jax.block_until_ready(fed.batch)
    tokens, cells = tokens + int(np.asarray(fed.batch.weights).sum()), cells + fed.batch.weights.size
    if time.perf_counter() - start >= seconds:
      break
  return Speed(tokens / (time.perf_counter() - start), tokens / max(cells, 1))


def stages(options: DataOptions, batch: Batch, seconds: float) -> dict[str, float]:
  """The shares of time that one process alone, without threads, spends in each stage; of random access only."""
  split, clock = options.train, _Clock()
  if options.kind == DatasetType.SYNTHETIC or is_streamed(options, split):
    return {}
  rows, length = batch.inputs.shape
  sources = cut_long_documents(open_sources(options, split), rows, length)
  watched = [DataSource(_Timed(source.documents, clock), source.weight, source.spans) for source in sources]
  mixture = SourceMixture(watched, rows, options.seed, split.shuffle, vocab_size=options.vocab_size)
  streams = PackedStreams(mixture, make_packing(options, length), range(rows), read_ahead=-(-split.read_ahead // rows))
  local_rows = LocalRows.of(batch.inputs.sharding, rows, length)
  while sum(clock.spent.values()) < seconds:
    with clock.during("pack"):
      made = streams.rows(range(rows))
    with clock.during("place"):
      fed, _ = place_rows(0, made, local_rows=local_rows, total=rows, about=np.zeros(0, np.uint8))
      jax.block_until_ready(fed.batch)
  whole = sum(clock.spent.values())
  return {name: spent / whole for name, spent in clock.spent.items()}


class _Clock:
  """Time by stage; a stage within a stage is not counted in the outer one."""

  def __init__(self) -> None:
    self.spent = dict.fromkeys(("read", "tokenize", "pack", "place"), 0.0)

  @contextmanager
  def during(self, stage: str) -> Iterator[None]:
    start, before = time.perf_counter(), sum(self.spent.values())
    yield
    inner = sum(self.spent.values()) - before
    self.spent[stage] += time.perf_counter() - start - inner


class _Timed:
  """Documents that are watched."""

  def __init__(self, documents: Documents, clock: _Clock) -> None:
    self.sizes, self.window, self.identity = documents.sizes, documents.window, documents.identity
    self.counts, self.where = documents.counts, documents.where
    self._documents, self._clock = documents, clock

  def read(self, numbers: Sequence[int]) -> Sequence[Any]:
    with self._clock.during("read"):
      return self._documents.read(numbers)

  def tokens(self, record: Any) -> np.ndarray:
    with self._clock.during("tokenize"):
      return self._documents.tokens(record)
