"""The local tier: every process keeps its own parts of the state on a disk of its machine, often, and on its own.

A part that several processes hold, such as a replica's, is on each of their disks: what a machine lost, a peer sends.
Any mesh on any number of processes is put together from the parts, as long as each of them is somewhere.
"""

import io
import json
import logging
import time
import uuid
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from maxtext.checkpoint.checksum import nonfinite_names
from maxtext.checkpoint.location import steps_in
from maxtext.checkpoint.options import LocalCheckpointOptions
from maxtext.checkpoint.restore import Restored, quarantine
from maxtext.checkpoint.storage import StorageError, retried
from maxtext.checkpoint.tree import like, named
from maxtext.configs import ConfigError
from maxtext.distributed.hosts import host_index
from maxtext.distributed.multihost import any_process, broadcast_from, broadcast_from_first
from maxtext.distributed.transfer import receive_from
from maxtext.storage.atomic import UNFINISHED, atomic_folder

_LOG = logging.getLogger(__name__)

_PARTS, _POSITION = "parts.npz", "position.npz"
_UNUSED = "unused"  # behind the name of a step that a start did not resume from
_START = "start"  # among the data-iterator state: which start of the run saved it
_KEPT = 2  # a process may have finished a step that another has not


_Box = tuple[tuple[int, int], ...]  # of each dimension, where a part begins and ends


def local_folder(directory: str, name: str) -> epath.Path:
  """Where this process keeps its parts of a run."""
  folder = epath.Path(directory).absolute() / name / f"process-{host_index(jax.process_index())}"
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(f"local_checkpoint_directory={directory} cannot be written: {error.strerror}.") from None
  return folder


class LocalWriter:
  """Saves this process's parts by period; every process calls every method."""

  def __init__(self, options: LocalCheckpointOptions, folder: epath.Path) -> None:
    self._options, self._folder = options, folder
    self._start = np.array(broadcast_from_first(f"{time.time():.6f} {uuid.uuid4().hex}"))
    self._thread = ThreadPoolExecutor(1, "local-checkpoint")
    self._saving: tuple[int, Future] | None = None

  def due(self, step: int) -> bool:
    """Whether this step is to be saved."""
    return step % self._options.period == 0

  def save(self, step: int, state: Any, position: Mapping[str, Any]) -> None:
    """Starts a save; the arrays may be overwritten when this returns. A failure is reported and the run continues.

    A state that is not finite on one process is kept by none: the steps before it stay.
    """
    self.wait()
    if not _all_finite(state):
      _print(f"step {step} is not kept on local disks: its state is not finite.")
      return
    parts = {key: part for name, array in named(state).items() for key, part in _local_shards(name, array)}
    files = {
      _PARTS: parts,
      _POSITION: {_START: self._start} | {name: _gather(array) for name, array in position.items()},
    }
    self._saving = step, self._thread.submit(_write, self._folder, step, files)
    if not self._options.asynchronous:
      self.wait()

  def poll(self) -> None:
    """Looks whether a save in the background has ended, and reports how."""
    if self._saving is not None and self._saving[1].done():
      self.wait()

  def wait(self) -> None:
    """Waits for the save in the background, if any."""
    if self._saving is None:
      return
    (step, saving), self._saving = self._saving, None
    try:
      saving.result()
    except OSError as error:
      kept = f"it keeps {', '.join(map(str, steps_in(self._folder))) or 'none'}"
      who = f"process {jax.process_index()}"
      _LOG.warning(f"maxtext: the local checkpoint of step {step} failed on {who}: {error.strerror}; {kept}.")

  def close(self) -> None:
    """Waits, and lets go of everything."""
    self.wait()
    self._thread.shutdown()


def _write(folder: epath.Path, step: int, files: Mapping[str, Mapping[str, np.ndarray]]) -> None:
  """Writes a step, which appears whole or not at all, and removes the oldest, and what was not used before it."""
  with atomic_folder(folder / str(step)) as unfinished:
    for name, arrays in files.items():
      np.savez(unfinished / name, **cast(Any, arrays))
  steps = steps_in(folder)
  passed = [path for path in folder.glob(f"*.{_UNUSED}*") if int(path.name.partition(".")[0]) <= steps[-_KEPT:][0]]
  for old in (*(folder / str(step) for step in steps[:-_KEPT]), *passed):
    old.rmtree()


def resume_locally(
  folder: epath.Path, abstract: Any, at_least: int, blamed: int | None = None, at_most: int | None = None
) -> Restored | None:
  """The latest step, not before `at_least`, not after `at_most` and not the one that is `blamed`, of which the
  processes' disks hold every part; None where there is none.

  All processes ask. What was never finished is removed. Steps that do not lead to the one that is taken are renamed,
  and those of another model are a mistake: nothing is lost by a wrong start.
  """
  _refuse_other(folder, named(abstract))
  for path in folder.glob(f"*{UNFINISHED}"):
    path.rmtree()
  found = None
  for step in _steps_of_all(folder):
    wanted = step >= at_least and step != blamed and (at_most is None or step <= at_most)
    if wanted and (found := _assemble(folder / str(step), abstract)):
      break
  for step in steps_in(folder):
    if found is None or step > int(found.folder.name):
      quarantine(folder / str(step), _UNUSED)
  return found


def _assemble(folder: epath.Path, abstract: Any) -> Restored | None:
  """The state of a step, from the parts that all disks together hold; None where some are on none of them."""
  wanted, own = named(abstract), jax.process_index()
  opened, problem = _open_all(folder)
  offers = [json.loads(text) for text in _texts_of_all(json.dumps([{s: sorted(o.keys) for s, o in opened.items()},
                                                                   problem is not None]))]  # fmt: skip
  found: _Held | None = None
  short: set[int] = set(range(jax.process_count()))
  for start in sorted({start for starts, _ in offers for start in starts}, reverse=True):
    holders: dict[str, set[int]] = {}
    for process, (starts, _) in enumerate(offers):
      for key in starts.get(start, ()):
        holders.setdefault(key, set()).add(process)
    held = _Held.of(dict(sorted(holders.items())), opened.get(start))
    if not (lacking := held.lacking(wanted)):
      found = held
      break
    short = min(short, lacking, key=len)
  if found is None:
    if silent := [process for process, (_, failed) in enumerate(offers) if failed]:
      # What a disk cannot be asked for may be there when it can.
      raise problem or StorageError(
        f"{folder} cannot be read by process {_listed(silent)}. Nothing was changed; start again when it can."
      )
    _print(
      f"step {folder.name} is not whole on local disks: no other holds what process {_listed(sorted(short))} held."
    )
    return None
  receivers = {process for keys in found.needs(wanted).values() for process in keys}
  if receivers:
    _print(f"process {_listed(sorted(receivers))} gets its parts of step {folder.name} from its peers.")
  arrays = {name: found.array(name, struct) for name, struct in wanted.items()}
  if not _all_finite(arrays):
    _print(f"step {folder.name} on local disks is not finite.")
    return None
  first = min(process for held_by in found.holders.values() for process in held_by)
  position = broadcast_from(first, found.opened.position if own == first and found.opened else b"")
  values = dict(np.load(io.BytesIO(position)))
  values.pop(_START, None)
  return Restored(like(abstract, arrays), values, folder)


@dataclass
class _OpenedParts:
  """The parts of one start of a run that this process can read, by key, and the data-iterator state beside them."""

  files: dict[str, Any]  # of each key, the archive
  position: bytes

  @property
  def keys(self) -> Collection[str]:
    return self.files.keys()


@dataclass
class _Held:
  """The parts of a step that one start of the run has left: they fit each other and do not overlap.

  Attributes:
    holders: of each part, the processes that can read it, in the same order everywhere.
    by_array: the parts of each array, by where they are in it.
    opened: those that this process can read.
  """

  holders: Mapping[str, set[int]]
  by_array: Mapping[str, Mapping[_Box, str]]
  opened: _OpenedParts | None

  @staticmethod
  def of(holders: Mapping[str, set[int]], opened: _OpenedParts | None) -> "_Held":
    by_array: dict[str, dict[_Box, str]] = {}
    for key in holders:
      array, _, where = key.rpartition(" ")
      by_array.setdefault(array, {})[_parse_box(where)] = key
    return _Held(holders, by_array, opened)

  def lacking(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> set[int]:
    """The processes of which some shards are not wholly held by anyone."""
    found: set[int] = set()
    for name, struct in wanted.items():
      parts = self._parts(name, struct)
      for box, processes in _shards(struct).items():
        if sum(_volume(_overlap(box, part)) for part in _overlapping(box, parts)) != _volume(box):
          found |= processes
    return found

  def needs(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, set[int]]:
    """The parts that are sent, each with the processes that receive it."""
    found: dict[str, set[int]] = {}
    for name, struct in wanted.items():
      shards = _shards(struct)
      for part, key in self._parts(name, struct).items():
        users = {process for box in _overlapping(part, shards) for process in shards[box]}
        if receivers := users - self.holders[key]:
          found[key] = receivers
    return found

  def array(self, name: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """One array, of the parts that this process can read, and of those that others send."""
    own, sent, pieces = jax.process_index(), self.needs({name: struct}), dict[_Box, np.ndarray]()
    boxes = {box for box, processes in _shards(struct).items() if own in processes}
    for part, key in self._parts(name, struct).items():
      here = self.opened is not None and key in self.opened.keys
      used = bool(_overlapping(part, boxes))
      sender, receivers = min(self.holders[key]), sent.get(key, set())
      data = _bytes(self.opened.files[key][key]) if self.opened and here and (used or own == sender) else None
      if receivers and (own == sender or own in receivers):
        data = receive_from(sender, receivers, _volume(part) * struct.dtype.itemsize, data)
      if data is not None and used:
        pieces[part] = data.view(struct.dtype).reshape([stop - start for start, stop in part])

    def shard(index: Any) -> np.ndarray:
      box = _box(index, struct.shape)
      if box in pieces:
        return pieces[box]
      found = np.empty([stop - start for start, stop in box], struct.dtype)
      for part in _overlapping(box, pieces):
        common = _overlap(box, part)
        found[_within(common, box)] = pieces[part][_within(common, part)]
      return found

    return jax.make_array_from_callback(struct.shape, struct.sharding, shard)

  def _parts(self, name: str, struct: jax.ShapeDtypeStruct) -> Mapping[_Box, str]:
    return self.by_array.get(f"{name} {struct.dtype}{list(struct.shape)}", {})


def _open_all(folder: epath.Path) -> tuple[dict[str, _OpenedParts], StorageError | None]:
  """What this process can read of a step, by the start of the run that saved it: its own parts, and those that hosts
  left on the same disk which are not there now."""
  live = {f"process-{host}" for host in _from_all(np.array(host_index(jax.process_index()))).tolist()}
  left = [path / folder.name for path in folder.parent.parent.glob("process-*") if path.name not in live]
  found: dict[str, _OpenedParts] = {}
  problem = None
  for one in (folder, *sorted(left)):
    parts, position, failed = _open_files(one)
    problem = problem or failed
    if parts is not None:
      start = str(np.load(io.BytesIO(position)).get(_START, ""))
      opened = found.setdefault(start, _OpenedParts({}, position))
      opened.files |= dict.fromkeys(parts.files, parts)
  return found, problem


def _open_files(folder: epath.Path) -> tuple[Any, bytes, StorageError | None]:
  """The parts in a folder, read when they are taken; None where one is missing or damaged, or the disk fails."""

  def load() -> tuple[Any, bytes, bool]:
    parts, position = np.load(folder / _PARTS), (folder / _POSITION).read_bytes()
    return parts, position, all(file.zip.testzip() is None for file in (parts, np.load(io.BytesIO(position))))

  try:
    parts, position, good = retried(folder, load)
  except StorageError as error:
    _LOG.warning(f"maxtext: process {jax.process_index()}: {error}")
    return None, b"", error
  except (OSError, ValueError, zipfile.BadZipFile):
    return None, b"", None
  return (parts if good else None), position, None


def _bytes(part: np.ndarray) -> np.ndarray:
  """Without their dtype: NumPy's files do not know all of ours."""
  return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def _refuse_other(folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
  """Parts of another model are the user's mistake, as in `restore`, and stay where they are; all processes end."""
  wants = {name: f"{struct.dtype}{list(struct.shape)}" for name, struct in wanted.items()}
  problem = ""
  for step in steps_in(folder)[-1:]:
    with suppress(OSError, ValueError, zipfile.BadZipFile), np.load(folder / str(step) / _PARTS) as parts:
      has = dict(_parse_key(key) for key in parts.files)
      other = next((name for name in sorted(has | wants) if has.get(name) != wants.get(name)), None)
      if other is not None:
        there = f"has {has[other]}" if other in has else "has none"
        here = f"wants {wants[other]}" if other in wants else "wants none"
        problem = f"{folder / str(step)} {there} for {other}, and this run {here}"
  if any_process(bool(problem)):
    problem = problem or "another process has parts of another model on its disk"
    raise ConfigError(f"{problem}. Nothing was changed: set the sizes as they were, or choose another run_name.")


def _local_shards(name: str, array: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
  """The parts of an array that this process's devices hold, copied: the loop writes over them."""
  found = {_key(name, array.shape, array.dtype, shard.index): shard.data for shard in array.addressable_shards}
  for key, data in found.items():
    yield key, np.array(data)


def _shards(struct: jax.ShapeDtypeStruct) -> dict[_Box, set[int]]:
  """Where the shards of an array are in it, each with the processes that hold it."""
  found: dict[_Box, set[int]] = {}
  for device, index in struct.sharding.devices_indices_map(struct.shape).items():
    found.setdefault(_box(index, struct.shape), set()).add(device.process_index)
  return found


def _box(index: Sequence[slice] | None, shape: Sequence[int]) -> _Box:
  assert index is not None
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _parse_box(where: str) -> _Box:
  pairs = (part.split("-") for part in where.split(",") if part)
  return tuple((int(start), int(stop)) for start, stop in pairs)


def _overlap(one: _Box, other: _Box) -> _Box:
  return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True))


def _overlapping(box: _Box, others: Collection[_Box]) -> list[_Box]:
  """Those of some boxes, which do not overlap each other, that overlap one: where it is among them, it alone. So a
  restore on the mesh that saved compares no pairs, of which thousands of devices have millions."""
  if box in others and _volume(box):
    return [box]
  return [other for other in others if _volume(_overlap(box, other))]


def _volume(box: _Box) -> int:
  return prod(stop - start for start, stop in box)


def _within(part: _Box, whole: _Box) -> tuple[slice, ...]:
  return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, whole, strict=True))


def _key(name: str, shape: Sequence[int], dtype: Any, index: Sequence[slice] | None) -> str:
  """A part by all that tells it from any other, so that what does not fit is not found."""
  where = ",".join(f"{start}-{stop}" for start, stop in _box(index, shape))
  return f"{name} {dtype}{list(shape)} {where}"


def _parse_key(key: str) -> tuple[str, str]:
  """Name, dtype and shape of the array whose part has this key."""
  name, _, rest = key.partition(" ")
  return name, rest.rpartition(" ")[0]


def _gather(array: jax.Array | np.ndarray) -> np.ndarray:
  if isinstance(array, jax.Array) and not array.is_fully_addressable:
    return multihost_utils.process_allgather(array, tiled=True)
  return np.array(array)


def _all_finite(state: Any) -> bool:
  """Whether no process finds a NaN or an infinity in its parts."""
  return not any_process(bool(nonfinite_names(named(state))))


def _steps_of_all(folder: epath.Path) -> list[int]:
  """The steps that any process has, latest first."""
  own = np.full(_KEPT + 1, -1)
  steps = steps_in(folder)[-len(own) :]
  own[: len(steps)] = steps
  return sorted({int(step) for step in _from_all(own).flat if step >= 0}, reverse=True)


def _from_all(value: np.ndarray) -> np.ndarray:
  """What every process has, in their order."""
  return multihost_utils.process_allgather(value) if jax.process_count() > 1 else value[None]


def _texts_of_all(text: str) -> list[str]:
  """The text of every process, in their order."""
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = _from_all(np.array(len(data)))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: len(data)] = data
  return [row[:size].tobytes().decode() for row, size in zip(_from_all(padded), sizes, strict=True)]


def _listed(processes: Sequence[int]) -> str:
  return ", ".join(map(str, processes))


def _print(what: str) -> None:
  if jax.process_index() == 0:
    _LOG.info(f"maxtext: {what}")
