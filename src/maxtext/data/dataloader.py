"""What a run is fed with, on its devices, and where the data stands after each batch."""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.configs import ConfigError
from maxtext.configs.errors import plural
from maxtext.configs.types import DatasetType
from maxtext.data import fingerprint, streaming
from maxtext.data.batch import Batch, BatchWithState, IteratorState
from maxtext.data.batch_size_rampup import BatchSizeSchedule, batch_size_schedule
from maxtext.data.documents import DataSource, Documents
from maxtext.data.local_rows import LocalRows, place_rows
from maxtext.data.mixture import SourceMixture
from maxtext.data.options import DataOptions
from maxtext.data.packing import LOOK_AHEAD, Packing
from maxtext.data.prefetch import Prefetcher
from maxtext.data.sources import open_sources
from maxtext.data.sources.hf import is_remote
from maxtext.data.spans import count_tokens, cut_long_documents
from maxtext.data.splits import Split, SplitName
from maxtext.data.streams import Rows
from maxtext.data.synthetic import synthetic_batches
from maxtext.data.worker_shard import WorkerShard
from maxtext.data.workers import choose_workers, rows_from_processes

_LOG = logging.getLogger(__name__)


class OpenedData(NamedTuple):
  """Data that is there and can be read.

  Attributes:
    options: which.
    batch: an abstract one.
    split: training or evaluation.
    sources: with long documents cut; none where data is made up or streamed.
  """

  options: DataOptions
  batch: Batch
  split: SplitName
  sources: tuple[DataSource, ...]


def open_data(options: DataOptions, batch: Batch, split: SplitName = "train") -> OpenedData:
  """Finds the data and reads a document for each row that this process makes; a mistake in it is raised here.

  No device is touched, so that it can be done before anything costly is.
  """
  keys = options.split(split)
  if options.kind == DatasetType.SYNTHETIC:
    return OpenedData(options, batch, split, ())
  if is_streamed(options, keys):
    streaming.check(options, keys)
    return OpenedData(options, batch, split, ())
  (rows, length), sizes = batch.inputs.shape, _schedule(options, batch, split)
  local_rows = LocalRows.of(batch.inputs.sharding, rows, length)
  sources = cut_long_documents(open_sources(options, keys), sizes.streams, length)
  opened = OpenedData(options, batch, split, tuple(sources))
  mixture = SourceMixture(sources, sizes.streams, options.seed, keys.shuffle, keys.epochs, options.vocab_size)
  last = sizes.streams - sizes.streams // sizes.of(0)  # of those that the first batch takes
  *_, found = mixture.read([(int(stream), 0) for stream in (*local_rows.numbers(sizes.streams), last)])
  if found is None and not keys.pad:
    raise _too_little_data(opened)
  return opened


def make_dataloader(
  options: DataOptions,
  batch: Batch,
  position: IteratorState | None = None,
  split: SplitName = "train",
  data: OpenedData | None = None,
) -> Iterator[BatchWithState]:
  """Batches like an abstract one, from a position on. Each process makes only the rows that its devices hold.

  It ends where the data ends, on all processes with the same batch. Drop it, or `close()` it, to end its threads and
  processes. `data` is what `open_data` found for the same arguments, where it was called already.
  """
  opened = data or open_data(options, batch, split)
  feed = _LOADERS.get(options.kind, _document_batches)(opened, position)
  if options.reuse_batch and split == "train":
    return itertools.repeat(next(feed))
  return feed


def make_packing(options: DataOptions, length: int) -> Packing:
  """How rows are filled."""
  if options.kind == DatasetType.OLMO_GRAIN or not options.pack:
    return Packing(length, "first_fit", max_segments=1, look_ahead=1)
  kind = "concat_then_split" if options.kind == DatasetType.C4MLPERF else options.packing_kind
  return Packing(length, kind, max(options.max_segments, 0), 1 if kind == "concat_then_split" else LOOK_AHEAD)


def is_streamed(options: DataOptions, split: Split) -> bool:
  """Whether the data is read in order, from afar."""
  return options.kind == DatasetType.HF and is_remote(options.hub, split)


def _synthetic_batches(data: OpenedData, position: IteratorState | None) -> Iterator[BatchWithState]:
  options, (rows, length) = data.options, data.batch.inputs.shape
  seed = options.seed if data.split == "train" else ~options.seed & 0xFFFFFFFF
  return synthetic_batches(options.vocab_size, rows, length, seed, data.batch.inputs.sharding, position)


_LOADERS: dict[DatasetType, Callable[[OpenedData, IteratorState | None], Iterator[BatchWithState]]] = {
  DatasetType.SYNTHETIC: _synthetic_batches,
}


def _document_batches(data: OpenedData, position: IteratorState | None) -> Iterator[BatchWithState]:
  options, split, (rows, length) = data.options, data.options.split(data.split), data.batch.inputs.shape
  sizes = _schedule(options, data.batch, data.split)
  packing, local_rows = make_packing(options, length), LocalRows.of(data.batch.inputs.sharding, rows, length)
  _check_divisible(options, sizes, local_rows)
  if data.sources:
    made, about, total, first = _random_access(data, packing, sizes, local_rows, position)
  else:
    made, about, total, first = _streamed(options, split, packing, sizes, local_rows, position)
  place = partial(place_rows, local_rows=local_rows, total=total, about=fingerprint.to_array(about))
  prefetcher = Prefetcher((place(number, rows) for number, rows in enumerate(made, first + 1)), split.buffer)
  return _until_exhausted(prefetcher, data, split, local_rows, first)


def _schedule(options: DataOptions, batch: Batch, split: SplitName) -> BatchSizeSchedule:
  rows = batch.inputs.shape[0]
  return batch_size_schedule(options.rampup, rows) if split == "train" else BatchSizeSchedule((0,), (rows,))


class _RowIterator(NamedTuple):
  made: Iterator[Rows]
  about: dict[str, Any]
  total: int  # streams
  first: int  # batch


def _random_access(
  data: OpenedData, packing: Packing, sizes: BatchSizeSchedule, local_rows: LocalRows, position: IteratorState | None
) -> _RowIterator:
  options, split, sources, total = data.options, data.options.split(data.split), data.sources, sizes.streams
  about = {
    "sources": [source.documents.identity for source in sources],
    "weights": [source.weight for source in sources],
    **_describe(options, split, total, packing),
  }
  spans = tuple(source.spans for source in sources)
  if any(cut.long for cut in spans):
    about[fingerprint.SPANS] = [{"tokens": cut.inputs, "documents": len(cut.long)} for cut in spans]
  state, first = _start(position, about, (total, 3))
  streams = local_rows.numbers(total)
  shard = WorkerShard(options, split.name, packing, sizes, tuple(streams.tolist()), state[streams], first, spans)
  workers = choose_workers(split, options.worker_megabytes)
  made = rows_from_processes(shard.divide(workers), split.buffer) if workers else shard.rows(sources)
  return _RowIterator(made, about, total, first)


def _streamed(
  options: DataOptions,
  split: Split,
  packing: Packing,
  sizes: BatchSizeSchedule,
  local_rows: LocalRows,
  position: IteratorState | None,
) -> _RowIterator:
  hub, group = options.hub, local_rows.group
  if local_rows.shared:
    raise ConfigError(
      f"hf_path={hub.path} is streamed, and hosts have some of their rows in common: choose a mesh in which they "
      f"have all or none, or read files on disk."
    )
  if split.name == "train" and not jax.process_index():
    _LOG.info(f"data: {hub.path} is streamed; the run can be resumed only on {group[1]} hosts.")
  source = [hub.path, hub.name, hub.data_dir, split.hf_files, split.hf_split]
  about = {"streamed": source, "hosts": group[1], **_describe(options, split, local_rows.blocks, packing)}
  state, first = _start(position, about, (local_rows.blocks, streaming.WIDTH))
  shard = len(local_rows.local_blocks), local_rows.blocks
  own = state[local_rows.local_blocks[0]]
  made = streaming.streamed_rows(options, split, packing, sizes, own, first, group, shard)
  return _RowIterator(made, about, local_rows.blocks, first)


def _start(position: IteratorState | None, about: dict[str, Any], shape: tuple[int, int]) -> tuple[np.ndarray, int]:
  """The state of all streams, and the number of the next batch."""
  if position is None:
    return np.zeros(shape, np.int32), 0
  fingerprint.check_same_data(np.asarray(position["about"]), about)
  return np.asarray(position["streams"]), int(position["batches"])


def _describe(options: DataOptions, split: Split, streams: int, packing: Packing) -> dict[str, Any]:
  return {
    "streams": streams,
    "length": packing.length,
    "packing": {"kind": packing.kind, "max_segments": packing.max_segments, "look_ahead": packing.look_ahead},
    "seed": options.seed,
    "shuffle": split.shuffle,
  }


def _check_divisible(options: DataOptions, sizes: BatchSizeSchedule, local_rows: LocalRows) -> None:
  """The last size is that of the abstract batch, which is known to fit."""
  unit = local_rows.blocks * options.accumulation
  for rows in sizes.rows[:-1]:
    if options.rampup is not None and rows % unit:
      raise ConfigError(
        f"per_device_batch_size_start={options.rampup.start:g} and per_device_batch_size_increment="
        f"{options.rampup.increment:g} make a batch of {rows} rows, which cannot be split in {unit}."
      )


def _until_exhausted(
  prefetcher: Prefetcher[tuple[BatchWithState, np.ndarray]],
  data: OpenedData,
  split: Split,
  local_rows: LocalRows,
  first: int,
) -> Generator[BatchWithState]:
  """All batches that hold what they must: something in every row, or with `pad` in any."""
  # Several processes must agree on the last batch. Each asks a few batches early, so that nobody waits for the answer.
  early = 2 if jax.process_count() > 1 else 0
  add = jax.jit(jnp.sum, out_shardings=NamedSharding(local_rows.by_rows.mesh, PartitionSpec()))
  waiting: deque[tuple[BatchWithState, Any]] = deque()
  try:
    for number in itertools.count(first):
      while len(waiting) <= early:
        fed, filled = next(prefetcher)
        rows = len(fed.batch.inputs)
        waiting.append((fed, add(local_rows.array(filled, rows, local_rows.by_rows)) if early else filled.sum()))
      fed, count = waiting.popleft()
      if int(count) < (1 if split.pad else len(fed.batch.inputs)):
        _log_end(number, data, split)
        return
      yield fed
  finally:
    prefetcher.close()


def _log_end(batches: int, data: OpenedData, split: Split) -> None:
  if not batches:
    raise _too_little_data(data)
  if split.name == "train" and not jax.process_index():
    length = data.batch.inputs.shape[1]
    known = [
      _describe_size(source.documents, length) for source in data.sources if source.documents.counts.total is not None
    ]
    there = f" ({'; '.join(known)})" if known else ""
    again = f"num_epoch={split.epochs} says how often it is read."
    _LOG.info(f"data: ended after {plural(batches, 'batch')}{there}; {again}")


def _too_little_data(data: OpenedData) -> ConfigError:
  """Says what there is and what a batch takes. Padding is no way out of it: a batch of that teaches nothing."""
  rows, length = data.batch.inputs.shape
  training = data.split == "train"
  key = "per_device_batch_size" if training else "eval_per_device_batch_size"
  size = data.options.split(data.split).rows_per_device
  padded = "" if training else ", or write generate_padding_batch_eval=true, which leaves the rest of a batch empty"
  there = "; ".join(_describe_size(source.documents, length) for source in data.sources)
  return ConfigError(
    f"The {'data' if training else 'evaluation data'} does not fill a single batch"
    + (f": {there}; a batch takes {rows} rows" if there else "")
    + f". Take more data, a smaller {key} (it is {size:g}) or a shorter max_target_length{padded}."
  )


def _describe_size(documents: Documents, length: int) -> str:
  count, tokens = sum(documents.sizes), count_tokens(documents)
  rows = -(-max(tokens - count, 0) // length)
  return f"{plural(count, 'document')}, {plural(tokens, 'token')} = {plural(rows, 'row')} of {length}"
