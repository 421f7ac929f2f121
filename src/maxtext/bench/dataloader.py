"""Benchmark of the dataloader: tokens per second without training, and the share of each stage."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
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


class DataThroughput(NamedTuple):
  """Tokens per second, and the share of each batch that is not padding."""

  tokens_per_second: float
  packing_efficiency: float


def abstract_batch(shape: tuple[int, int]) -> Batch:
  """Shapes and shardings of a batch of `shape` (rows, length), sharded by rows over all devices."""
  mesh = Mesh(np.array(jax.devices()), ("rows",))
  sharding = NamedSharding(mesh, PartitionSpec("rows" if shape[0] % mesh.size == 0 else None))

  def array(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  whole = array(jnp.int32)
  return Batch(whole, whole, whole, whole, array(jnp.float32))


def measure_throughput(options: DataOptions, batch: Batch, seconds: float) -> DataThroughput:
  """The throughput of the dataloader with its processes and threads, after the first batch."""
  feed = make_dataloader(options, batch)
  jax.block_until_ready(next(feed).batch)
  start, tokens, cells = perf_counter(), 0, 0
  for fed in feed:
    jax.block_until_ready(fed.batch)
    tokens, cells = tokens + int(np.asarray(fed.batch.weights).sum()), cells + fed.batch.weights.size
    if perf_counter() - start >= seconds:
      break
  return DataThroughput(tokens / (perf_counter() - start), tokens / max(cells, 1))


def measure_stages(options: DataOptions, batch: Batch, seconds: float) -> dict[str, float]:
  """The share of time of each stage in one process without threads; empty for synthetic and streamed data."""
  split, clock = options.train, _StageClock()
  if options.kind == DatasetType.SYNTHETIC or is_streamed(options, split):
    return {}
  rows, length = batch.inputs.shape
  sources = cut_long_documents(open_sources(options, split), rows, length)
  timed = [DataSource(_TimedDocuments(source.documents, clock), source.weight, source.spans) for source in sources]
  mixture = SourceMixture(timed, rows, options.seed, split.shuffle, vocab_size=options.vocab_size)
  streams = PackedStreams(mixture, make_packing(options, length), range(rows), read_ahead=-(-split.read_ahead // rows))
  local_rows = LocalRows.of(batch.inputs.sharding, rows, length)
  while sum(clock.seconds.values()) < seconds:
    with clock.time("pack"):
      made = streams.rows(range(rows))
    with clock.time("place"):
      fed, _ = place_rows(0, made, local_rows=local_rows, total=rows, about=np.zeros(0, np.uint8), extra={})
      jax.block_until_ready(fed.batch)
  whole = sum(clock.seconds.values())
  return {name: stage_seconds / whole for name, stage_seconds in clock.seconds.items()}


class _StageClock:
  """Seconds by stage. A nested stage is not counted in the outer one."""

  def __init__(self) -> None:
    self.seconds = dict.fromkeys(("read", "tokenize", "pack", "place"), 0.0)

  @contextmanager
  def time(self, stage: str) -> Iterator[None]:
    start, before = perf_counter(), sum(self.seconds.values())
    yield
    inner = sum(self.seconds.values()) - before
    self.seconds[stage] += perf_counter() - start - inner


class _TimedDocuments:
  """Documents whose reads and tokenization are timed."""

  def __init__(self, documents: Documents, clock: _StageClock) -> None:
    self.sizes, self.window, self.identity = documents.sizes, documents.window, documents.identity
    self.counts, self.where = documents.counts, documents.where
    self._documents, self._clock = documents, clock

  def read(self, numbers: Sequence[int]) -> Sequence[Any]:
    with self._clock.time("read"):
      return self._documents.read(numbers)

  def tokens(self, record: Any) -> np.ndarray:
    with self._clock.time("tokenize"):
      return self._documents.tokens(record)
