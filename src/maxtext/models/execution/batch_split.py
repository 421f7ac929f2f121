"""From keys to the batch-split schedule."""

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import global_batch_size
from maxtext.layers.execution import Sharding


def batch_split(config: MaxTextConfig, sharding: Sharding) -> int:
  """The number of parts of the batch that a layer runs on."""
  if not config.use_batch_split_schedule:
    return 1
  parts, devices = config.batch_split_factor, sharding.mesh.size
  if parts < 2:
    raise ConfigError(f"batch_split_factor={parts} splits nothing: write batch_split_factor=2 for two halves.")
  rows = global_batch_size(config, devices) // config.gradient_accumulation_steps
  groups = sharding.rules.num_shards(sharding.mesh, "activation_batch")
  if rows % (parts * groups):
    raise ConfigError(
      f"batch_split_factor={parts}: {rows} sequences of a batch cannot be cut into {parts} parts for {groups} groups "
      f"of devices: make per_device_batch_size a multiple of {parts * groups / devices:g}."
    )
  return parts
