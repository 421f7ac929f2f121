"""Reading and writing the arrays and the record of one checkpoint with Orbax. Nothing here decides when, or which."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from maxtext.checkpoint.checksum import checksums
from maxtext.checkpoint.record import FILE, ITEM, Array, DamagedError, Record
from maxtext.checkpoint.tree import named, nested
from maxtext.configs import ConfigError, MaxTextConfig

STATE = "state"
CHECKSUMS = "checksums"
CHUNK = 64 << 20  # bytes that are read or written together: a layer of a stacked array, or less
_REPLICAS = "data"  # the mesh axis along which devices hold the same parameters


def handlers(config: MaxTextConfig, mesh: jax.sharding.Mesh | None = None) -> dict[str, Any]:
  """Orbax's handlers of the items of a checkpoint. A mesh is given to read with one replica and send to the others."""
  arrays = ocp.PyTreeCheckpointHandler(
    use_ocdbt=config.checkpoint_storage_use_ocdbt,
    use_zarr3=config.checkpoint_storage_use_zarr3,
    save_concurrent_gb=config.checkpoint_storage_concurrent_gb,
    restore_concurrent_gb=config.checkpoint_storage_concurrent_gb,
    **({} if mesh is None else {"type_handler_registry": _one_replica_reads(mesh)}),
  )
  return {STATE: arrays, ITEM: ocp.JsonCheckpointHandler(filename=FILE)}


def contents(
  config: MaxTextConfig, arrays: Mapping[str, Any], step: int, stacked: int | None, keys: Mapping[str, Any]
) -> ocp.args.Composite:
  """What a save writes: the arrays, their checksums and the record."""
  record = Record(step, {n: Array(tuple(np.shape(a)), str(a.dtype)) for n, a in arrays.items()}, stacked, keys)
  size = config.checkpoint_storage_target_data_file_size_bytes if config.checkpoint_storage_use_ocdbt else None
  tree = nested({**arrays, CHECKSUMS: checksums(arrays)})
  chunked = jax.tree.map(lambda a: ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=(0,) if a.ndim else ()), tree)
  save = ocp.args.PyTreeSave(tree, save_args=chunked, ocdbt_target_data_file_size=size)
  return ocp.args.Composite(**{STATE: save, ITEM: ocp.args.JsonSave(record.to_json())})


def read(
  config: MaxTextConfig, folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct | None], record: Record
) -> dict[str, Any]:
  """Arrays of a checkpoint, each process only the part that its devices hold; `None` wants a whole NumPy array.

  Raises `DamagedError` if something cannot be read or is not what was saved.
  """
  where = next((s.sharding.mesh for s in wanted.values() if s is not None), None) if _single_replica(config) else None
  handler = handlers(config, where)[STATE]
  everything = dict(wanted) | {CHECKSUMS: None}
  restore = nested({name: _restore_args(struct, where is not None) for name, struct in everything.items()})
  item = jax.tree.map(lambda _: 0, restore, is_leaf=lambda x: isinstance(x, ocp.RestoreArgs))
  try:
    found = handler.restore(
      folder / STATE, args=ocp.args.PyTreeRestore(item, restore_args=restore, partial_restore=True)
    )
  except PermissionError as error:
    raise ConfigError(f"{folder} cannot be read: {error}") from None
  except Exception as error:  # Orbax and TensorStore raise ValueError, KeyError, OSError and more for damaged files
    raise DamagedError(reason(error)) from error
  arrays = named(found)
  _verify(arrays.pop(CHECKSUMS), arrays, record)
  return arrays


def reason(error: BaseException) -> str:
  """Why storage failed, in one line: the first cause, without TensorStore's description of where it looked."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = " ".join(str(error).split()) or type(error).__name__
  text = text.split(" [tensorstore_spec")[0].split(" See full TensorStore details")[0]
  return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"


def _verify(saved: np.ndarray, arrays: Mapping[str, Any], record: Record) -> None:
  expected = dict(zip(sorted(record.arrays), saved, strict=True))
  got = dict(zip(sorted(arrays), np.asarray(checksums(arrays)), strict=True))
  if wrong := [name for name, value in got.items() if value != expected[name]]:
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise DamagedError(f"{wrong[0]}{more} is not what was saved (checksum)")


def _single_replica(config: MaxTextConfig) -> bool:
  return config.enable_single_replica_ckpt_restoring and jax.process_count() > 1


def _one_replica_reads(mesh: jax.sharding.Mesh) -> Any:
  handler = ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=mesh.axis_names.index(_REPLICAS))
  return ocp.type_handlers.create_type_handler_registry(
    (jax.Array, handler), (np.ndarray, ocp.type_handlers.NumpyHandler())
  )


def _restore_args(struct: jax.ShapeDtypeStruct | None, single_replica: bool) -> ocp.RestoreArgs:
  if struct is None:
    return ocp.RestoreArgs(restore_type=np.ndarray)
  kind = ocp.type_handlers.SingleReplicaArrayRestoreArgs if single_replica else ocp.ArrayRestoreArgs
  return kind(sharding=struct.sharding, global_shape=struct.shape, dtype=struct.dtype)
