"""The local tier: every process keeps its own parts of the state on a disk of its machine, often, and on its own.

A part that several processes hold, such as a replica's, is on each of their disks: what a machine lost, a peer sends.
Parts fit only the same mesh on the same processes; the run's own checkpoints (`restore.py`) fit any.
"""

import io
import logging
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
from maxtext.distributed.multihost import any_process, broadcast_from
from maxtext.distributed.transfer import receive_from
from maxtext.storage.atomic import UNFINISHED, atomic_folder

_LOG = logging.getLogger(__name__)

_PARTS, _POSITION = "parts.npz", "position.npz"
_UNUSED = "unused"  # behind the name of a step that a start did not resume from
_KEPT = 2  # a process may have finished a step that another has not


def local_folder(directory: str, name: str) -> epath.Path:
  """Where this process keeps its parts of a run."""
  folder = epath.Path(directory).absolute() / name / f"process-{jax.process_index()}"
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(f"local_checkpoint_directory={directory} cannot be written: {error.strerror}.") from None
  return folder


class LocalWriter:
  """Saves this process's parts by period; every process calls every method."""

  def __init__(self, options: LocalCheckpointOptions, folder: epath.Path) -> None:
    self._options, self._folder = options, folder
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
    files = {_PARTS: parts, _POSITION: {name: _gather(array) for name, array in position.items()}}
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


def resume_locally(folder: epath.Path, abstract: Any, at_least: int, blamed: int | None = None) -> Restored | None:
  """The latest step, not before `at_least` and not the one that is `blamed`, of which the processes' disks hold every
  part; None where there is none.

  All processes ask. What was never finished is removed. Steps that do not lead to the one that is taken are renamed,
  and those of another model are a mistake: nothing is lost by a wrong start.
  """
  _refuse_other(folder, named(abstract))
  for path in folder.glob(f"*{UNFINISHED}"):
    path.rmtree()
  found = None
  for step in (step for step in _steps_of_all(folder) if step >= at_least and step != blamed):
    if found := _assemble(folder / str(step), abstract):
      break
  for step in steps_in(folder):
    if found is None or step > int(found.folder.name):
      quarantine(folder / str(step), _UNUSED)
  return found


def _assemble(folder: epath.Path, abstract: Any) -> Restored | None:
  wanted = named(abstract)
  holders = {name: _holders(name, struct) for name, struct in wanted.items()}
  own = jax.process_index()
  keys = [key for keys in holders.values() for key, held_by in keys.items() if own in held_by]
  parts, problem = _open_files(folder, keys)
  answers = _from_all(np.array([parts is not None, problem is not None]))
  whole, silent = ({process for process, found in enumerate(answers[:, i]) if found} for i in range(2))
  lost = sorted({p for keys in holders.values() for held_by in keys.values() if not held_by & whole for p in held_by})
  if missed := sorted(silent & set(lost)):  # what a disk cannot be asked for may be there when it can
    raise problem or StorageError(
      f"{folder} cannot be read by process {_listed(missed)}. Nothing was changed; start again when it can."
    )
  if lost:
    _print(f"step {folder.name} is not whole on local disks: no other holds what process {_listed(lost)} held.")
    return None
  if lacking := sorted(set(range(jax.process_count())) - whole):
    _print(f"process {_listed(lacking)} gets its parts of step {folder.name} from its peers.")
  arrays = {name: _array(struct, name, holders[name], parts, whole) for name, struct in wanted.items()}
  first = min(whole)
  if not _all_finite(arrays):
    _print(f"step {folder.name} on local disks is not finite.")
    return None
  position = broadcast_from(first, (folder / _POSITION).read_bytes() if own == first else b"")
  return Restored(like(abstract, arrays), dict(np.load(io.BytesIO(position))), folder)


def _array(
  struct: jax.ShapeDtypeStruct,
  name: str,
  holders: Mapping[str, set[int]],
  parts: Mapping[str, np.ndarray] | None,
  whole: set[int],
) -> jax.Array:
  """One array from this process's parts, and from those that it lacks and others send."""
  own, pieces = jax.process_index(), dict[str, np.ndarray]()
  shape = struct.sharding.shard_shape(struct.shape)
  size = int(np.prod(shape, dtype=np.int64)) * struct.dtype.itemsize
  for key, held_by in holders.items():
    sender, lacking = min(held_by & whole), held_by - whole
    data = _bytes(parts[key]) if parts is not None and own in held_by else None
    if lacking and (own == sender or own in lacking):
      data = receive_from(sender, lacking, size, data)
    if data is not None:
      pieces[key] = data.view(struct.dtype).reshape(shape)
  return jax.make_array_from_callback(
    struct.shape, struct.sharding, lambda index: pieces[_key(name, struct.shape, struct.dtype, index)]
  )


def _open_files(folder: epath.Path, keys: Sequence[str]) -> tuple[Mapping[str, np.ndarray] | None, StorageError | None]:
  """This process's parts, read when they are taken; None where one is missing or damaged, or the disk fails."""

  def load() -> tuple[Any, bool]:
    parts, position = np.load(folder / _PARTS), np.load(folder / _POSITION)
    return parts, all(file.zip.testzip() is None for file in (parts, position))

  try:
    parts, good = retried(folder, load)
  except StorageError as error:
    _LOG.warning(f"maxtext: process {jax.process_index()}: {error}")
    return None, error
  except (OSError, ValueError, zipfile.BadZipFile):
    return None, None
  return (parts if good and set(keys) <= set(parts.files) else None), None


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


def _holders(name: str, struct: jax.ShapeDtypeStruct) -> dict[str, set[int]]:
  """Which processes hold each part of an array, in the same order everywhere."""
  found: dict[str, set[int]] = {}
  for device, index in struct.sharding.devices_indices_map(struct.shape).items():
    found.setdefault(_key(name, struct.shape, struct.dtype, index), set()).add(device.process_index)
  return dict(sorted(found.items()))


def _key(name: str, shape: Sequence[int], dtype: Any, index: Sequence[slice] | None) -> str:
  """A part by all that tells it from any other, so that what does not fit is not found."""
  assert index is not None
  where = ",".join("{}-{}".format(*part.indices(size)) for part, size in zip(index, shape, strict=True))
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


def _listed(processes: Sequence[int]) -> str:
  return ", ".join(map(str, processes))


def _print(what: str) -> None:
  if jax.process_index() == 0:
    _LOG.info(f"maxtext: {what}")
