"""The dataloader: batches on the devices of a run, each with the data-iterator state after it."""

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
from maxtext.data.conversation_statistics import measure_conversations
from maxtext.data.documents import DataSource, Documents
from maxtext.data.local_rows import LocalRows, place_rows
from maxtext.data.mixture import SourceMixture
from maxtext.data.options import DataOptions
from maxtext.data.packing import LOOK_AHEAD, Packing
from maxtext.data.prefetch import Prefetcher
from maxtext.data.sources import open_sources
from maxtext.data.sources.grain import lacks_held_out
from maxtext.data.sources.hf import is_remote
from maxtext.data.spans import count_tokens, cut_long_documents
from maxtext.data.splits import Split, SplitName
from maxtext.data.streams import Rows
from maxtext.data.synthetic import synthetic_batches
from maxtext.data.worker_shard import WorkerShard
from maxtext.data.workers import choose_workers, rows_from_processes

_LOG = logging.getLogger(__name__)


class OpenedData(NamedTuple):
  """Data that was found and can be read.

  Attributes:
    options: which data.
    batch: an abstract batch.
    split: training or evaluation.
    sources: with long documents split into spans; empty for synthetic and streamed data.
  """

  options: DataOptions
  batch: Batch
  split: SplitName
  sources: tuple[DataSource, ...]


def open_data(options: DataOptions, batch: Batch, split: SplitName = "train") -> OpenedData:
  """Opens the data and reads a document for each row of this process. Problems of the data are raised here.

  No device is used, so that it can be called before anything expensive.
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
  if options.conversations is not None:
    statistics = measure_conversations(sources, options.conversations.method)
    if not jax.process_index():
      c = options.conversations
      noun = "labelled answer" if c.labelled else "pair" if c.pairs else "conversation"
      _LOG.info(f"{split} data: {statistics.describe(length, keys.epochs, noun)}")
  opened = OpenedData(options, batch, split, tuple(sources))
  mixture = SourceMixture(sources, sizes.streams, options.seed, keys.shuffle, keys.epochs, options.vocab_size)
  last = sizes.streams - sizes.streams // sizes.of(0)  # stream of the first batch
  *_, found = mixture.read([(int(stream), 0) for stream in (*local_rows.numbers(sizes.streams), last)])
  if found is None and not keys.pad:
    raise _too_little_data(opened)
  return opened


def missing_eval_data(options: DataOptions) -> str | None:
  """Why there is no evaluation data, where that is no mistake: prepared corpora that hold nothing out."""
  return lacks_held_out(options.evaluation) if options.kind == DatasetType.GRAIN else None


def make_dataloader(
  options: DataOptions,
  batch: Batch,
  iterator_state: IteratorState | None = None,
  split: SplitName = "train",
  data: OpenedData | None = None,
) -> Iterator[BatchWithState]:
  """Batches of the shape of an abstract one. Each process makes only the rows that its devices hold.

  It ends where the data ends, on all processes with the same batch. `close()` it, or drop it, to end its threads and
  processes.

  Args:
    options: the data.
    batch: an abstract batch.
    iterator_state: to resume from; None is the beginning.
    split: training or evaluation.
    data: the result of `open_data` for the same arguments, if it was called already.
  """
  opened = data or open_data(options, batch, split)
  loader = _LOADERS.get(options.kind, _document_batches)(opened, iterator_state)
  if options.reuse_batch and split == "train":
    return itertools.repeat(next(loader))
  return loader


def make_packing(options: DataOptions, length: int) -> Packing:
  """The packing of documents into rows."""
  slots = () if options.media is None else options.media.slots
  if options.kind == DatasetType.OLMO_GRAIN or not options.pack:
    return Packing(length, "first_fit", max_segments=1, look_ahead=1, slots=slots)
  kind = "concat_then_split" if options.kind == DatasetType.C4MLPERF else options.packing_kind
  look_ahead = 1 if kind == "concat_then_split" else LOOK_AHEAD
  return Packing(length, kind, max(options.max_segments, 0), look_ahead, slots)


def is_streamed(options: DataOptions, split: Split) -> bool:
  """Whether the data is streamed in order from remote storage."""
  return options.kind == DatasetType.HF and is_remote(options.hub, split)


def _synthetic_batches(data: OpenedData, iterator_state: IteratorState | None) -> Iterator[BatchWithState]:
  options, (rows, length) = data.options, data.batch.inputs.shape
  seed = options.seed if data.split == "train" else ~options.seed & 0xFFFFFFFF
  return synthetic_batches(options.vocab_size, rows, length, seed, data.batch.inputs.sharding, iterator_state)


_LOADERS: dict[DatasetType, Callable[[OpenedData, IteratorState | None], Iterator[BatchWithState]]] = {
  DatasetType.SYNTHETIC: _synthetic_batches,
}


def _document_batches(data: OpenedData, iterator_state: IteratorState | None) -> Iterator[BatchWithState]:
  options, split, (rows, length) = data.options, data.options.split(data.split), data.batch.inputs.shape
  sizes = _schedule(options, data.batch, data.split)
  packing, local_rows = make_packing(options, length), LocalRows.of(data.batch.inputs.sharding, rows, length)
  _check_divisible(options, sizes, local_rows)
  if data.sources:
    row_iterator, about, total, first = _random_access(data, packing, sizes, local_rows, iterator_state)
  else:
    row_iterator, about, total, first = _streamed(options, split, packing, sizes, local_rows, iterator_state)
  place = partial(
    place_rows, local_rows=local_rows, total=total, about=fingerprint.to_array(about), extra=data.batch.extra
  )
  prefetcher = Prefetcher((place(number, rows) for number, rows in enumerate(row_iterator, first + 1)), split.buffer)
  return _until_exhausted(prefetcher, data, split, local_rows, first)


def _schedule(options: DataOptions, batch: Batch, split: SplitName) -> BatchSizeSchedule:
  rows = batch.inputs.shape[0]
  return batch_size_schedule(options.rampup, rows) if split == "train" else BatchSizeSchedule((0,), (rows,))


class _RowIterator(NamedTuple):
  row_iterator: Iterator[Rows]
  about: dict[str, Any]
  total: int  # streams
  first: int  # batch


def _random_access(
  data: OpenedData,
  packing: Packing,
  sizes: BatchSizeSchedule,
  local_rows: LocalRows,
  iterator_state: IteratorState | None,
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
  state, first = _start(iterator_state, about, (total, 3))
  streams = local_rows.numbers(total)
  shard = WorkerShard(options, split.name, packing, sizes, tuple(streams.tolist()), state[streams], first, spans)
  workers = choose_workers(split, options.worker_megabytes)
  row_iterator = rows_from_processes(shard.divide(workers), split.buffer) if workers else shard.rows(sources)
  return _RowIterator(row_iterator, about, total, first)


def _streamed(
  options: DataOptions,
  split: Split,
  packing: Packing,
  sizes: BatchSizeSchedule,
  local_rows: LocalRows,
  iterator_state: IteratorState | None,
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
  state, first = _start(iterator_state, about, (local_rows.blocks, streaming.WIDTH))
  shard = len(local_rows.local_blocks), local_rows.blocks
  own = state[local_rows.local_blocks[0]]
  row_iterator = streaming.streamed_rows(options, split, packing, sizes, own, first, group, shard)
  return _RowIterator(row_iterator, about, local_rows.blocks, first)


def _start(
  iterator_state: IteratorState | None, about: dict[str, Any], shape: tuple[int, int]
) -> tuple[np.ndarray, int]:
  """The state of all streams, and the index of the next batch."""
  if iterator_state is None:
    return np.zeros(shape, np.int32), 0
  fingerprint.check_same_data(np.asarray(iterator_state["about"]), about)
  return np.asarray(iterator_state["streams"]), int(iterator_state["batches"])


def _describe(options: DataOptions, split: Split, streams: int, packing: Packing) -> dict[str, Any]:
  return {
    "streams": streams,
    "length": packing.length,
    "packing": {"kind": packing.kind, "max_segments": packing.max_segments, "look_ahead": packing.look_ahead},
    "seed": options.seed,
    "shuffle": split.shuffle,
  }


def _check_divisible(options: DataOptions, sizes: BatchSizeSchedule, local_rows: LocalRows) -> None:
  """Raises if a batch of the ramp-up cannot be split over devices; the last size is known to fit."""
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
  """All batches with tokens in every row, or with `pad` in any row."""
  # Processes must agree on the last batch. Each starts the reduction a few batches early, so that none waits for it.
  early = 2 if jax.process_count() > 1 else 0
  add = jax.jit(jnp.sum, out_shardings=NamedSharding(local_rows.by_rows.mesh, PartitionSpec()))
  waiting: deque[tuple[BatchWithState, Any]] = deque()
  try:
    for number in itertools.count(first):
      while len(waiting) <= early:
        item, filled = next(prefetcher)
        rows = len(item.batch.inputs)
        waiting.append((item, add(local_rows.array(filled, rows, local_rows.by_rows)) if early else filled.sum()))
      item, count = waiting.popleft()
      if int(count) < (1 if split.pad else len(item.batch.inputs)):
        _log_end(number, data, split)
        return
      yield item
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
    again = f"num_epoch={split.epochs} is how often it is read."
    _LOG.info(f"data: ended after {plural(batches, 'batch')}{there}; {again}")


def _too_little_data(data: OpenedData) -> ConfigError:
  """The error for data that does not fill one batch, with its size. A batch of padding would teach nothing."""
  rows, length = data.batch.inputs.shape
  training = data.split == "train"
  key = "per_device_batch_size" if training else "eval_per_device_batch_size"
  size = data.options.split(data.split).rows_per_device
  padded = "" if training else ", or write generate_padding_batch_eval=true, which leaves the rest of a batch empty"
  there = "; ".join(_describe_size(source.documents, length) for source in data.sources)
  return ConfigError(
    f"The {'data' if training else 'evaluation data'} does not fill a single batch"
    + (f": {there}; a batch takes {rows} rows" if there else "")
    + f". Use more data, a smaller {key} (it is {size:g}) or a shorter max_target_length{padded}."
  )


def _describe_size(documents: Documents, length: int) -> str:
  count, tokens = sum(documents.sizes), count_tokens(documents)
  rows = -(-max(tokens - count, 0) // length)
  return f"{plural(count, 'document')}, {plural(tokens, 'token')} = {plural(rows, 'row')} of {length}"
