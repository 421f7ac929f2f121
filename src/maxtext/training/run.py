"""From a configuration to a trained state."""

import logging
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from etils import epath
from jax.sharding import Mesh

from maxtext.checkpoint.metadata import Criterion
from maxtext.checkpoint.tokenizer import find_tokenizer, keep_tokenizer
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import training_steps
from maxtext.configs.errors import plural
from maxtext.configs.loader import values_and_origins
from maxtext.configs.types import ProfilerType
from maxtext.configs.values import default_of, plain_value
from maxtext.data.batch import BatchSource
from maxtext.data.iterable import Batches
from maxtext.data.options import data_options
from maxtext.distributed.multihost import (
  broadcast_from_first,
  check_joined,
  join,
  process_folder,
)
from maxtext.distributed.peers import before_end
from maxtext.logs import debug_loggers, readable_duration, setup_logging
from maxtext.mesh.chips import find_chip
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.memory import memory_in_use
from maxtext.models.flops import train_flops_per_token
from maxtext.models.model import Params
from maxtext.models.placement import table
from maxtext.observe.events import EventHook
from maxtext.observe.experiment_trackers import MlflowTracker, TrackerWriter, WandbTracker
from maxtext.observe.goodput_journal import GoodputJournal
from maxtext.observe.metric_writers import (
  ConsoleWriter,
  FaultTolerantWriter,
  JsonLinesWriter,
  MetricWriter,
  ObjectStoreWriter,
  PrometheusWriter,
  TensorBoardWriter,
)
from maxtext.observe.phases import PhaseClock
from maxtext.observe.run_directory import RunDirectory, config_changes, new_run_name
from maxtext.observe.sample_writer import SampleWriter
from maxtext.observe.stack_traces import StackTraces
from maxtext.status_line import StatusLine, status_line
from maxtext.training import compiled
from maxtext.training.arguments import check_arguments
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.compare_replicas import CompareReplicas
from maxtext.training.callbacks.dump import Dump
from maxtext.training.callbacks.evaluate import Evaluate
from maxtext.training.callbacks.goodput import KeepJournal, MonitorGoodput, MonitorStepTime
from maxtext.training.callbacks.guard import LossGuard
from maxtext.training.callbacks.profile import Profile
from maxtext.training.callbacks.report_events import ReportEvents
from maxtext.training.callbacks.samples import Sampler, Samples
from maxtext.training.callbacks.score_tasks import OpenedTasks, OpenTasks, ScoreTasks
from maxtext.training.callbacks.write_metrics import WriteMetrics
from maxtext.training.checked_step import CheckedStep
from maxtext.training.compilation_cache import compilation_cache
from maxtext.training.consistency import agree_on_start, agree_on_step
from maxtext.training.elastic import for_live_hosts
from maxtext.training.loop import run_loop
from maxtext.training.objectives.base import Objective
from maxtext.training.preflight import check_hardware, check_host, check_sharding, describe, dry_run_lines
from maxtext.training.program import Program, hlo_folder
from maxtext.training.replayed_step import ReplayedStep
from maxtext.training.resume import RunCheckpoints
from maxtext.training.state import TrainState
from maxtext.training.synchronized_compile import SynchronizedCompile
from maxtext.training.teacher import TEACHER, start_from_teacher, tokenizer_folder

_LOG = logging.getLogger(__name__)


@runtime_checkable
class FollowsPolicy(Protocol):
  """Data that the model which is trained makes itself: a `BatchSource` that is told of every state."""

  def start(self, program: Program, folder: Path) -> None:
    """A run begins, with a folder for what it writes, which is not there yet."""

  def follow(self, state: TrainState) -> None:
    """The next batch is made with this state, whose arrays the next step takes over."""


def train(
  config: MaxTextConfig,
  *,
  objective: Objective | None = None,
  optimizer: optax.GradientTransformation | None = None,
  data: BatchSource | Batches | None = None,
  callbacks: Sequence[Callback] = (),
  origins: Mapping[str, str] | None = None,
  config_name: str = "",
  devices: Sequence[jax.Device] | None = None,
  open_tasks: OpenTasks | None = None,
) -> TrainState:
  """Trains as configured, and returns the last state.

  Args:
    config: the run.
    objective: the loss; None is the configured one: language modelling, or preference optimization (`use_dpo`).
    optimizer: replaces the configured one, with its learning rate and its weight decay.
    data: batches for the objective: an iterable, a function that returns one, or a `BatchSource`; None reads the
      configured data.
    callbacks: called by the loop, after the run's own, but for those that evaluate.
    origins: where each value of the configuration came from, for the record.
    config_name: what to call the configuration, on the console and in the name of a run without `run_name`: a recipe,
      the stem of a file; empty is `model_name`.
    devices: those that train; None is all that JAX finds.
    open_tasks: opens `eval_tasks`; None only without them.

  Raises:
    ConfigError: (a ValueError) the configuration, the data or another argument is invalid; nothing was written.
    RunError: the run ended itself, for example because its loss is not finite.
    KeyboardInterrupt: the run ended with a checkpoint after Ctrl-C, and the same call resumes it.
  """
  setup_logging()
  check_arguments(config, objective, optimizer, data, callbacks)
  started, clock, config_name = time.monotonic(), PhaseClock(), config_name or config.model_name
  with status_line() as status, ExitStack() as closing:
    status.phase("starting")
    closing.enter_context(compilation_cache(config))
    _start(config)
    if jax.process_index():
      status.close()
    status.phase("building the model")
    if config.collect_stack_trace:
      closing.callback(StackTraces(config.stack_trace_interval_seconds).close)
    live = for_live_hosts(config)
    program = Program.of(live, make_mesh(live, devices), objective, optimizer, data)
    if config.debug_sharding and not jax.process_index():
      _LOG.info(table(program.model))
    check_sharding(program)
    tasks = OpenedTasks.of(program, open_tasks)
    status.phase("opening the data")
    check_host(program)
    sampler = Sampler.of(program)
    file = config.compiled_trainstep_file
    step: Any = compiled.load(program, Path(file)) if file else SynchronizedCompile(program.step, batch=1)
    if config.max_checkify:
      step = CheckedStep(program)
    name = broadcast_from_first(config.run_name or _new_name(config, config_name))
    record = values_and_origins(config, origins or {})
    checkpoints = RunCheckpoints(config, name, record)
    run, first = RunDirectory.of(config.base_output_directory, name), jax.process_index() == 0
    if isinstance(data, FollowsPolicy):
      data.start(program, run.path)
    if first:
      closing.enter_context(run.removed_if_unused())
    closing.callback(checkpoints.release)
    checkpoints.acquire()
    if first:
      run.make()
      closing.callback(_finish, run)
      _LOG.info(describe(program, run, config_name))
    guard = LossGuard(config.abort_on_nan_loss, config.abort_on_inf_loss)
    status.phase("making the first state, or restoring it")
    clock.enter("restore")
    state, feed = checkpoints.restore_or_init(program)
    frozen = program.init_frozen()
    if not int(state.step) and TEACHER in frozen:
      state = start_from_teacher(program, state, frozen[TEACHER])
    feed = agree_on_step(program, feed, compares_data=not isinstance(data, FollowsPolicy))
    steps = range(int(state.step), training_steps(config))
    scoring = _scoring(tasks, run, steps, guard, checkpoints)
    if scoring and checkpoints.resumed:
      with clock.within("evaluation"):
        scoring[0].make_up(steps.start, state)
    if steps.start and not steps:
      if first:
        _LOG.info(f"maxtext: {_nothing_left(config, name, steps)}")
      return state
    if first:
      if int(state.step):
        _print_changes(checkpoints.saved_config(int(state.step)) or run.last_config(), record)
      run.begin(record if config.log_config else None, program.model.size)
      if config.save_config_to_gcs and run.store:
        run.store_config(record)
      if why := keep_tokenizer(data_options(config), tokenizer_folder(config), str(run.store or run.path)):
        _LOG.warning(f"maxtext: the run's folder has no tokenizer: {why}")
    events = None
    if config.event_command and first:
      events = EventHook(config.event_command, name, steps.start, config.event_stall_seconds)
      closing.enter_context(events)
      closing.callback(before_end(events.failed))
    replicas = _replica_checks(program, steps.start, checkpoints)
    check = replicas[0].check if replicas else _unchecked
    callbacks = [
      *_evaluations(program, checkpoints, frozen),
      *scoring,
      *(callback for callback in callbacks if callback.evaluates),
      *checkpoints.callbacks(guard, Criterion() if objective is None else objective.criterion, check),
      *replicas,
      *_samples(config, sampler, run, steps),
      *(_goodput(config, run, clock, steps.start) if first else []),
      *([ReportEvents(events)] if events else []),
      WriteMetrics(_sinks(config, record, steps, run, status) if first else []),
      guard,
      *(_jaxpr(program, run) if first and config.dump_jaxpr else []),
      *(_hlo(config, run) if config.dump_hlo and (first or config.dump_hlo_upload_all) else []),
      *(_profilers(config, run) if first or config.upload_all_profiler_results else []),
      *(callback for callback in callbacks if not callback.evaluates),
    ]
    for callback in callbacks:
      closing.callback(callback.close)
    mesh = program.model.execution.sharding.mesh
    flops = train_flops_per_token(program.model, config.max_target_length) / mesh.size
    if frozen:
      step = partial(_with_frozen, step, frozen)
    if config.profiler is not ProfilerType.NONE and not config.hide_profiler_step_metric:
      step = partial(_marked, step, count(steps.start + 1))
    if config.step_replay_period:
      step = ReplayedStep(step, mesh, config.step_replay_period, steps.start, checkpoints.distrust)
    if isinstance(data, FollowsPolicy):
      data.follow(state)
      step = partial(_followed, step, data)
    status.phase("compiling the step")
    try:
      state = run_loop(step, state, feed, steps, callbacks, flops, _peak_flops(mesh), clock)
    except (KeyboardInterrupt, SystemExit):
      if first and checkpoints.has_saved():
        _LOG.info(f"maxtext: run_name={name} resumes it.")
      raise
    if first:
      for line in _next_steps(config, run, name, steps, int(state.step), time.monotonic() - started):
        _LOG.info(f"maxtext: {line}")
    return state


def dry_run(
  config: MaxTextConfig,
  *,
  objective: Objective | None = None,
  data: BatchSource | None = None,
  config_name: str = "",
  devices: Sequence[jax.Device] | None = None,
  open_tasks: OpenTasks | None = None,
) -> list[str]:
  """Does the checks of `train`, and returns lines that say what it would do. Compiles nothing and writes nothing."""
  setup_logging()
  with status_line() as status:
    status.phase("checking")
    _start(config)
    program = Program.of(config, make_mesh(config, devices), objective, data=data)
    check_sharding(program)
    OpenedTasks.of(program, open_tasks)
    check_host(program)
  config_name = config_name or config.model_name
  run = RunDirectory.of(
    config.base_output_directory, broadcast_from_first(config.run_name or _new_name(config, config_name))
  )
  if isinstance(data, FollowsPolicy):
    data.start(program, run.path)
  return list(dry_run_lines(program, run, config_name))


def _with_frozen(step: Any, frozen: Mapping[str, Params], state: TrainState, batch: Any) -> Any:
  return step(state, batch, frozen)


def _marked(step: Any, numbers: Iterator[int], *arguments: Any) -> Any:
  """A step that a trace shows as one, with its number."""
  with jax.profiler.StepTraceAnnotation("train", step_num=next(numbers)):
    return step(*arguments)


def _followed(step: Any, data: FollowsPolicy, state: TrainState, batch: Any) -> Any:
  state, metrics = step(state, batch)
  data.follow(state)
  return state, metrics


def _new_name(config: MaxTextConfig, config_name: str) -> str:
  """Process 0's is taken; the others do not look, so that no host remembers the folder as one that is not there."""
  return "" if jax.process_index() else new_run_name(config.base_output_directory, config_name)


def _nothing_left(config: MaxTextConfig, name: str, steps: range) -> str:
  return (
    f"run_name={name} is at step {steps.start:,} of {steps.stop:,}: nothing is left to do. Set "
    f"{_steps_key(config)} above {steps.start} to train further, or choose another run_name."
  )


def _next_steps(
  config: MaxTextConfig, run: RunDirectory, name: str, steps: range, step: int, seconds: float
) -> Iterator[str]:
  """The last lines of a run: what it did, and the keys and commands to go on with."""
  done = plural(step - steps.start, "step")
  ended = f"finished {done}" if step == steps.stop else f"ended after {done}, at step {step:,} of {steps.stop:,},"
  saved = config.enable_checkpointing and config.save_checkpoint_on_completion
  more = f"num_batches={2 * config.num_batches}" if config.use_grpo else f"{_steps_key(config)}={2 * step}"
  further = f"; run_name={name} {more} trains further" if saved and step == steps.stop else ""
  yield f"{ended} in {readable_duration(seconds)}{further}."
  folder, can_decode = str(run.store or run.path), False
  with suppress(Exception):  # storage that fails now does not fail a finished run
    can_decode = saved and find_tokenizer(folder) is not None
  if can_decode:
    longest = config.max_target_length
    shorter = f" max_prefill_predict_length={longest // 2}" if config.max_prefill_predict_length >= longest else ""
    yield f"try it: maxtext decode {shlex.quote(folder)}{shorter} prompt=..."


def _steps_key(config: MaxTextConfig) -> str:
  if config.use_grpo:
    return "num_batches x num_iterations"
  return "learning_rate_schedule_steps" if config.steps == -1 else "steps"


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
  debug_loggers(config.jax_debug_log_modules)
  if config.enable_jax_profiler:
    jax.profiler.start_server(config.jax_profiler_port)
  check_hardware(config)


def _evaluations(program: Program, checkpoints: RunCheckpoints, frozen: Mapping[str, Params]) -> list[Callback]:
  c = program.config
  evaluate = partial(program.evaluate, frozen=frozen, stop=checkpoints.stop_requested)
  return [Evaluate(evaluate, c.eval_interval, c.target_eval_loss)] if program.data.evaluates else []


def _scoring(
  tasks: OpenedTasks | None, run: RunDirectory, steps: range, guard: LossGuard, checkpoints: RunCheckpoints
) -> list[ScoreTasks]:
  return [] if tasks is None else [ScoreTasks(tasks, run, steps.start, steps.stop, guard, checkpoints.stop_requested)]


def _replica_checks(program: Program, step: int, checkpoints: RunCheckpoints) -> list[CompareReplicas]:
  period = program.config.replica_check_period
  if not period:
    return []
  mesh = program.model.execution.sharding.mesh
  checks = CompareReplicas(mesh, program.state, period, step, checkpoints.distrust)
  if not jax.process_index():
    alone = (
      "" if checks.share == 1 else "; of the rest there are none, and step_replay_period checks how it is computed"
    )
    _LOG.info(f"maxtext: replicas of {checks.share:.0%} of the state are compared every {period} steps{alone}.")
  return [checks]


def _unchecked(step: int, state: TrainState) -> None:
  """Without `replica_check_period`."""


def _samples(config: MaxTextConfig, sampler: Sampler | None, run: RunDirectory, steps: range) -> list[Callback]:
  if sampler is None:
    return []
  return [Samples(sampler, SampleWriter(run.path, steps.start, config.enable_tensorboard), config.eval_interval)]


def _goodput(config: MaxTextConfig, run: RunDirectory, clock: PhaseClock, step: int) -> list[Callback]:
  """What keeps the journal, and what adds to the metrics before they are written."""
  c = config
  store = run.store if c.enable_goodput_recording else None
  found: list[Callback] = [KeepJournal(GoodputJournal(run.path, store, clock, step, c.enable_checkpointing))]
  if c.monitor_goodput:
    found.append(MonitorGoodput(run.path, store, c.goodput_upload_interval_seconds))
    if c.monitor_step_time_deviation:
      found.append(MonitorStepTime(c.step_deviation_interval_seconds))
  return found


def _profilers(config: MaxTextConfig, run: RunDirectory) -> list[Callback]:
  """What traces, before it what brings the traces to the store: the last in the list is closed first."""
  c = config
  if c.profiler is ProfilerType.NONE:
    return []
  part = Path("profile") / process_folder(c.upload_all_profiler_results)
  folder, period, clean = run.path / part, c.profile_periodically_period, c.profile_cleanly
  stored = [Dump(folder, run.store / part, "", -1, delete=False)] if run.store else []
  options = _trace_options(c)
  return [*stored, Profile(folder, c.skip_first_n_steps_for_profiler, c.profiler_steps, period, clean, options)]


def _trace_options(config: MaxTextConfig) -> dict[str, int | bool]:
  """What the TPU's tracer is told, by its own names; another device's does not look at it."""
  c, options = config, dict[str, int | bool]()
  if c.enable_tpu_profiling_options:
    options |= {
      "tpu_num_chips_to_profile_per_task": c.tpu_num_chips_to_profile_per_task,
      "tpu_num_sparse_cores_to_trace": c.tpu_num_sparse_cores_to_trace,
      "tpu_num_sparse_core_tiles_to_trace": c.tpu_num_sparse_core_tiles_to_trace,
    }
  if c.profile_power_events:
    options |= {
      "tpu_power_trace_level": int(c.xprof_tpu_power_trace_level),
      "tpu_e2e_enable_fw_throttle_event": c.xprof_e2e_enable_fw_throttle_event,
      "tpu_e2e_enable_fw_power_level_event": c.xprof_e2e_enable_fw_power_level_event,
      "tpu_e2e_enable_fw_thermal_event": c.xprof_e2e_enable_fw_thermal_event,
    }
  return options


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


def _sinks(
  config: MaxTextConfig, record: Mapping[str, Any], steps: range, run: RunDirectory, status: StatusLine
) -> list[MetricWriter]:
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
  known = {
    key: entry["value"] for key, entry in record.items() if entry["value"] not in (None, plain_value(default_of(key)))
  }
  for key, library, tracker in (
    ("wandb_project", "wandb", WandbTracker), ("mlflow_experiment", "mlflow.tracking", MlflowTracker),
  ):  # fmt: skip
    if place := getattr(config, key):
      name = f"{key}={place}"
      sinks[name] = TrackerWriter(name, library, partial(tracker, place, run.path.name, run.path, known))
  memory = partial(memory_in_use, jax.local_devices()[0])
  console = ConsoleWriter(config.log_period, steps, status=status, memory=memory)
  return [*(FaultTolerantWriter(sink, name) for name, sink in sinks.items()), console]
