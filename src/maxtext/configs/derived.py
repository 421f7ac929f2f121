"""What follows from the keys once the number of devices is known: pure functions, no devices."""

from math import prod

from maxtext.configs.errors import ConfigError
from maxtext.configs.refusals import remat_policies
from maxtext.configs.types import (
  DcnParallelism,
  DerivedValues,
  IciParallelism,
  MaxTextConfig,
  RematAndOffload,
  RematLocation,
  RematPolicy,
)


def derive(config: MaxTextConfig, devices: int, slices: int = 1) -> DerivedValues:
  """The derived values of a run on `devices` devices in `slices` slices."""
  c, rows = config, global_batch_size(config, devices)
  custom = RematPolicy.CUSTOM in remat_policies(c)
  return DerivedValues(
    emb_dim=c.base_emb_dim,
    mlp_dim=c.base_mlp_dim,
    num_decoder_layers=c.base_num_decoder_layers,
    num_kv_heads=c.base_num_kv_heads,
    num_query_heads=c.base_num_query_heads,
    ici_parallelism=list(parallelism(c, "ici", devices // slices)),
    dcn_parallelism=list(parallelism(c, "dcn", slices)),
    num_target_devices=devices,
    global_batch_size_to_load=rows,
    global_batch_size_to_train_on=rows,
    global_batch_size_to_load_eval=eval_batch_size(c, devices),
    global_batch_size_to_eval_on=eval_batch_size(c, devices),
    micro_batch_size_to_eval_on=eval_batch_size(c, devices),
    micro_batch_size_to_train_on=rows // c.gradient_accumulation_steps,
    tensors_on_device=tensors_placed(c, RematLocation.DEVICE) if custom else None,
    tensors_to_offload=tensors_placed(c, RematLocation.OFFLOAD) if custom else None,
  )


def mesh_axes(config: MaxTextConfig) -> list[str]:
  """The names of the mesh's axes; replicas that train apart are the outermost."""
  return (["diloco"] if config.enable_diloco and "diloco" not in config.mesh_axes else []) + config.mesh_axes


def parallelism(config: MaxTextConfig, network: str, count: int) -> tuple[int, ...]:
  """The sizes of all mesh axes on one network, with -1 filled so that they multiply to `count`."""
  keys = [f"{network}_{_KEY_OF_AXIS.get(axis, axis)}_parallelism" for axis in mesh_axes(config)]
  for key in (IciParallelism if network == "ici" else DcnParallelism).model_fields:
    if key not in keys and getattr(config, key) != 1:
      raise ConfigError(f"{key}={getattr(config, key)} has no axis in mesh_axes={config.mesh_axes}: set it to 1.")
  sizes = [getattr(config, key, 1) for key in keys]
  product = " x ".join(f"{key}={size}" for key, size in zip(keys, sizes, strict=True) if size != 1) or "1"
  unit = "slices" if network == "dcn" else "devices per slice"
  if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
    raise ConfigError(f"{product}: sizes are positive, and at most one is -1, which takes what is left.")
  known = prod(size for size in sizes if size != -1)
  filled = tuple(count // known if size == -1 else size for size in sizes)
  if prod(filled) != count:
    raise ConfigError(f"{product} does not multiply to the {count} {unit} there are.")
  return filled


def global_batch_size(config: MaxTextConfig, devices: int) -> int:
  """Sequences per update: per device, times devices, times accumulation."""
  rows = config.per_device_batch_size * devices * config.gradient_accumulation_steps
  if rows != int(rows) or rows < 1:
    raise ConfigError(
      f"per_device_batch_size={config.per_device_batch_size} x {devices} devices x gradient_accumulation_steps="
      f"{config.gradient_accumulation_steps} = {rows:g} sequences, which is not a whole number above 0."
    )
  return int(rows)


def eval_batch_size(config: MaxTextConfig, devices: int) -> int:
  """Sequences per batch of evaluation; those of a micro-batch of training where none are named."""
  rows = (config.eval_per_device_batch_size or config.per_device_batch_size) * devices
  if rows != int(rows) or rows < 1:
    raise ConfigError(
      f"eval_per_device_batch_size={config.eval_per_device_batch_size} x {devices} devices = {rows:g} sequences, which "
      f"is not a whole number above 0."
    )
  return int(rows)


def tensors_placed(config: MaxTextConfig, place: RematLocation) -> list[str]:
  """The tensors of a layer that policy custom keeps in one place."""
  return [name for name in RematAndOffload.model_fields if getattr(config, name) is place]


_KEY_OF_AXIS = {"stage": "pipeline"}
