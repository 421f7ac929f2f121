"""Parameters of a checkpoint, a block at a time: for models that are larger than memory.

Orbax writes and reads whole arrays. Here TensorStore does it underneath, by the same names and in the same layout, so
that `restore` cannot tell the difference. What is on disk is noted in a journal, with its part of the checksums, and a
writer that is started again continues after it.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint import type_handlers

from maxtext.checkpoint.checksum import checksum_of_part
from maxtext.checkpoint.files import CHUNK, STATE, saved_checksums
from maxtext.checkpoint.journal import Journal, digest_of
from maxtext.checkpoint.layout import Layout
from maxtext.checkpoint.metadata import (
  FILE,
  ITEM,
  ArrayMetadata,
  CheckpointMetadata,
  CorruptCheckpointError,
  checksum_file,
)
from maxtext.checkpoint.options import ArrayStorage
from maxtext.checkpoint.restore import readable
from maxtext.checkpoint.storage import StorageError, reason, retried, writing
from maxtext.checkpoint.tree import nested
from maxtext.configs import ConfigError

_MADE_FOR = "request"
_IN_FLIGHT = 2 * CHUNK  # bytes that are written together

Index = tuple[int, ...]


def is_written(target: Path, arrays: Mapping[str, ArrayMetadata], request: Any) -> bool:
  """Whether a folder is what a `StreamWriter` with these arguments wrote."""
  file = target / ITEM / _MADE_FOR
  return file.exists() and file.read_text() == digest_of(_request(arrays, request))


def _request(arrays: Mapping[str, ArrayMetadata], request: Any) -> Any:
  return {f"params/{name}": about for name, about in arrays.items()}, request


class StreamWriter:
  """A folder of parameters that grows by pieces and is there, under its name, only when all of them are.

  A piece of a parameter is what stands at an index into its first dimensions.

  Args:
    storage: the form of the files.
    target: the folder to make; until it is whole, it has `.unfinished` behind its name.
    arrays: every parameter's shape and dtype.
    request: tells where it comes from; a folder that was begun from elsewhere is not continued.

  Attributes:
    folder: where it grows; other files may be put there.
  """

  def __init__(self, storage: ArrayStorage, target: Path, arrays: Mapping[str, ArrayMetadata], request: Any) -> None:
    self._storage, self._arrays = storage, {f"params/{n}": a for n, a in arrays.items()}
    self._request = _request(arrays, request)
    self._journal = Journal(target, self._request)
    self.folder = self._journal.folder
    self._context = type_handlers.get_ts_context(use_ocdbt=storage.use_ocdbt)
    self._sums = dict.fromkeys(self._arrays, 0)
    self._done: set[tuple[str, Index]] = set()
    self._open: tuple[str, Any] = "", None
    self._writes: list[Any] = []
    self._noted: list[dict[str, Any]] = []
    self._size = 0
    (self.folder / STATE).mkdir(exist_ok=True)
    for entry in self._journal.entries:
      self._count(entry)

  def has(self, name: str, index: Index) -> bool:
    """Whether a piece is on disk already."""
    return (f"params/{name}", index) in self._done

  def put(self, name: str, index: Index, piece: np.ndarray) -> None:
    """Writes a piece of a parameter. The array may be of another dtype, and a view of anything."""
    name = f"params/{name}"
    about = self._arrays[name]
    assert about.shape[len(index) :] == piece.shape, (name, about.shape, index, piece.shape)
    dtype, sums = np.dtype(about.dtype), 0
    lead = (1,) * len(index)
    with writing(self.folder):
      store = self._store(name, (*lead, *_chunk(piece.shape, dtype.itemsize)))
      for block in _blocks(piece.shape, dtype.itemsize):
        values = np.asarray(piece[block], dtype, order="C")
        values = values.reshape(lead + values.shape)
        place = (*(slice(i, i + 1) for i in index), *block)
        sums += checksum_of_part(values, [part.start for part in place])
        self._writes.append(store[place].write(values, can_reference_source_data_indefinitely=True))
        self._size += values.nbytes
        if self._size >= _IN_FLIGHT:
          self._wait()
    self._noted.append({"name": name, "index": index, "sum": sums % 2**32})

  def finish(self, step: int, keys: Mapping[str, Any]) -> Path:
    """Has Orbax describe what is there, adds the metadata and gives the folder its name."""
    with writing(self.folder):
      self._wait()
      handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=self._storage.use_ocdbt,
        use_zarr3=self._storage.use_zarr3,
        type_handler_registry=type_handlers.create_type_handler_registry(
          (jax.Array, type_handlers.ArrayHandler()),
          (np.ndarray, type_handlers.NumpyHandler()),
          (_Written, _WrittenHandler()),
        ),
      )
      state = epath.Path(self.folder / STATE)
      handler.save(state, args=ocp.args.PyTreeSave(nested({name: _Written() for name in self._arrays})))
      handler.finalize(state)
      metadata = CheckpointMetadata(step, self._arrays, 0, keys, processes=1)
      (self.folder / ITEM).mkdir(exist_ok=True)
      (self.folder / ITEM / checksum_file(0)).write_text(
        json.dumps([self._sums[name] for name in sorted(self._arrays)])
      )
      (self.folder / ITEM / FILE).write_text(json.dumps(metadata.to_json()))
      (self.folder / ITEM / _MADE_FOR).write_text(digest_of(self._request))
      return self._journal.finish()

  def _count(self, entry: Mapping[str, Any]) -> None:
    self._done.add((entry["name"], tuple(entry["index"])))
    self._sums[entry["name"]] = (self._sums[entry["name"]] + entry["sum"]) % 2**32

  def _wait(self) -> None:
    """For what was handed to TensorStore; only then is it noted."""
    for write in self._writes:
      write.result()
    for entry in self._noted:
      self._count(entry)
    self._journal.note(*self._noted)
    self._writes, self._noted, self._size = [], [], 0

  def _store(self, name: str, chunk: tuple[int, ...]) -> Any:
    """The array, made if it is not there."""
    if self._open[0] != name:
      about, storage = self._arrays[name], self._storage
      info = _info(epath.Path(self.folder / STATE), name, storage.use_zarr3, self._context)
      spec = type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=storage.use_ocdbt,
        global_shape=about.shape,
        local_shape=chunk,
        dtype=np.dtype(about.dtype),
        process_index=0 if storage.use_ocdbt else None,
      )
      self._open = name, ts.open(spec, create=True, open=True, context=self._context).result()
    return self._open[1]


class StreamReader:
  """Parameters of a checkpoint, of a run or alone, read a piece at a time. Who has read everything calls `check`."""

  def __init__(self, folder: epath.Path) -> None:
    self.folder, self.metadata = folder, readable(folder)
    self._sums: dict[str, int] = {}
    self._layout = Layout(self.metadata.stacked)
    self._names = self.metadata.parameters
    self._ocdbt = type_handlers.is_ocdbt_checkpoint(self.folder / STATE)
    self._context = type_handlers.get_ts_context(use_ocdbt=self._ocdbt)
    self._open: dict[str, Any] = {}

  @property
  def parameters(self) -> Collection[str]:
    """The names of what can be read."""
    return self._names.keys()

  def stored_shape(self, name: str) -> tuple[int, ...]:
    """The shape of a parameter that can be read under its own name."""
    return self.metadata.arrays[self._names[name]].shape

  def shapes(
    self, name: str, struct: jax.ShapeDtypeStruct
  ) -> dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """The arrays that should hold a parameter, with the shape that each should have and has."""
    return {
      stored: (tuple(wanted.shape), self.metadata.arrays[self._names[stored]].shape if stored in self._names else None)
      for stored, wanted in self._layout.stored(name, struct).items()
    }

  def check_shapes(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises `ConfigError` where the checkpoint lacks a parameter, or has it in another shape."""
    for path, struct in structs.items():
      for stored, (wants, has) in self.shapes(path, struct).items():
        if wants != has:
          there = "has none" if has is None else f"has {list(has)}"
          raise ConfigError(f"{self.folder} {there} for {stored}, and this model has {list(wants)}.")

  def read(self, name: str, index: Index, dims: int) -> np.ndarray:
    """What stands at an index into a parameter of that many dimensions."""
    stored, place = self._layout.place(name, index, dims)
    full = self._names[stored]
    about = self.metadata.arrays[full]
    where = tuple(
      slice(i, i + 1) if isinstance(i, int) else slice(0, size) for i, size in zip(place, about.shape, strict=True)
    )
    found = np.empty([part.stop - part.start for part in where], np.dtype(about.dtype))
    try:
      store = retried(self.folder, lambda: self._store(full))
      for block in _blocks(found.shape, found.itemsize, store.chunk_layout.read_chunk.shape):
        there = tuple(slice(w.start + b.start, w.start + b.stop) for w, b in zip(where, block, strict=True))
        found[block] = retried(self.folder, partial(_part, store, there))
        part = checksum_of_part(found[block], [s.start for s in there])
        self._sums[full] = (self._sums.get(full, 0) + part) % 2**32
    except StorageError:
      raise
    except (ValueError, OSError) as error:
      raise CorruptCheckpointError(f"{full} cannot be read: {reason(error)}") from error
    return found.reshape([size for i, size in zip(place, found.shape, strict=True) if not isinstance(i, int)])

  def take_sums(self) -> dict[str, int]:
    """What was read since this was last asked: for each array, its part of the checksum."""
    sums, self._sums = self._sums, {}
    return sums

  def check(self, sums: Mapping[str, int]) -> None:
    """Raises `CorruptCheckpointError` if arrays, all of which were read, are not what was saved."""
    found = saved_checksums(self.folder, self.metadata, range(self.metadata.processes))
    saved = dict(zip(sorted(self.metadata.arrays), found, strict=True))
    if wrong := sorted(name for name, value in sums.items() if value != saved[name]):
      raise CorruptCheckpointError(f"{wrong[0]} is not what was saved (checksum)")

  def _store(self, name: str) -> Any:
    if name not in self._open:
      info = _info(self.folder / STATE, name, True, self._context)
      kvstore = type_handlers.get_json_tspec_read(info, use_ocdbt=self._ocdbt)["kvstore"]
      kvstore["path"] += "/"
      self._open[name] = ts.open({"driver": "auto", "kvstore": kvstore}, context=self._context).result()
    return self._open[name]


def _part(store: Any, where: tuple[slice, ...]) -> np.ndarray:
  return store[where].read().result()


class _Written:
  """Stands in Orbax's tree for an array that is on disk already."""


class _WrittenHandler(type_handlers.NumpyHandler):
  """Writes nothing, and says what is there."""

  async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
    return []


def _info(folder: epath.Path, name: str, zarr3: bool, context: Any) -> type_handlers.ParamInfo:
  return type_handlers.ParamInfo(
    name=name.replace("/", "."), parent_dir=folder, use_zarr3=zarr3, use_compression=False, ts_context=context
  )


def _chunk(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
  """The shape of blocks of at most `CHUNK` bytes, whole in their last dimensions."""
  left, sizes = CHUNK // itemsize, []
  for size in reversed(shape):
    sizes.append(max(1, min(size, left)))
    left //= max(sizes[-1], 1)
  return tuple(reversed(sizes))


def _blocks(shape: tuple[int, ...], itemsize: int, cell: Sequence[int] = ()) -> Iterator[tuple[slice, ...]]:
  """An array's chunks, as places in it; they are made of whole cells, as storage has them."""
  cell = tuple(max(1, min(sizes)) for sizes in zip(shape, cell or (1,) * len(shape), strict=True))
  cells = _chunk(tuple(-(-size // part) for size, part in zip(shape, cell, strict=True)), itemsize * prod(cell))
  steps = tuple(count * part for count, part in zip(cells, cell, strict=True))
  for start in product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True))):
    yield tuple(slice(i, min(i + step, size)) for i, step, size in zip(start, steps, shape, strict=True))
