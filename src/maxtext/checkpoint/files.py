"""Reading and writing the arrays and the record of one checkpoint with Orbax. Nothing here decides when, or which."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from maxtext.checkpoint.checksum import added, checksums
from maxtext.checkpoint.layout import Layout
from maxtext.checkpoint.record import FILE, ITEM, PARAMETERS, Array, DamagedError, Record, checksum_file
from maxtext.checkpoint.tree import named, nested
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.mesh.multihost import problems_of_all

STATE = "state"
CHUNK = 64 << 20  # bytes that are read or written together
_REPLICAS = "data"  # the mesh axis along which devices hold the same parameters
_SAVES = itertools.count()  # the same on every process: all save the same things in the same order
_PATIENCE = 600  # seconds for the slowest process, Orbax's own
_IN_FLIGHT = 0.05  # of a process's share, while it is read: it is held twice until it is placed


def handlers(config: MaxTextConfig) -> dict[str, Any]:
  """Orbax's handlers of the items of a checkpoint that is written."""
  arrays = _AgreedArrays(
    use_ocdbt=config.checkpoint_storage_use_ocdbt,
    use_zarr3=config.checkpoint_storage_use_zarr3,
    save_concurrent_bytes=config.checkpoint_storage_concurrent_gb * 10**9,
  )
  return {STATE: ocp.PyTreeCheckpointHandler(handler_impl=arrays), ITEM: RecordHandler()}


def contents(
  config: MaxTextConfig, arrays: Mapping[str, Any], step: int, stacked: int | None, keys: Mapping[str, Any]
) -> ocp.args.Composite:
  """What a save writes: the arrays and the record. Checksums are under way when this returns."""
  described = {name: Array(tuple(np.shape(array)), str(array.dtype)) for name, array in arrays.items()}
  record, parts = Record(step, described, stacked, keys, jax.process_count()), checksums(arrays)

  def write(folder: epath.Path) -> None:
    (folder / checksum_file(jax.process_index())).write_text(json.dumps(added(parts).tolist()))
    if jax.process_index() == 0:
      (folder / FILE).write_text(json.dumps(record.to_json()))

  size = config.checkpoint_storage_target_data_file_size_bytes if config.checkpoint_storage_use_ocdbt else None
  chunks = nested({name: _chunks(Layout(stacked), name, array) for name, array in arrays.items()})
  state = ocp.args.PyTreeSave(nested(arrays), save_args=chunks, ocdbt_target_data_file_size=size)
  return ocp.args.Composite(**{STATE: state, ITEM: RecordSave(write)})


def _chunks(layout: Layout, name: str, array: Any) -> ocp.SaveArgs:
  """Large parameters in chunks of a layer or less, so that who reads a layer need not read, or hold, all of them."""
  if not name.startswith(PARAMETERS) or array.nbytes <= CHUNK:
    return ocp.SaveArgs()
  layers = layout.layers(name.partition("/")[2], array.ndim)
  return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=() if layers is None else (layers,))


class _Agreed:
  """The end of a save on all processes: what fails on one fails on all, where Orbax would let them wait for it."""

  def __init__(self, futures: Sequence[ocp.future.Future] | None) -> None:
    self._futures, self._name = futures or (), f"maxtext/saves/{next(_SAVES)}"

  def result(self, timeout: float | None = None) -> None:
    own: Exception | None = None
    try:
      for future in self._futures:
        future.result(timeout)
    except Exception as error:
      own = error
    problems = problems_of_all(self._name, reason(own) if own else "", timeout or _PATIENCE)
    if own and len(problems) == 1 == jax.process_count():
      raise own
    if problems:
      raise RuntimeError("; ".join(f"{text} (process {process})" for process, text in sorted(problems.items())))

  def cancel(self) -> None:
    for future in self._futures:
      future.cancel()


class _AgreedArrays(ocp.BasePyTreeCheckpointHandler):
  """Orbax's own, with an end that all processes agree on."""

  async def async_save(self, *args: Any, **kwargs: Any) -> list[ocp.future.Future]:
    return [_Agreed(await super().async_save(*args, **kwargs))]


class RecordHandler(ocp.AsyncCheckpointHandler):
  """Writes the record while the arrays are written: its checksums come from the devices, and the loop does not wait."""

  async def async_save(self, directory: epath.Path, args: "RecordSave") -> list[ocp.future.Future]:
    writing = ocp.future.CommitFutureAwaitingContractedSignals(self._write(directory, args), name="maxtext_record")
    return [_Agreed([writing])]

  async def _write(self, directory: epath.Path, args: "RecordSave") -> None:
    args.write(directory)

  def save(self, directory: epath.Path, args: "RecordSave") -> None:
    raise NotImplementedError("Orbax saves through async_save")

  def restore(self, directory: epath.Path, args: Any = None) -> Any:
    raise NotImplementedError("records are read by `Record.read`, without Orbax")


@ocp.args.register_with_handler(RecordHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class RecordSave(ocp.args.CheckpointArgs):
  """What writes the record into its folder, once all is known."""

  write: Callable[[epath.Path], None]


def read(
  config: MaxTextConfig, folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct | None], record: Record
) -> dict[str, Any]:
  """Arrays of a checkpoint, each process only the part that its devices hold; `None` wants a whole NumPy array.

  Raises `DamagedError`, on all processes, if something cannot be read or is not what was saved.
  """
  arrays: dict[str, Any] = {}
  difference, problem = np.zeros(len(wanted), np.uint32), None
  try:
    arrays = _read(config, folder, wanted, record)
    difference = _difference(folder, arrays, record)
  except DamagedError as damage:
    problem = damage
  failed, difference = _over_processes(problem is not None, difference)
  if problem or failed:
    raise problem or DamagedError("another process cannot read it")
  if wrong := [name for name, value in zip(sorted(wanted), difference, strict=True) if value]:
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise DamagedError(f"{wrong[0]}{more} is not what was saved (checksum)")
  return arrays


def _read(
  config: MaxTextConfig, folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct | None], record: Record
) -> dict[str, Any]:
  mesh = next((s.sharding.mesh for s in wanted.values() if s is not None), None) if _single_replica(config) else None
  handler = ocp.PyTreeCheckpointHandler(**({} if mesh is None else {"type_handler_registry": _one_replica_reads(mesh)}))
  sizes = {name: _local_bytes(struct, record.arrays[name]) for name, struct in wanted.items()}
  most = min(config.checkpoint_storage_concurrent_gb * 1e9, _IN_FLIGHT * sum(sizes.values()))
  arrays: dict[str, Any] = {}
  for names in _groups(sizes, most):
    restore = nested({name: _restore_args(wanted[name], mesh is not None) for name in names})
    item = jax.tree.map(lambda _: 0, restore, is_leaf=lambda x: isinstance(x, ocp.RestoreArgs))
    try:
      args = ocp.args.PyTreeRestore(item, restore_args=restore, partial_restore=True)
      arrays |= named(handler.restore(folder / STATE, args=args))
    except PermissionError as error:
      raise RunError(f"{folder} cannot be read: {error}.") from None
    except Exception as error:  # Orbax and TensorStore raise ValueError, KeyError, OSError and more for damaged files
      raise DamagedError(reason(error)) from error
  return arrays


def saved_checksums(folder: epath.Path, record: Record, processes: Iterable[int]) -> np.ndarray:
  """What those of the processes that saved have left, added up, in the order of the arrays' names."""
  saved = np.zeros(len(record.arrays), np.uint32)
  for process in processes:
    try:
      saved += np.array(json.loads((folder / ITEM / checksum_file(process)).read_text()), np.uint32)
    except (OSError, ValueError, TypeError, OverflowError):
      raise DamagedError(f"{ITEM}/{checksum_file(process)} cannot be read") from None
  return saved


def _difference(folder: epath.Path, arrays: Mapping[str, Any], record: Record) -> np.ndarray:
  """Checksums of what this process has read, less those of its share of the processes that saved; the sum is 0."""
  names = sorted(record.arrays)
  saved = saved_checksums(folder, record, range(jax.process_index(), record.processes, jax.process_count()))
  # One by one: on a CPU an array takes its own size as scratch.
  found = [added(checksums({name: arrays[name]})) for name in sorted(arrays)]
  return np.concatenate(found) - saved[[names.index(name) for name in sorted(arrays)]]


def _over_processes(failed: bool, difference: np.ndarray) -> tuple[bool, np.ndarray]:
  """Whether any process failed, and the sum of what they found."""
  if jax.process_count() == 1:
    return failed, difference
  everywhere = multihost_utils.process_allgather(np.append(np.uint32(failed), difference))
  total = np.asarray(np.sum(everywhere, axis=0, dtype=np.uint32))
  return bool(total[0]), total[1:]


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


def _local_bytes(struct: jax.ShapeDtypeStruct | None, array: Array) -> int:
  """What this process holds of an array."""
  if struct is None:
    return array.bytes
  parts = struct.sharding.addressable_devices_indices_map(struct.shape)
  shard = np.prod(struct.sharding.shard_shape(struct.shape), dtype=int)
  return int(len(parts) * shard * struct.dtype.itemsize)


def reason(error: BaseException) -> str:
  """Why storage failed, in one line: the first cause, without TensorStore's description of where it looked."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = " ".join(str(error).split()) or type(error).__name__
  text = text.split(" [tensorstore_spec")[0].split(" See full TensorStore details")[0]
  return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"


def _single_replica(config: MaxTextConfig) -> bool:
  return config.enable_single_replica_ckpt_restoring and jax.process_count() > 1


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
