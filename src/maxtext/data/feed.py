"""What a run is fed with, on its devices, and where the data stands after each batch."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from os import cpu_count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import DatasetType
from maxtext.data import fingerprint, streaming
from maxtext.data.ahead import Ahead
from maxtext.data.batch import Batch, Fed, Position
from maxtext.data.packing import LOOK_AHEAD, Packing
from maxtext.data.ramp import BatchSizes, batch_sizes
from maxtext.data.share import Share
from maxtext.data.sources import open_sources
from maxtext.data.sources.hf import is_remote
from maxtext.data.splits import Name, Split, split_of
from maxtext.data.streams import Rows
from maxtext.data.synthetic import synthetic_batches
from maxtext.data.workers import rows_from_processes


def make_feed(
  config: MaxTextConfig, batch: Batch, position: Position | None = None, split: Name = "train"
) -> Iterator[Fed]:
  """Batches like an abstract one, from a position on. Each process makes only the rows that its devices hold.

  It ends where the data ends, on all processes with the same batch. Drop it, or `close()` it, to end its threads and
  processes.
  """
  feed = _FEEDS.get(config.dataset_type, _from_documents)(config, batch, position, split)
  if config.reuse_example_batch and split == "train":
    return itertools.repeat(next(feed))
  return feed


def _synthetic(config: MaxTextConfig, batch: Batch, position: Position | None, split: Name) -> Iterator[Fed]:
  rows, length = batch.inputs.shape
  return synthetic_batches(config.vocab_size, rows, length, config.data_shuffle_seed, batch.inputs.sharding, position)


_FEEDS: dict[DatasetType, Callable[[MaxTextConfig, Batch, Position | None, Name], Iterator[Fed]]] = {
  DatasetType.SYNTHETIC: _synthetic,
}


def _from_documents(config: MaxTextConfig, batch: Batch, position: Position | None, name: Name) -> Iterator[Fed]:
  split, (rows, length) = split_of(config, name), batch.inputs.shape
  sizes = batch_sizes(config, rows) if name == "train" else BatchSizes((0,), (rows,))
  packing, held = _packing(config, length), _Held.of(batch.inputs.sharding, rows, length)
  _refuse_uneven(config, sizes, held)
  streamed = config.dataset_type == DatasetType.HF and is_remote(config, split)
  kind = _streamed if streamed else _random_access
  made, about, total, first = kind(config, split, packing, sizes, held, position)
  place = partial(_place, held=held, total=total, about=fingerprint.to_array(about))
  ahead = Ahead((place(number, rows) for number, rows in enumerate(made, first + 1)), split.buffer)
  return _until_the_end(ahead, split, held)


class _Making(NamedTuple):
  made: Iterator[Rows]
  about: dict[str, Any]
  total: int  # streams
  first: int  # batch


def _random_access(
  config: MaxTextConfig, split: Split, packing: Packing, sizes: BatchSizes, held: "_Held", position: Position | None
) -> _Making:
  sources, total = open_sources(config, split), sizes.streams
  about = {
    "sources": [source.documents.identity for source in sources],
    "weights": [source.weight for source in sources],
    **_about(config, split, total, packing),
  }
  state, first = _start(position, about, (total, 3))
  streams = held.numbers(total)
  share = Share(config, split.name, packing, sizes, tuple(streams.tolist()), state[streams], first)
  workers = _workers(config, split, share)
  made = rows_from_processes(share.cut(workers), split.buffer) if workers else share.rows()
  return _Making(made, about, total, first)


def _streamed(
  config: MaxTextConfig, split: Split, packing: Packing, sizes: BatchSizes, held: "_Held", position: Position | None
) -> _Making:
  group = held.group
  if split.name == "train" and not jax.process_index():
    print(f"data: {config.hf_path} is streamed; the run can be resumed only on {group[1]} hosts.", flush=True)
  source = [config.hf_path, config.hf_name, config.hf_data_dir, split.hf_files, split.hf_split]
  about = {"streamed": source, "hosts": group[1], **_about(config, split, held.blocks, packing)}
  state, first = _start(position, about, (held.blocks, streaming.WIDTH))
  share = len(held.mine), held.blocks
  made = streaming.streamed_rows(config, split, packing, sizes, state[held.mine[0]], first, group, share)
  return _Making(made, about, held.blocks, first)


def _start(position: Position | None, about: dict[str, Any], shape: tuple[int, int]) -> tuple[np.ndarray, int]:
  """The state of all streams, and the number of the next batch."""
  if position is None:
    return np.zeros(shape, np.int32), 0
  fingerprint.refuse_other(np.asarray(position["about"]), about)
  return np.asarray(position["streams"]), int(position["batches"])


def _packing(config: MaxTextConfig, length: int) -> Packing:
  if config.dataset_type == DatasetType.OLMO_GRAIN or not config.packing:
    return Packing(length, "first_fit", max_segments=1, look_ahead=1)
  kind = "concat_then_split" if config.dataset_type == DatasetType.C4MLPERF else config.grain_packing_type
  return Packing(length, kind, max(config.max_segments_per_seq, 0), 1 if kind == "concat_then_split" else LOOK_AHEAD)


def _about(config: MaxTextConfig, split: Split, streams: int, packing: Packing) -> dict[str, Any]:
  return {
    "streams": streams,
    "length": packing.length,
    "packing": {"kind": packing.kind, "max_segments": packing.max_segments, "look_ahead": packing.look_ahead},
    "seed": config.data_shuffle_seed,
    "shuffle": split.shuffle,
  }


@dataclass(frozen=True)
class _Held:
  """Which blocks of rows the devices of this process hold; a block is what one device has, whatever the batch."""

  sharding: Sharding
  blocks: int
  mine: tuple[int, ...]
  group: tuple[
    int, int
  ]  # among the sets of blocks that processes hold, the number of this one's, and how many there are

  @staticmethod
  def of(sharding: Sharding, rows: int, length: int) -> "_Held":
    held = {d: index[0].indices(rows)[0] for d, index in sharding.devices_indices_map((rows, length)).items()}
    starts = sorted(set(held.values()))
    blocks: dict[int, set[int]] = {}
    device: Any
    for device, start in held.items():
      blocks.setdefault(device.process_index, set()).add(starts.index(start))
    mine = tuple(sorted(blocks[jax.process_index()]))
    groups = sorted({tuple(sorted(block)) for block in blocks.values()})
    return _Held(sharding, len(starts), mine, (groups.index(mine), len(groups)))

  def numbers(self, total: int) -> np.ndarray:
    """The rows of this process, among `total` of the run."""
    size = total // self.blocks
    return np.concatenate([np.arange(block * size, (block + 1) * size) for block in self.mine])

  def array(self, local: np.ndarray, total: int, sharding: Sharding | None = None) -> jax.Array:
    """An array of the whole run, from the rows of this process."""
    size = total // self.blocks

    def piece(index: Any) -> np.ndarray:
      start = self.mine.index(index[0].indices(total)[0] // size) * size
      return local[(slice(start, start + size), *index[1:])]

    return jax.make_array_from_callback((total, *local.shape[1:]), sharding or self.sharding, piece)

  @property
  def by_rows(self) -> NamedSharding:
    """For arrays that are split as rows are and whole otherwise."""
    assert isinstance(self.sharding, NamedSharding)
    return NamedSharding(self.sharding.mesh, PartitionSpec(self.sharding.spec[0]))


def _refuse_uneven(config: MaxTextConfig, sizes: BatchSizes, held: _Held) -> None:
  unit = held.blocks * config.gradient_accumulation_steps
  for rows in sizes.rows:
    if rows % unit:
      raise ConfigError(
        f"per_device_batch_size_start={config.per_device_batch_size_start:g} and per_device_batch_size_increment="
        f"{config.per_device_batch_size_increment:g} make a batch of {rows} rows, which cannot be split in {unit}."
      )


def _workers(config: MaxTextConfig, split: Split, share: Share) -> int:
  """Reader processes; where they are to be chosen, one per core that the run leaves, within the memory allowed."""
  if split.workers >= 0:
    return split.workers
  batch = 16 * share.packing.length * len(share.streams)
  return max(1, min((cpu_count() or 1) - 1, config.grain_ram_budget_mb * 2**20 // (batch * (split.buffer + 2))))


def _place(number: int, rows: Rows, *, held: _Held, total: int, about: np.ndarray) -> tuple[Fed, np.ndarray]:
  """Puts the rows of this process on its devices. `number` batches have been made with this one."""
  count = len(rows.inputs) * held.blocks // len(held.mine)
  real: np.ndarray = rows.segments > 0
  arrays = (rows.inputs, rows.targets, rows.positions, rows.segments, real.astype(np.float32))

  def position() -> Position:
    streams = held.array(rows.after, total, held.by_rows)
    return {"streams": streams, "batches": np.array(number, np.int32), "about": about}

  return Fed(Batch(*(held.array(array, count) for array in arrays)), position), np.any(real, axis=1)


def _until_the_end(ahead: Ahead[tuple[Fed, np.ndarray]], split: Split, held: _Held) -> Generator[Fed]:
  """All batches that hold what they must: something in every row, or with `pad` in any."""
  waiting: deque[tuple[Fed, Any]] = deque()
  # Several processes must agree on the last batch. Each asks a few batches early, so that nobody waits for the answer.
  early = 2 if jax.process_count() > 1 else 0
  try:
    for number in itertools.count():
      while len(waiting) <= early:
        fed, filled = next(ahead)
        waiting.append((fed, _count(filled, fed, held) if early else filled.sum()))
      fed, count = waiting.popleft()
      if count == 0 or (count < len(fed.batch.inputs) and not split.pad):
        _say_the_end(number, split)
        return
      yield fed
  finally:
    ahead.close()


def _count(filled: np.ndarray, fed: Fed, held: _Held) -> jax.Array:
  """How many rows of the run hold anything; under way when this returns."""
  whole = held.array(filled, len(fed.batch.inputs), held.by_rows)
  return jax.jit(jnp.sum, out_shardings=NamedSharding(held.by_rows.mesh, PartitionSpec()))(whole)


def _say_the_end(batches: int, split: Split) -> None:
  if not batches:
    raise ConfigError(
      "The data does not fill a single batch: take more data, fewer or shorter rows, or write "
      f"generate_padding_batch_{split.name}=true to pad what there is."
    )
  if split.name == "train" and not jax.process_index():
    print(f"data: ended after {batches} batches of this run (num_epoch={split.epochs}).", flush=True)
