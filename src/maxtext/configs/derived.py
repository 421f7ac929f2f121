"""Values derived from the keys and the number of devices: pure functions that need no devices."""

from math import ceil, prod
from typing import Any, Literal

from maxtext.configs.errors import ConfigError
from maxtext.configs.types import (
  DcnParallelism,
  DerivedValues,
  IciParallelism,
  MaxTextConfig,
  RematAndOffload,
  RematLocation,
  RematPolicy,
  get_individual_scales,
)
from maxtext.configs.values import in_bucket, remat_policies


def derive(config: MaxTextConfig, devices: int, slices: int = 1) -> DerivedValues:
  """The derived values of a run on `devices` devices in `slices` slices."""
  c, rows = config, global_batch_size(config, devices)
  ici, dcn = parallelism(c, "ici", devices // slices), parallelism(c, "dcn", slices)
  sizes = {axis: a * b for axis, a, b in zip(mesh_axes(c), ici, dcn, strict=True)}
  return DerivedValues(
    **_known(config),
    **_ramp(config, rows),
    ici_parallelism=list(ici),
    dcn_parallelism=list(dcn),
    num_diloco_replicas=sizes.get("diloco", 1),
    context_parallel_size=sizes.get("context", 1),
    num_target_devices=devices,
    global_batch_size_to_load=rows,
    global_batch_size_to_train_on=rows,
    global_batch_size_to_load_eval=eval_batch_size(c, devices),
    global_batch_size_to_eval_on=eval_batch_size(c, devices),
    micro_batch_size_to_eval_on=eval_batch_size(c, devices),
    micro_batch_size_to_train_on=rows // c.gradient_accumulation_steps,
  )


def with_devices(config: MaxTextConfig, devices: int, slices: int = 1) -> MaxTextConfig:
  """The configuration with every derived value, except the folders of a run without a name."""
  known = derive(config, devices, slices).model_dump()
  folders = () if config.run_name else _FOLDERS
  return _with(config, {key: value for key, value in known.items() if key not in folders})


def without_devices(config: MaxTextConfig) -> MaxTextConfig:
  """The configuration with the derived values that need no devices. Reading the others raises an error."""
  return _with(config, _known(config))


def _with(config: MaxTextConfig, known: dict[str, Any]) -> MaxTextConfig:
  copy = config.model_copy(update=known)
  for key in DerivedValues.model_fields.keys() - known.keys():
    copy.__dict__.pop(key, None)
  return copy


_FOLDERS = ("checkpoint_dir", "metrics_dir", "tensorboard_dir")


def _known(config: MaxTextConfig) -> dict[str, Any]:
  """The derived values that need no devices."""
  c, custom = config, RematPolicy.CUSTOM in remat_policies(config.remat_policy)
  values = {key.removeprefix("base_"): size for key, size in scaled_sizes(c).items()} | {
    "using_pipeline_parallelism": c.ici_pipeline_parallelism != 1 or c.dcn_pipeline_parallelism != 1,
    "tensors_on_device": tensors_at(c, RematLocation.DEVICE) if custom else None,
    "tensors_to_offload": tensors_at(c, RematLocation.OFFLOAD) if custom else None,
    "convert_checkpoint_if_possible": False,
    "managed_mldiagnostics_dir": None,
  }
  if not c.run_name:
    return values
  base, remote = c.base_output_directory or "runs", in_bucket(c.base_output_directory)
  run, local = f"{base.rstrip('/')}/{c.run_name}", f"{'runs' if remote else base.rstrip('/')}/{c.run_name}"
  folders = (f"{run}/checkpoints/", f"{run}/metrics/" if remote else f"{run}/", f"{local}/tensorboard/")
  return values | dict(zip(_FOLDERS, folders, strict=True))


def _ramp(config: MaxTextConfig, rows: int) -> dict[str, Any]:
  """Values of the batch-size ramp-up to `rows`, in stages with an equal number of samples."""
  c = config
  if not c.enable_rampup_batch_size:
    return {}
  first, step, last = c.per_device_batch_size_start, c.per_device_batch_size_increment, c.per_device_batch_size
  stages = ceil((last - first) / step)
  samples = c.global_rampup_samples / stages
  return {
    "global_batch_size_to_load_start": int(rows * first / last),
    "global_batch_size_to_load_increment": int(rows * step / last),
    "rampup_samples_per_increment_to_load": samples,
    "rampup_end_step": sum(ceil(samples / (rows * (first + i * step) / last)) for i in range(stages)),
  }


def scaled_sizes(config: MaxTextConfig) -> dict[str, int]:
  """The model's sizes after `global_parameter_scale` is applied."""
  width, heads, hidden, depth = get_individual_scales(config.global_parameter_scale)
  factors = {
    "base_emb_dim": width,
    "base_mlp_dim": hidden,
    "base_moe_mlp_dim": hidden,
    "base_num_query_heads": heads,
    "base_num_kv_heads": heads,
    "base_num_decoder_layers": depth,
  }
  sizes = {key: getattr(config, key) for key in factors}
  return {key: size * factors[key] if size > 0 else size for key, size in sizes.items()}


def mesh_axes(config: MaxTextConfig) -> list[str]:
  """The names of the mesh axes; the DiLoCo axis is the outermost."""
  return (["diloco"] if config.enable_diloco and "diloco" not in config.mesh_axes else []) + config.mesh_axes


def parallelism(config: MaxTextConfig, network: Literal["ici", "dcn"], count: int) -> tuple[int, ...]:
  """The sizes of all mesh axes on one network, with -1 filled so that they multiply to `count`."""
  keys = [f"{network}_{_KEY_OF_AXIS.get(axis, axis)}_parallelism" for axis in mesh_axes(config)]
  for key in (IciParallelism if network == "ici" else DcnParallelism).model_fields:
    if key not in keys and getattr(config, key) != 1:
      raise ConfigError(f"{key}={getattr(config, key)} has no axis in mesh_axes={config.mesh_axes}: set it to 1.")
  sizes = [getattr(config, key, 1) for key in keys]
  sizes_text = " x ".join(f"{key}={size}" for key, size in zip(keys, sizes, strict=True) if size != 1) or "1"
  unit = "slices" if network == "dcn" else "devices per slice"
  if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
    raise ConfigError(f"{sizes_text}: sizes are positive, and at most one is -1, which takes what is left.")
  known = prod(size for size in sizes if size != -1)
  filled = tuple(count // known if size == -1 else size for size in sizes)
  if prod(filled) != count:
    raise ConfigError(f"{sizes_text} does not multiply to the {count} {unit} there are.")
  return filled


def global_batch_size(config: MaxTextConfig, devices: int) -> int:
  """Sequences per update: per_device_batch_size x devices x gradient_accumulation_steps."""
  rows = _whole(config.per_device_batch_size * devices * config.gradient_accumulation_steps)
  if rows != int(rows) or rows < 1:
    raise ConfigError(
      f"per_device_batch_size={config.per_device_batch_size} x {devices} devices x gradient_accumulation_steps="
      f"{config.gradient_accumulation_steps} = {rows:g} sequences, which is not a whole number above 0."
    )
  return int(rows)


def eval_batch_size(config: MaxTextConfig, devices: int) -> int:
  """Sequences per evaluation batch; those of a training micro-batch if eval_per_device_batch_size is not set."""
  rows = _whole((config.eval_per_device_batch_size or config.per_device_batch_size) * devices)
  if rows != int(rows) or rows < 1:
    raise ConfigError(
      f"eval_per_device_batch_size={config.eval_per_device_batch_size} x {devices} devices = {rows:g} sequences, which "
      f"is not a whole number above 0."
    )
  return int(rows)


def _whole(rows: float) -> float:
  """Without what a fraction such as 8/3 lacks to be a whole number of rows."""
  return round(rows) if abs(rows - round(rows)) < 1e-6 else rows


def compares_features(config: MaxTextConfig) -> bool:
  """Whether distillation compares what the layers of student and teacher make, and not only their outputs."""
  return bool(config.distill_beta or config.distill_beta_end)


def training_steps(config: MaxTextConfig) -> int:
  """The number of steps of a whole run."""
  return config.learning_rate_schedule_steps if config.steps == -1 else config.steps


def tensors_at(config: MaxTextConfig, place: RematLocation) -> list[str]:
  """The tensors of a layer that remat_policy=custom saves in one location."""
  return [name for name in RematAndOffload.model_fields if getattr(config, name) is place]


_KEY_OF_AXIS = {"stage": "pipeline"}
