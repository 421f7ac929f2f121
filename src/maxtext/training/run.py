"""From a configuration to a trained state."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from etils import epath
from jax.sharding import Mesh

from maxtext.checkpoint.tokenizer import keep_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.loader import values_and_origins
from maxtext.configs.types import ProfilerType
from maxtext.data.batch import BatchSource
from maxtext.data.iterable import Batches
from maxtext.data.options import data_options
from maxtext.distributed.multihost import (
  broadcast_from_first,
  check_joined,
  gather_problems,
  join,
  process_folder,
  unique_name,
)
from maxtext.logs import setup_logging
from maxtext.mesh.chips import find_chip
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.memory import device_memory, host_memory
from maxtext.models.flops import train_flops_per_token
from maxtext.models.model import Params
from maxtext.models.placement import placements, table
from maxtext.observe.metric_writers import (
  ConsoleWriter,
  FaultTolerantWriter,
  JsonLinesWriter,
  MetricWriter,
  ObjectStoreWriter,
  PrometheusWriter,
  TensorBoardWriter,
)
from maxtext.observe.run_directory import RunDirectory, config_changes, new_run_name
from maxtext.observe.stack_traces import StackTraces
from maxtext.training import compiled
from maxtext.training.arguments import check_arguments
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.dump import Dump
from maxtext.training.callbacks.evaluate import Evaluate
from maxtext.training.callbacks.guard import LossGuard
from maxtext.training.callbacks.profile import Profile
from maxtext.training.callbacks.write_metrics import WriteMetrics
from maxtext.training.compilation_cache import compilation_cache
from maxtext.training.consistency import agree_on_start, agree_on_step
from maxtext.training.loop import run_loop
from maxtext.training.objectives.base import Objective
from maxtext.training.program import Program, hlo_folder
from maxtext.training.resume import RunCheckpoints
from maxtext.training.state import TrainState, bytes_per_device
from maxtext.training.synchronized_compile import SynchronizedCompile

_LOG = logging.getLogger(__name__)

_PATIENCE = 600  # seconds for the slowest process to open its data


def train(
  config: MaxTextConfig,
  *,
  objective: Objective | None = None,
  optimizer: optax.GradientTransformation | None = None,
  data: BatchSource | Batches | None = None,
  callbacks: Sequence[Callback] = (),
  origins: Mapping[str, str] | None = None,
) -> TrainState:
  """Trains as configured, on all devices that JAX finds, and returns the last state.

  Args:
    config: the run.
    objective: the loss; None is language modelling, as configured.
    optimizer: replaces the configured one, with its learning rate and its weight decay.
    data: batches for the objective: an iterable, a function that returns one, or a `BatchSource`; None reads the
      configured data.
    callbacks: called by the loop, after the run's own.
    origins: where each value of the configuration came from, for the record.

  Raises:
    ConfigError: (a ValueError) the configuration, the data or another argument is invalid; nothing was written.
    RunError: the run ended itself, for example because its loss is not finite.
    KeyboardInterrupt: the run ended with a checkpoint after Ctrl-C, and the same call resumes it.
  """
  setup_logging()
  check_arguments(config, objective, optimizer, data, callbacks)
  with ExitStack() as closing:
    closing.enter_context(compilation_cache(config))
    _start(config)
    if config.collect_stack_trace:
      closing.callback(StackTraces(config.stack_trace_interval_seconds).close)
    program = Program.of(config, make_mesh(config), objective, optimizer, data)
    if config.debug_sharding and not jax.process_index():
      _LOG.info(table(program.model))
    _check_sharding(program)
    _check_host(program)
    file = config.compiled_trainstep_file
    step = compiled.load(program, Path(file)) if file else SynchronizedCompile(program.step, batch=1)
    name = broadcast_from_first(config.run_name or _new_name(config))
    record = values_and_origins(config, origins or {})
    checkpoints = RunCheckpoints(config, name, record)
    run, first = RunDirectory.of(config.base_output_directory, name), jax.process_index() == 0
    if first:
      closing.callback(run.discard_if_empty)
    closing.callback(checkpoints.release)
    checkpoints.acquire()
    if first:
      run.make()
      closing.callback(_finish, run)
      _introduce(program, run)
    guard = LossGuard(config.abort_on_nan_loss, config.abort_on_inf_loss)
    state, feed = checkpoints.restore_or_init(program)
    frozen = program.init_frozen()
    feed = agree_on_step(program, feed)
    if first:
      if int(state.step):
        _print_changes(checkpoints.saved_config(int(state.step)) or run.last_config(), record)
      run.begin(record if config.log_config else None)
      if config.save_config_to_gcs and run.store:
        run.store_config(record)
      if why := keep_tokenizer(data_options(config), config.load_parameters_path, str(run.store or run.path)):
        _LOG.warning(f"maxtext: the run's folder has no tokenizer: {why}")
    steps = range(int(state.step), config.learning_rate_schedule_steps if config.steps == -1 else config.steps)
    callbacks = [
      *_evaluations(program, checkpoints, frozen),
      *checkpoints.callbacks(guard),
      WriteMetrics(_sinks(config, steps, run) if first else []),
      guard,
      *(_jaxpr(program, run) if first and config.dump_jaxpr else []),
      *(_hlo(config, run) if config.dump_hlo and (first or config.dump_hlo_upload_all) else []),
      *(_profilers(config, run) if first or config.upload_all_profiler_results else []),
      *callbacks,
    ]
    for callback in callbacks:
      closing.callback(callback.close)
    mesh = program.model.execution.sharding.mesh
    flops = train_flops_per_token(program.model, config.max_target_length) / mesh.size
    if frozen:
      step = partial(_with_frozen, step, frozen)
    return run_loop(step, state, feed, steps, callbacks, flops, _peak_flops(mesh))


def _with_frozen(step: Any, frozen: Mapping[str, Params], state: TrainState, batch: Any) -> Any:
  return step(state, batch, frozen)


def _new_name(config: MaxTextConfig) -> str:
  """Process 0's is taken; the others do not look, so that no host remembers the folder as one that is not there."""
  return "" if jax.process_index() else new_run_name(config.base_output_directory, config.model_name)


def _finish(run: RunDirectory) -> None:
  """The report; a run that did what it should does not fail for want of a page."""
  try:
    if run.metrics.exists() and run.metrics.stat().st_size:
      _LOG.info(f"report: {run.finish()}")
  except OSError as error:
    _LOG.warning(f"maxtext: the report cannot be written: {error.strerror}.")


def _print_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  if changes := config_changes(before, now):
    _LOG.info(f"maxtext: resuming with other values than it was saved with: {', '.join(changes)}")


def _start(config: MaxTextConfig) -> None:
  if config.compile_topology:
    raise ConfigError(f"compile_topology={config.compile_topology} is for compiling only: leave it out to train here.")
  join(config)
  check_joined(config)
  agree_on_start(config)
  if config.enable_jax_profiler:
    jax.profiler.start_server(config.jax_profiler_port)
  platform = jax.default_backend()
  if "hardware" in config.model_fields_set and not config.hardware.startswith(platform):
    raise ConfigError(f"hardware={config.hardware}, but JAX finds {platform} devices: leave hardware out to take them.")


def _check_host(program: Program) -> None:
  """Memory or data that one host lacks ends the run on all of them: the others would wait for it."""
  problem: ConfigError | None = None
  try:
    _check_memory(program)
    program.check_data()
  except ConfigError as error:
    problem = error
  problems = gather_problems(unique_name("host"), str(problem or ""), _PATIENCE)
  if problem is not None:
    raise problem
  if problems:
    raise ConfigError("; ".join(f"process {process}: {text}" for process, text in sorted(problems.items())))


def _check_sharding(program: Program) -> None:
  """Parameters that stay whole on a mesh that is there to split them are a mistake in sizes or rules."""
  rows, tolerance = placements(program.model), program.config.sharding_tolerance
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


def _check_memory(program: Program) -> None:
  """Raises where parameters and optimizer state alone are larger than the memory that they are to live in."""
  devices, c = program.model.execution.sharding.mesh.local_devices, program.config
  if c.parameter_memory_host_offload or c.optimizer_memory_host_offload:
    return
  needed, where, there = bytes_per_device((program.state, program.frozen)), "a device", device_memory(devices[0])
  if devices[0].platform == "cpu":
    needed, where, there = needed * len(devices), "this host", host_memory()
  if there and needed > there:
    raise ConfigError(
      f"{c.model_name}: parameters and optimizer state take {needed / 1e9:,.1f} GB of the memory of {where}, which has "
      f"{there / 1e9:,.1f} GB. Take a smaller model, or more devices to shard it over (ici_fsdp_parallelism); `maxtext "
      f"plan` says how many it needs."
    )


def _evaluations(program: Program, checkpoints: RunCheckpoints, frozen: Mapping[str, Params]) -> list[Callback]:
  c = program.config
  evaluate = partial(program.evaluate, frozen=frozen, stop=checkpoints.stop_requested)
  return [Evaluate(evaluate, c.eval_interval, c.target_eval_loss)] if c.eval_interval > 0 else []


def _profilers(config: MaxTextConfig, run: RunDirectory) -> list[Callback]:
  """What traces, before it what brings the traces to the store: the last in the list is closed first."""
  c = config
  if c.profiler is ProfilerType.NONE:
    return []
  part = Path("profile") / process_folder(c.upload_all_profiler_results)
  folder, period, clean = run.path / part, c.profile_periodically_period, c.profile_cleanly
  stored = [Dump(folder, run.store / part, "", -1, delete=False)] if run.store else []
  return [*stored, Profile(folder, c.skip_first_n_steps_for_profiler, c.profiler_steps, period, clean)]


def _jaxpr(program: Program, run: RunDirectory) -> list[Callback]:
  """What JAX makes of the step, written at once, and what brings it into the run's folder, or a bucket."""
  c = program.config
  folder = Path(c.dump_jaxpr_local_dir)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "train_step.jaxpr.txt").write_text(str(program.step.trace(*program.arguments).jaxpr))
  target = epath.Path(c.dump_jaxpr_gcs_dir or (run.store or run.path) / "jaxpr_dump")
  return [Dump(folder, target, ".jaxpr", -1, c.dump_jaxpr_delete_local_after)]


def _hlo(config: MaxTextConfig, run: RunDirectory) -> list[Callback]:
  """What brings the compiler's files into the run's folder, or a bucket."""
  c = config
  folder = epath.Path(c.dump_hlo_gcs_dir or (run.store or run.path) / "xla_dump")
  target = folder / process_folder(c.dump_hlo_upload_all)
  return [Dump(hlo_folder(c), target, c.dump_hlo_module_name, c.dump_step, c.dump_hlo_delete_local_after)]


def _peak_flops(mesh: Mesh) -> float:
  """What a device could do at best, in dense bfloat16; 0 where that is not known."""
  chip = find_chip(mesh.devices.flat[0].device_kind)
  return chip.flops / chip.devices if chip else 0.0


def _introduce(program: Program, run: RunDirectory) -> None:
  model, mesh = program.model, program.model.execution.sharding.mesh
  axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1) or "one device"
  rows, length = jax.tree.leaves(program.batch)[0].shape[0], program.config.max_target_length
  _LOG.info(
    f"{program.config.model_name}: {model.size:,} parameters on {mesh.size} {mesh.devices.flat[0].platform} "
    f"({axes}), {rows} x {length} tokens a step, in {run.path}",
  )


def _sinks(config: MaxTextConfig, steps: range, run: RunDirectory) -> list[MetricWriter]:
  files: list[str | Path] = [run.metrics, *([config.metrics_file] if config.metrics_file else [])]
  sinks: dict[str, MetricWriter] = {str(file): JsonLinesWriter(file, after=steps.start) for file in files}
  if config.gcs_metrics and run.store:
    folder = run.store / "metrics"
    sinks[str(folder)] = ObjectStoreWriter(folder, config.log_period, after=steps.start)
  if config.enable_tensorboard:
    folder = run.path / "tensorboard"
    sinks[str(folder)] = TensorBoardWriter(folder)
  if config.prometheus_port:
    sinks[f"prometheus_port={config.prometheus_port}"] = PrometheusWriter(config.prometheus_port)
  return [*(FaultTolerantWriter(sink, name) for name, sink in sinks.items()), ConsoleWriter(config.log_period, steps)]
