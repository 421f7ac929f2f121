"""Checks before step 1: libraries, memory, data, the output folder and its disk; and the dry run that stops after them.

Each is a `ConfigError` that names the key, its value and what to write instead.
"""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import jax

from maxtext.checkpoint.location import folder_of, steps_in
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import training_steps
from maxtext.configs.errors import plural
from maxtext.configs.types import DatasetType
from maxtext.configs.values import plain_value
from maxtext.distributed.multihost import gather_problems, unique_name
from maxtext.layers.lora import is_adapter
from maxtext.layers.quantized_weight import is_scale
from maxtext.logs import readable_size
from maxtext.mesh.memory import device_memory, host_memory
from maxtext.models.placement import placements
from maxtext.observe.experiment_trackers import check_trackers
from maxtext.observe.metric_writers import warn
from maxtext.observe.run_directory import RunDirectory, nearest_folder
from maxtext.training.program import Program
from maxtext.training.state import bytes_per_device
from maxtext.training.teacher import check_teacher

_PATIENCE = 600  # seconds for the slowest process to open its data
_LEAST_FILLED = 0.75  # of a state's bytes, which its checkpoint takes at least, compressed


def check_extras(config: MaxTextConfig) -> None:
  """Raises where a value of the configuration needs a library of an extra that is not installed."""
  for key, module, extra in _needed_modules(config):
    if find_spec(module) is None:
      value = plain_value(getattr(config, key))
      raise ConfigError(f"{key}={value} needs {module}, which is not installed: pip install 'maxtext[{extra}]'.")


def _needed_modules(config: MaxTextConfig) -> Iterator[tuple[str, str, str]]:
  """Key, module and extra."""
  c = config
  if c.dataset_type == DatasetType.HF:
    yield "dataset_type", "datasets", "hf"
  if c.dataset_type in (DatasetType.TFDS, DatasetType.C4MLPERF):
    yield "dataset_type", "tensorflow_datasets", "tfds"
  if c.dataset_type == DatasetType.GRAIN and c.grain_file_type == "parquet":
    yield "grain_file_type", "pyarrow", "hf"
  if c.use_grpo and "math_verify" in c.reward_functions:
    yield "reward_functions", "math_verify", "rl"
  if c.wandb_project:
    yield "wandb_project", "wandb", "wandb"
  if c.mlflow_experiment:
    yield "mlflow_experiment", "mlflow", "mlflow"
  for key, value in c:
    if isinstance(value, str) and value.startswith("gs://"):
      yield key, "gcsfs", "gcs"


def check_hardware(config: MaxTextConfig) -> None:
  """Raises where `hardware` was set and JAX finds other devices."""
  platform = jax.default_backend()
  if "hardware" not in config.model_fields_set or config.hardware.startswith(platform):
    return
  extra, modules = ("tpu", ["libtpu"]) if config.hardware == "tpu" else ("cuda", ["jax_plugins", "jax_cuda13_plugin"])
  install = config.hardware != "cpu" and not any(find_spec(module) for module in modules)
  instead = f", or pip install 'maxtext[{extra}]'" if install else ""
  raise ConfigError(
    f"hardware={config.hardware}, but JAX finds {platform} devices: leave hardware out to take them{instead}."
  )


def check_host(program: Program) -> None:
  """Raises where an extra, memory, data or the disk is missing.

  What one host lacks ends the run on all of them: the others would wait for it.
  """
  problem: ConfigError | None = None
  try:
    check_extras(program.config)
    if jax.process_index() == 0:
      check_trackers(program.config.wandb_project, program.config.mlflow_experiment)
    check_teacher(program)
    _check_memory(program)
    program.data.check()
    if jax.process_index() == 0:
      _check_output(program)
  except ConfigError as error:
    problem = error
  problems = gather_problems(unique_name("host"), str(problem or ""), _PATIENCE)
  if problem is not None:
    raise problem
  if problems:
    raise ConfigError("; ".join(f"process {process}: {text}" for process, text in sorted(problems.items())))


def check_sharding(program: Program) -> None:
  """Parameters that stay whole on a mesh that is there to split them are a mistake in sizes or rules; adapters and
  scales are small and may."""
  rows = [row for row in placements(program.model) if not is_adapter(row.path) and not is_scale(row.path)]
  tolerance = program.config.sharding_tolerance
  if all(row.shards == 1 for row in rows):
    return
  whole = sorted((row for row in rows if row.shards == 1), key=lambda row: -row.size)
  share = sum(row.size for row in whole) / sum(row.size for row in rows)
  if share > tolerance:
    raise ConfigError(
      f"sharding_tolerance={tolerance}, but {share:.0%} of the parameters stay whole on every device: "
      f"{', '.join(f'{row.path} {list(row.shape)}' for row in whole[:3])}, ... "
      f"Choose a mesh whose axes divide them, or raise sharding_tolerance; debug_sharding=true shows all."
    )


def describe(program: Program, run: RunDirectory, config_name: str) -> str:
  """The first line of a run: model, devices, batch and folder."""
  model, mesh = program.model, program.model.execution.sharding.mesh
  axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1) or "one device"
  rows, length = _batch_shape(program)
  maps = program.mapped
  trained = "" if maps is None else f" by maps with {sum(s.size for s in maps.params.values()):,}, which train,"
  return (
    f"{config_name}: {model.size:,} parameters{trained} on {mesh.size} {mesh.devices.flat[0].platform} "
    f"({axes}), {rows} x {length} tokens a step, in {run.path}"
  )


def dry_run_lines(program: Program, run: RunDirectory, config_name: str) -> Iterator[str]:
  """What a run would do, after its checks, with nothing compiled and nothing written."""
  c = program.config
  steps = training_steps(c)
  rows, length = _batch_shape(program)
  yield describe(program, run, config_name)
  yield f"steps        {steps:,}, {rows * length:,} tokens each, {steps * rows * length:,} together"
  needed, where, there = _memory(program)
  yield (
    f"memory       {readable_size(needed)} of {where} for parameters and optimizer state"
    + (f", of {readable_size(there)}" if there else "")
    + "; activations come on top (`maxtext plan` compiles the step)"
  )
  yield f"data         {_describe_data(program, rows, length)}"
  yield f"checkpoints  {_describe_checkpoints(program, run)}"
  yield "dry run: all checks passed; nothing was compiled or written."


def _memory(program: Program) -> tuple[int, str, int | None]:
  """Bytes of parameters and optimizer state, where they live, and the bytes that are there, if known."""
  devices = program.model.execution.sharding.mesh.local_devices
  needed = bytes_per_device((program.state, program.frozen))
  if devices[0].platform == "cpu":
    return needed * len(devices), "this host", host_memory()
  return needed, "a device", device_memory(devices[0])


def _check_memory(program: Program) -> None:
  """Raises where parameters and optimizer state alone are larger than the memory that they are to live in."""
  c = program.config
  if c.parameter_memory_host_offload or c.optimizer_memory_host_offload:
    return
  needed, where, there = _memory(program)
  if there and needed > there:
    general = "Write lti_use_general_linear_map=false. " if c.lti_use_general_linear_map else ""
    raise ConfigError(
      f"{c.model_name}: parameters and optimizer state take {needed / 1e9:,.1f} GB of the memory of {where}, which has "
      f"{there / 1e9:,.1f} GB. {general}Take a smaller model, or more devices to shard it over (ici_fsdp_parallelism); "
      f"`maxtext plan` says how many it needs."
    )


def _check_output(program: Program) -> None:
  """Raises where the output folder cannot be written, or its disk does not hold one checkpoint; warns where it does
  not hold all that are kept."""
  c = program.config
  run = RunDirectory.of(c.base_output_directory, c.run_name or "new")
  run.check_writable()
  if not c.enable_checkpointing or run.store:
    return
  size, free, count = program.state_bytes, _free(run), _checkpoints_to_write(c)
  where = f"base_output_directory={c.base_output_directory or 'runs'}"
  if free < _LEAST_FILLED * size:
    raise ConfigError(
      f"{where}: a checkpoint takes about {readable_size(size)}, and its disk has {readable_size(free)} free. Choose a "
      f"folder on a larger disk, or write enable_checkpointing=false."
    )
  if count is not None and free < _LEAST_FILLED * size * count:
    kept = "null" if c.max_num_checkpoints_to_keep is None else c.max_num_checkpoints_to_keep
    warn(
      f"{where}: {plural(count, 'checkpoint')} of about {readable_size(size)} do not fit on its disk, which has "
      f"{readable_size(free)} free. Lower max_num_checkpoints_to_keep (it is {kept}) or raise checkpoint_period (it is "
      f"{c.checkpoint_period})."
    )


def _checkpoints_to_write(config: MaxTextConfig) -> int | None:
  """How many checkpoints will be on the disk beside those that are there; None where time decides."""
  c, keep = config, config.max_num_checkpoints_to_keep
  steps = training_steps(c)
  saves = steps // c.checkpoint_period + (steps % c.checkpoint_period != 0 and c.save_checkpoint_on_completion)
  best = int(c.eval_interval > 0 or bool(c.use_grpo))
  most = None if keep is None else max(2, keep) + 1 + best  # an old one is removed after a new one is written
  count = most if c.enable_continuous_checkpointing else saves if most is None else min(saves, most)
  there = len(steps_in(folder_of(c.base_output_directory, c.run_name))) if c.run_name else 0
  return None if count is None else max(1, count - there)


def _free(run: RunDirectory) -> int:
  return shutil.disk_usage(nearest_folder(run.path)).free


def _batch_shape(program: Program) -> tuple[int, int]:
  return jax.tree.leaves(program.batch)[0].shape[0], program.config.max_target_length


def _describe_data(program: Program, rows: int, length: int) -> str:
  kind, known = plain_value(program.config.dataset_type), program.data.size()
  if kind == DatasetType.SYNTHETIC.value:
    return "synthetic tokens, without end"
  if known is None:
    return f"{kind}; its size is not known before it is read"
  documents, tokens = known
  if tokens is None:
    return f"{kind}: {plural(documents, 'document')}"
  steps = max(tokens - documents, 0) // (rows * length)
  return f"{kind}: {plural(documents, 'document')}, {plural(tokens, 'token')}, about {plural(steps, 'step')}"


def _describe_checkpoints(program: Program, run: RunDirectory) -> str:
  c = program.config
  if not c.enable_checkpointing:
    return "none (enable_checkpointing=false)"
  text = f"{readable_size(program.state_bytes)} each, every {plural(c.checkpoint_period, 'step')}"
  text += " and at the end" if c.save_checkpoint_on_completion else ""
  if not run.store:
    text += f"; {readable_size(_free(run))} free in {nearest_folder(run.path)}"
  if c.run_name and (steps := steps_in(folder_of(c.base_output_directory, c.run_name))):
    text += f"; it would resume from step {steps[-1]:,}"
  return text
