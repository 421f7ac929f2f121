"""What checkpoints need of a run's configuration. This module alone reads its keys for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxtext.configs import MaxTextConfig
from maxtext.configs.values import plain_value


@dataclass(frozen=True)
class ArrayStorage:
  """How arrays are written and read.

  Attributes:
    use_ocdbt: many arrays share files, in TensorStore's database.
    use_zarr3: version 3 of Zarr, else version 2.
    concurrent_bytes: that are written or read at once.
    data_file_bytes: how large the shared files become.
    single_replica_reads: one replica reads, and sends the others what they hold.
  """

  use_ocdbt: bool
  use_zarr3: bool
  concurrent_bytes: int
  data_file_bytes: int
  single_replica_reads: bool


@dataclass(frozen=True)
class CheckpointOptions:
  """When a run saves, and what it keeps.

  Attributes:
    storage: how arrays are written.
    period: steps from one save to the next.
    continuous: a save begins when the last has ended, whatever the period.
    asynchronous: saves run in the background.
    keep: how many steps; None keeps all.
    todelete_subdir: where steps that are to be removed are moved; None removes them at once.
  """

  storage: ArrayStorage
  period: int
  continuous: bool
  asynchronous: bool
  keep: int | None
  todelete_subdir: str | None


@dataclass(frozen=True)
class RestoreOptions:
  """How a checkpoint is read.

  Attributes:
    storage: how arrays are read.
    values: every key's value, for saying what differs from a checkpoint's own.
  """

  storage: ArrayStorage
  values: Mapping[str, Any]


@dataclass(frozen=True)
class LocalCheckpointOptions:
  """The local tier: where, how often, and whether in the background."""

  directory: str
  period: int
  asynchronous: bool


def array_storage(config: MaxTextConfig) -> ArrayStorage:
  """From a run's keys."""
  return ArrayStorage(
    use_ocdbt=config.checkpoint_storage_use_ocdbt,
    use_zarr3=config.checkpoint_storage_use_zarr3,
    concurrent_bytes=config.checkpoint_storage_concurrent_gb * 10**9,
    data_file_bytes=config.checkpoint_storage_target_data_file_size_bytes,
    single_replica_reads=config.enable_single_replica_ckpt_restoring,
  )


def checkpoint_options(config: MaxTextConfig) -> CheckpointOptions:
  """From a run's keys."""
  return CheckpointOptions(
    storage=array_storage(config),
    period=config.checkpoint_period,
    continuous=config.enable_continuous_checkpointing,
    asynchronous=config.async_checkpointing,
    keep=config.max_num_checkpoints_to_keep,
    todelete_subdir=config.checkpoint_todelete_subdir,
  )


def restore_options(config: MaxTextConfig) -> RestoreOptions:
  """From a run's keys."""
  return RestoreOptions(array_storage(config), {key: plain_value(value) for key, value in config})


def local_checkpoint_options(config: MaxTextConfig) -> LocalCheckpointOptions:
  """From a run's keys."""
  return LocalCheckpointOptions(
    directory=config.local_checkpoint_directory,
    period=config.local_checkpoint_period,
    asynchronous=config.async_checkpointing,
  )


def exported_dimension(config: MaxTextConfig) -> int | None:
  """The layers' dimension of parameters that are exported; None where each layer is to be apart."""
  return None if config.force_unroll else config.param_scan_axis
