"""A run made ready: the model, the compiled step, and the abstract state and batch it takes. No array exists yet."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax._src.core import ShardingTypeError  # JAX has no other name for it
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.batch import BatchSource, BatchWithState, IteratorState
from maxtext.data.iterable import Batches, as_batch_source
from maxtext.distributed.multihost import process_folder
from maxtext.mesh.compiler import compiler_options
from maxtext.mesh.devices import with_devices
from maxtext.mesh.explicit import auto_axes
from maxtext.models.build import build_model
from maxtext.models.decoder import Decoder
from maxtext.models.model import Model, Params
from maxtext.models.qk_clip import apply_qk_clip
from maxtext.optim.optimizer import make_optimizer
from maxtext.optim.options import optimizer_options, schedule_options
from maxtext.optim.schedules import learning_rate
from maxtext.training import diloco
from maxtext.training.abstract_batch import abstract_batch, declared_batch, token_paths, unfed_towers
from maxtext.training.elastic import deal_rows
from maxtext.training.frozen import build_frozen, frozen_params
from maxtext.training.learn_to_init import MappedModel, mapped_model
from maxtext.training.objectives.base import EVALUATION, Metrics, Objective, StepContext
from maxtext.training.objectives.configured import evaluation_objective, training_objective
from maxtext.training.objectives.preference import PreferenceOptimization
from maxtext.training.run_data import RunData
from maxtext.training.state import (
  TrainState,
  abstract_state,
  initial_state,
  on_devices,
  total_bytes,
  update_shardings,
)
from maxtext.training.step import evaluation_sums, make_train_step
from maxtext.training.synchronized_compile import SynchronizedCompile
from maxtext.training.teacher import TEACHER


@dataclass(frozen=True, eq=False)
class Program:
  """What the loop runs and the planner compiles; another mesh is another `Program`."""

  config: MaxTextConfig
  model: Model
  state: TrainState  # abstract
  batch: Any  # abstract, as the objective declares it
  frozen: dict[str, dict[str, jax.ShapeDtypeStruct]]  # abstract: parameters and buffers of the frozen models, by name
  step: Any  # jitted: (state, batch) to (state, metrics), with `frozen` as a third argument where there are any
  _init: Any
  eval_batch: Any  # abstract
  _eval_sums: Any
  _frozen_models: Mapping[str, tuple[MaxTextConfig, Model]]
  _measured: Collection[str]  # the frozen models of an evaluation
  data: RunData
  mapped: MappedModel | None  # of learn_to_init_mode: the model as the state has it
  _jit: Any  # with the compiler options of this run
  _in_token_order: Callable[[Any], Any]

  @staticmethod
  def of(
    config: MaxTextConfig,
    mesh: Mesh,
    objective: Objective | None = None,
    optimizer: optax.GradientTransformation | None = None,
    data: BatchSource | Batches | None = None,
    serving: bool = False,
  ) -> "Program":
    """Builds everything that needs no array. What is not given is as configured; of the configured optimizer the
    learning rate is reported. With `serving`, weights are stored as for inference: only evaluation is possible."""
    data = as_batch_source(data)
    model = build_model(config, mesh, serving, unfed_towers(config, objective, data))
    config = with_devices(config, mesh.devices.flatten().tolist())
    if not model.params:
      key = "student_params_to_update" if config.student_params_to_update else "trainable_parameters_mask"
      raise ConfigError(f"{key}={getattr(config, key)} leaves nothing to train.")
    trained = objective or training_objective(config)
    if isinstance(trained, PreferenceOptimization) and data is None and not config.use_dpo:
      raise ConfigError(
        "PreferenceOptimization needs pairs: set use_dpo=true, or give maxtext.train the argument data."
      )
    frozen_models = build_frozen(trained.frozen, config, model, mesh)
    mapped = _mapped(config, model, frozen_models)
    stateful = mapped or model
    schedule = learning_rate(schedule_options(config)) if optimizer is None else None
    optimizer = optimizer or make_optimizer(optimizer_options(config), stateful.matrices)
    updated = update_shardings(stateful, config.shard_optimizer_over_data)
    _check_offload(config, mesh)
    state = abstract_state(
      stateful, optimizer, updated, config.parameter_memory_host_offload, config.optimizer_memory_host_offload
    )
    update = make_train_step(
      stateful,
      trained,
      optimizer,
      schedule,
      updated=updated,
      clip=config.gradient_clipping_threshold,
      accumulation=config.gradient_accumulation_steps,
      grad_dtype=config.grad_dtype.value,
      post_update=partial(apply_qk_clip, model, config.qk_clip_threshold) if config.use_qk_clip else None,
      frozen={name: other for name, (_, other) in frozen_models.items()},
      seed=config.init_weights_seed,
    )
    replicas = _diloco(config, mesh)
    if replicas is not None:
      state, update = replicas.abstract(state), replicas.step(update)
    shardings = jax.tree.map(lambda a: a.sharding, state)
    replicated = NamedSharding(mesh, PartitionSpec())
    measured = objective or evaluation_objective(config)

    jit = partial(jax.jit, compiler_options=run_compiler_options(config, mesh))

    # What an objective declares, and media; synthetic data leaves segments out, other batches may bring them.
    ordered = token_paths(trained.batch(1, 1)) | token_paths(declared_batch(config, trained, data, 1))

    def in_token_order(batch: Any) -> Any:
      """Rows in the order in which their parts have the same work."""
      order = model.execution.kernels.attention.order
      if order is None:
        return batch

      def one(path: Any, a: jax.Array) -> jax.Array:
        return auto_axes(order.apply, jax.typeof(a).sharding, a) if path in ordered else a

      return jax.tree_util.tree_map_with_path(one, batch)

    def train_step(
      state: TrainState, batch: Any, frozen: Mapping[str, Params] | None = None
    ) -> tuple[TrainState, Metrics]:
      batch = deal_rows(config, model.execution.sharding, in_token_order(batch))
      return update(on_devices(state, shardings), batch, frozen)

    def init(seed: jax.Array) -> TrainState:
      state = initial_state(stateful, optimizer, seed)
      return state if replicas is None else replicas.initial(state)

    def evaluate(
      params: Params, buffers: Params, batch: Any, frozen: Mapping[str, Params], step: jax.Array, number: jax.Array
    ) -> Metrics:
      return evaluation_sums(
        model,
        measured,
        on_devices(params, shardings.params),
        buffers,
        in_token_order(batch),
        frozen={name: (other, frozen[name]) for name, (_, other) in frozen_models.items() if name in measured.frozen},
        context=StepContext(step, config.init_weights_seed, EVALUATION, number),
      )

    batch = abstract_batch(
      config, model.execution, trained, data, "per_device_batch_size", config.gradient_accumulation_steps
    )
    eval_batch = abstract_batch(config, model.execution, measured, data, "eval_per_device_batch_size")
    made = Program(
      config,
      model,
      state,
      batch,
      {name: other.params | other.buffers for name, (_, other) in frozen_models.items()},
      jit(train_step, donate_argnums=0, out_shardings=(shardings, replicated)),
      jit(init, out_shardings=shardings),
      eval_batch,
      SynchronizedCompile(jit(evaluate, out_shardings=replicated), batch=2),
      frozen_models,
      tuple(measured.frozen),
      RunData(config, batch, eval_batch, data),
      mapped,
      jit,
      in_token_order,
    )
    if model.execution.sharding.explicit:
      made._check_types()
    return made

  def init(self) -> TrainState:
    """The first state, made where it lives."""
    return self._init(np.uint32(self.config.init_weights_seed))

  def init_frozen(self, measured: bool = False) -> dict[str, Params]:
    """The parameters of the frozen models, by name, made or read where they live: the same for every start of a run.
    With `measured`, only those that an evaluation needs."""
    needed = [name for name in self._frozen_models if name in self._measured or not measured]
    return {name: frozen_params(*self._frozen_models[name]) for name in needed}

  def frozen_config(self, name: str) -> MaxTextConfig:
    """The configuration of a frozen model."""
    return self._frozen_models[name][0]

  def forward(self, function: Callable[[Decoder, Any], Any]) -> Callable[[Params, Any], Any]:
    """Compiles a function of the model and a batch, which sees both as the step does.

    The result takes parameters and buffers, and a batch; what it returns is on every device.
    """

    def run(params: Params, batch: Any) -> Any:
      return function(self.model.bind(params), self._in_token_order(batch))

    replicated = NamedSharding(self.model.execution.sharding.mesh, PartitionSpec())
    return SynchronizedCompile(self._jit(run, out_shardings=replicated), batch=1)

  def jit_step(self, transform: Callable[..., Any]) -> Any:
    """The step transformed to one that returns something beside the state and the metrics, before them, and compiled
    like the step itself."""
    replicated = NamedSharding(self.model.execution.sharding.mesh, PartitionSpec())
    shardings = jax.tree.map(lambda a: a.sharding, self.state)
    return self._jit(
      transform(self.step.__wrapped__), donate_argnums=0, out_shardings=(replicated, (shardings, replicated))
    )

  @property
  def arguments(self) -> tuple[Any, ...]:
    """What the step takes, as shapes."""
    return (self.state, self.batch, self.frozen) if self.frozen else (self.state, self.batch)

  @property
  def state_bytes(self) -> int:
    """Of the whole state, on all devices together."""
    return total_bytes(self.state)

  def start_from(self, state: TrainState, params: Params, buffers: Params) -> TrainState:
    """A first state with other parameters."""
    state = dataclasses.replace(state, params=params, buffers=buffers)
    if not self.config.enable_diloco:
      return state
    shardings = jax.tree.map(lambda a: a.sharding, self.state)
    return jax.jit(diloco.broadcast_params, donate_argnums=0, out_shardings=shardings)(state)

  def feed(self, position: IteratorState | None = None) -> Iterator[BatchWithState]:
    """The training data from a position on."""
    return self.data.feed(position)

  def evaluate(
    self,
    state: TrainState,
    frozen: Mapping[str, Params] | None = None,
    stop: Callable[[], bool] = lambda: False,
  ) -> dict[str, float] | None:
    """The objective's metrics per target over `eval_steps` batches of the evaluation data, and the targets' number.

    None where `stop`, which is asked after every batch, ends it. `frozen` is what `init_frozen` returned.
    """
    batches = islice(self.data.feed(split="eval"), None if self.config.eval_steps == -1 else self.config.eval_steps)
    found = []
    for number, fed in enumerate(batches):
      found.append(self._eval_sums(state.params, state.buffers, fed.batch, frozen or {}, state.step, np.uint32(number)))
      if stop():
        return None
    if not found:
      raise RunError("the evaluation data has no batch; leave eval_interval out, or give it more.")
    sums = {name: sum(float(one[name]) for one in found) for name in found[0]}
    targets = sums.pop("weight")
    own = {name: sums.pop(f"{name}_weight") for name in list(sums) if f"{name}_weight" in sums}
    means = {name: value / (own[name] or 1.0 if name in own else targets) for name, value in sums.items()}
    return means | {"tokens": targets}

  def _check_types(self) -> None:
    """Raises where an operation of the step has a sharding that neither follows from its operands nor is given."""
    try:
      self.step.eval_shape(*self.arguments)
    except ShardingTypeError as error:
      raise ConfigError(
        f"shard_mode=explicit: decoder_block={self.config.decoder_block.value} with opt_type="
        f"{self.config.opt_type.value} has an operation that does not say where its result lives: write "
        f"shard_mode=auto. JAX says: {str(error).splitlines()[0]}"
      ) from error

  def lower(self) -> jax.stages.Lowered:
    """The step for this mesh, from shapes alone."""
    return self.step.lower(*self.arguments)


def hlo_folder(config: MaxTextConfig) -> Path:
  """Where the compiler leaves its files on this machine."""
  return Path(config.dump_hlo_local_dir) / process_folder(config.dump_hlo_upload_all)


def run_compiler_options(config: MaxTextConfig, mesh: Mesh) -> dict[str, str | bool]:
  """Compiler options of this run: of its chip, its keys and the environment."""
  dump_flags = config.dump_hlo_xla_flags if config.dump_hlo else ""
  plan_flags = config.compile_xla_flags if config.compile_topology else ""
  options = compiler_options(mesh.devices.flat[0], f"{plan_flags} {dump_flags}")
  if not config.dump_hlo or dump_flags:
    return options
  return options | {
    "xla_dump_to": str(hlo_folder(config)),
    "xla_dump_hlo_module_re": config.dump_hlo_local_module_name or ".*",
    "xla_dump_hlo_as_text": True,
  }


def _mapped(
  config: MaxTextConfig, model: Model, frozen: Mapping[str, tuple[MaxTextConfig, Model]]
) -> MappedModel | None:
  """The student of `learn_to_init_mode`; None without it."""
  if not config.learn_to_init_mode:
    return None
  if TEACHER not in frozen:
    raise ConfigError("learn_to_init_mode=true needs the teacher of the configured objective: leave `objective` out.")
  return mapped_model(config, model, frozen[TEACHER][1])


def _diloco(config: MaxTextConfig, mesh: Mesh) -> diloco.Diloco | None:
  """The DiLoCo settings; None without it."""
  c = config
  if not c.enable_diloco:
    return None
  replicas = mesh.shape[diloco.AXIS]
  return diloco.Diloco(replicas, c.diloco_sync_period, c.diloco_outer_lr, c.diloco_outer_momentum)


def _check_offload(config: MaxTextConfig, mesh: Mesh) -> None:
  """A device of a topology that is only compiled for does not say what memories it has."""
  device = mesh.devices.flat[0]
  if device.process_index != jax.process_index() or config.compile_topology:
    return
  kinds = {memory.kind for memory in device.addressable_memories()}
  for key in ("parameter_memory_host_offload", "optimizer_memory_host_offload"):
    if getattr(config, key) and "pinned_host" not in kinds:
      raise ConfigError(f"{key}=true, but {device.platform} devices have no pinned host memory: leave it out.")
