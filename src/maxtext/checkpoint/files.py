"""Reading and writing the arrays and the metadata of one checkpoint with Orbax. Nothing here decides when, or which."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from maxtext.checkpoint.checksum import added, checksums, nonfinite
from maxtext.checkpoint.layout import Layout
from maxtext.checkpoint.metadata import (
  FILE,
  ITEM,
  NOT_FINITE,
  PARAMETERS,
  ArrayMetadata,
  Base,
  CheckpointMetadata,
  CorruptCheckpointError,
  NotFiniteError,
  Score,
  checksum_file,
)
from maxtext.checkpoint.options import ArrayStorage
from maxtext.checkpoint.storage import StorageError, reason, retried
from maxtext.checkpoint.tree import named, nested
from maxtext.configs import ConfigError
from maxtext.distributed.lease import LOST, LeaseLostError
from maxtext.distributed.multihost import gather_problems
from maxtext.layers.parameter_paths import below
from maxtext.storage.atomic import write_durably

STATE = "state"
CHUNK = 64 << 20  # bytes that are read or written together
_REPLICAS = "data"  # the mesh axis along which devices hold the same parameters
_SAVES = itertools.count()  # the same on every process: all save the same things in the same order
_PATIENCE = 600  # seconds for the slowest process, Orbax's own
_BAD: tuple[type[CorruptCheckpointError] | type[StorageError], ...] = (
  CorruptCheckpointError,
  StorageError,
)  # the worst last
_IN_FLIGHT = 0.05  # of a process's share, while it is read: it is held twice until it is placed


def handlers(storage: ArrayStorage, fence: Callable[[], None] = lambda: None) -> dict[str, Any]:
  """Orbax's handlers of the items of a checkpoint that is written; `fence` raises where it must not count."""
  arrays = _CollectiveArrayHandler(
    fence,
    use_ocdbt=storage.use_ocdbt,
    use_zarr3=storage.use_zarr3,
    save_concurrent_bytes=storage.concurrent_bytes,
  )
  return {STATE: ocp.PyTreeCheckpointHandler(handler_impl=arrays), ITEM: MetadataHandler(arrays, fence)}


def contents(
  storage: ArrayStorage,
  arrays: Mapping[str, Any],
  step: int,
  stacked: int | None,
  keys: Mapping[str, Any],
  finite: bool = False,
  score: Score | None = None,
  base: Base | None = None,
) -> ocp.args.Composite:
  """What a save writes: the arrays and the metadata. Checksums are under way when this returns.

  With `finite`, a save of arrays that hold NaN or infinities fails, on all processes, and is never committed.
  """
  described = {name: ArrayMetadata(tuple(np.shape(array)), str(array.dtype)) for name, array in arrays.items()}
  metadata = CheckpointMetadata(step, described, stacked, keys, jax.process_count(), score=score, base=base)
  parts = checksums(arrays)

  def write(folder: epath.Path) -> None:
    write_durably(folder / checksum_file(jax.process_index()), json.dumps(added(parts).tolist()))
    if jax.process_index() == 0:
      write_durably(folder / FILE, json.dumps(metadata.to_json()))

  def check() -> None:
    if finite and (bad := _named_where(arrays, nonfinite(parts))):
      raise NotFiniteError.of(bad)

  size = storage.data_file_bytes if storage.use_ocdbt else None
  chunks = nested({name: _chunks(Layout(stacked), name, array) for name, array in arrays.items()})
  state = ocp.args.PyTreeSave(nested(arrays), save_args=chunks, ocdbt_target_data_file_size=size)
  return ocp.args.Composite(**{STATE: state, ITEM: MetadataSave(write, check)})


def _chunks(layout: Layout, name: str, array: Any) -> ocp.SaveArgs:
  """Large parameters in chunks of a layer or less, so that who reads a layer need not read, or hold, all of them."""
  if not name.startswith(PARAMETERS) or array.nbytes <= CHUNK:
    return ocp.SaveArgs()
  layers = layout.layers(below(name), array.ndim)
  return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=() if layers is None else (layers,))


class _CollectiveCommit:
  """The end of a save on all processes: what fails on one fails on all, where Orbax would let them wait for it."""

  def __init__(self, futures: Sequence[ocp.future.Future] | None, check: Callable[[], None] = lambda: None) -> None:
    self._futures, self._check, self._name = futures or (), check, f"maxtext/saves/{next(_SAVES)}"

  def result(self, timeout: float | None = None) -> None:
    own: Exception | None = None
    try:
      for future in self._futures:
        future.result(timeout)
      self._check()  # every item asks when it is written, so the last does right before all count
    except Exception as error:
      own = error
    problems = gather_problems(self._name, reason(own) if own else "", timeout or _PATIENCE)
    if own and len(problems) == 1 == jax.process_count():
      raise own
    if lost := [text for text in problems.values() if text.startswith(LOST)]:
      raise LeaseLostError(lost[0])
    if problems:
      kind = NotFiniteError if any(text.endswith(NOT_FINITE) for text in problems.values()) else RuntimeError
      raise kind("; ".join(f"{text} (process {process})" for process, text in sorted(problems.items())))

  def settle(self) -> None:
    """Waits for what this process does, however it ends."""
    for future in self._futures:
      with suppress(Exception):
        future.result()

  def cancel(self) -> None:
    for future in self._futures:
      future.cancel()


class _CollectiveArrayHandler(ocp.BasePyTreeCheckpointHandler):
  """Orbax's own, with an end that all processes agree on."""

  saving = _CollectiveCommit(())  # the last save

  def __init__(self, fence: Callable[[], None], **how: Any) -> None:
    super().__init__(**how)
    self._fence = fence

  async def async_save(self, *args: Any, **kwargs: Any) -> list[ocp.future.Future]:
    self.saving = _CollectiveCommit(await super().async_save(*args, **kwargs), self._fence)
    return [self.saving]


class MetadataHandler(ocp.AsyncCheckpointHandler):
  """Writes the metadata while the arrays are written: its checksums come from the devices, and the loop does not wait.

  Whether the arrays may be kept is asked once they are written: threads that write into a folder that is gone complain.
  """

  def __init__(self, arrays: _CollectiveArrayHandler, fence: Callable[[], None]) -> None:
    super().__init__()
    self._arrays, self._fence = arrays, fence

  async def async_save(self, directory: epath.Path, args: "MetadataSave") -> list[ocp.future.Future]:
    writing = ocp.future.CommitFutureAwaitingContractedSignals(self._write(directory, args), name="maxtext_record")

    def check() -> None:
      self._arrays.saving.settle()
      args.check()
      self._fence()

    return [_CollectiveCommit([writing], check)]

  async def _write(self, directory: epath.Path, args: "MetadataSave") -> None:
    args.write(directory)

  def save(self, directory: epath.Path, args: "MetadataSave") -> None:
    raise NotImplementedError("Orbax saves through async_save")

  def restore(self, directory: epath.Path, args: Any = None) -> Any:
    raise NotImplementedError("records are read by `CheckpointMetadata.read`, without Orbax")


@ocp.args.register_with_handler(MetadataHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class MetadataSave(ocp.args.CheckpointArgs):
  """What writes the metadata into its folder, once all is known, and what then raises if nothing of it may be kept."""

  write: Callable[[epath.Path], None]
  check: Callable[[], None]


def read(
  storage: ArrayStorage,
  folder: epath.Path,
  wanted: Mapping[str, jax.ShapeDtypeStruct | None],
  metadata: CheckpointMetadata,
  finite: bool = False,
) -> dict[str, Any]:
  """Arrays of a checkpoint, each process only the part that its devices hold; `None` wants a whole NumPy array.

  Raises, on all processes, `CorruptCheckpointError` if something is missing, invalid or not what was saved, and
  `StorageError` if storage does not answer; with `finite`, `NotFiniteError` if what was saved holds NaN or infinities.
  """
  arrays: dict[str, Any] = {}
  found, problem = np.zeros(2 * len(wanted), np.uint32), cast("CorruptCheckpointError | StorageError | None", None)
  try:
    arrays = _read(storage, folder, wanted, metadata)
    found = np.concatenate(_compare_checksums(folder, arrays, metadata))
  except (CorruptCheckpointError, StorageError) as error:
    problem = error
  worst, found = _over_processes(1 + _BAD.index(type(problem)) if problem else 0, found)
  if worst:
    kind = _BAD[worst - 1]
    raise problem if isinstance(problem, kind) else kind(f"{folder} cannot be read by another process")
  difference, bad = np.split(found, 2)
  if wrong := _named_where(wanted, difference):
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise CorruptCheckpointError(f"{wrong[0]}{more} is not what was saved (checksum)")
  if finite and bad.any():
    raise NotFiniteError.of(_named_where(wanted, bad))
  return arrays


def _named_where(arrays: Mapping[str, Any], so: np.ndarray) -> list[str]:
  """The names, in their order, of the arrays where it is so."""
  return [name for name, value in zip(sorted(arrays), so, strict=True) if value]


def _read(
  storage: ArrayStorage,
  folder: epath.Path,
  wanted: Mapping[str, jax.ShapeDtypeStruct | None],
  metadata: CheckpointMetadata,
) -> dict[str, Any]:
  mesh = next((s.sharding.mesh for s in wanted.values() if s is not None), None) if _single_replica(storage) else None
  handler = ocp.PyTreeCheckpointHandler(**({} if mesh is None else {"type_handler_registry": _one_replica_reads(mesh)}))
  sizes = {name: _local_bytes(struct, metadata.arrays[name]) for name, struct in wanted.items()}
  most = min(storage.concurrent_bytes, _IN_FLIGHT * sum(sizes.values()))
  arrays: dict[str, Any] = {}
  for names in _groups(sizes, most):
    restore = nested({name: _restore_args(wanted[name], mesh is not None) for name in names})
    item = jax.tree.map(lambda _: 0, restore, is_leaf=lambda x: isinstance(x, ocp.RestoreArgs))
    try:
      args = ocp.args.PyTreeRestore(item, restore_args=restore, partial_restore=True)
      arrays |= named(retried(folder, partial(handler.restore, folder / STATE, args=args)))
    except StorageError:
      raise
    except (MemoryError, jax.errors.JaxRuntimeError) as error:  # of this machine, and not of the files
      raise StorageError(f"{folder} cannot be read here: {reason(error)}. Nothing was changed.") from error
    except Exception as error:  # Orbax and TensorStore raise ValueError, KeyError, OSError and more for damaged files
      raise CorruptCheckpointError(reason(error)) from error
  return arrays


def saved_checksums(folder: epath.Path, metadata: CheckpointMetadata, processes: Iterable[int]) -> np.ndarray:
  """What those of the processes that saved have left, added up, in the order of the arrays' names."""
  saved = np.zeros(len(metadata.arrays), np.uint32)
  for process in processes:
    file = folder / ITEM / checksum_file(process)
    try:
      saved += np.array(json.loads(retried(file, file.read_text)), np.uint32)
    except (OSError, ValueError, TypeError, OverflowError):
      raise CorruptCheckpointError(f"{ITEM}/{checksum_file(process)} cannot be read") from None
  return saved


def _compare_checksums(
  folder: epath.Path, arrays: Mapping[str, Any], metadata: CheckpointMetadata
) -> tuple[np.ndarray, np.ndarray]:
  """Checksums of what this process has read, less those of its share of the processes that saved, of which the sum is
  0; and for each array 1 where it is not finite."""
  names = sorted(metadata.arrays)
  saved = saved_checksums(folder, metadata, range(jax.process_index(), metadata.processes, jax.process_count()))
  # One by one: on a CPU an array takes its own size as scratch.
  found = [(added(parts), nonfinite(parts)) for name in sorted(arrays) if (parts := checksums({name: arrays[name]}))]
  sums, bad = (np.concatenate(column) for column in zip(*found, strict=True))
  return sums - saved[[names.index(name) for name in sorted(arrays)]], bad.astype(np.uint32)


def _over_processes(problem: int, found: np.ndarray) -> tuple[int, np.ndarray]:
  """The worst problem of any process, and the sum of what they found."""
  if jax.process_count() == 1:
    return problem, found
  everywhere = multihost_utils.process_allgather(np.append(np.uint32(problem), found))
  return int(everywhere[:, 0].max()), np.asarray(np.sum(everywhere[:, 1:], axis=0, dtype=np.uint32))


def _groups(sizes: Mapping[str, int], most: float) -> list[list[str]]:
  """The names in groups that are read at once, of that size or of one array."""
  groups: list[list[str]] = []
  room = 0.0
  for name in sorted(sizes, key=lambda name: sizes[name]):
    if not groups or sizes[name] > room:
      groups.append([])
      room = most
    groups[-1].append(name)
    room -= sizes[name]
  return groups


def _local_bytes(struct: jax.ShapeDtypeStruct | None, array: ArrayMetadata) -> int:
  """What this process holds of an array."""
  if struct is None:
    return array.bytes
  parts = struct.sharding.addressable_devices_indices_map(struct.shape)
  shard = np.prod(struct.sharding.shard_shape(struct.shape), dtype=int)
  return int(len(parts) * shard * struct.dtype.itemsize)


def _single_replica(storage: ArrayStorage) -> bool:
  return storage.single_replica_reads and jax.process_count() > 1


def _one_replica_reads(mesh: jax.sharding.Mesh) -> Any:
  axis = mesh.axis_names.index(_REPLICAS)
  owners = [{device.process_index for device in replica.flat} for replica in np.moveaxis(mesh.devices, axis, 0)]
  if len(owners) == 1 or any(a & b for a, b in itertools.pairwise(owners)):
    raise ConfigError(
      f"enable_single_replica_ckpt_restoring=true, but the mesh has {len(owners)} along '{_REPLICAS}', or processes "
      f"that hold parts of two replicas: leave it out, or split '{_REPLICAS}' over whole processes."
    )
  handler = ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=axis)
  return ocp.type_handlers.create_type_handler_registry(
    (jax.Array, handler), (np.ndarray, ocp.type_handlers.NumpyHandler())
  )


def _restore_args(struct: jax.ShapeDtypeStruct | None, single_replica: bool) -> ocp.RestoreArgs:
  if struct is None:
    return ocp.RestoreArgs(restore_type=np.ndarray)
  kind = ocp.type_handlers.SingleReplicaArrayRestoreArgs if single_replica else ocp.ArrayRestoreArgs
  return kind(sharding=struct.sharding, global_shape=struct.shape, dtype=struct.dtype)
