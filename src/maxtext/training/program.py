"""A run made ready: the model, the compiled step, and the abstract state and batch it takes. No array exists yet."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src.core import ShardingTypeError  # JAX has no other name for it
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import eval_batch_size, global_batch_size
from maxtext.configs.errors import RunError
from maxtext.configs.types import DatasetType
from maxtext.data.batch import Batch, BatchWithState, IteratorState
from maxtext.data.dataloader import OpenedData, make_dataloader, open_data
from maxtext.data.options import data_options
from maxtext.distributed.multihost import process_folder
from maxtext.layers.how import How
from maxtext.mesh.compiler import compiler_options
from maxtext.mesh.devices import with_devices
from maxtext.mesh.explicit import auto_axes
from maxtext.mesh.rules import LOGICAL_AXES, mesh_axes_of, num_shards_of
from maxtext.models.build import build_model
from maxtext.models.clip import clip_queries_and_keys
from maxtext.models.model import Model, Params
from maxtext.optim.optimizer import make_optimizer
from maxtext.optim.options import optimizer_options, schedule_options
from maxtext.optim.schedules import learning_rate
from maxtext.training import diloco
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.state import TrainState, abstract_state, initial_state, on_devices, update_shardings
from maxtext.training.step import Metrics, Objective, evaluation_sums, make_train_step


@dataclass(frozen=True, eq=False)
class Program:
  """What the loop runs and the planner compiles; another mesh is another `Program`."""

  config: MaxTextConfig
  model: Model
  state: TrainState  # abstract
  batch: Batch  # abstract
  step: Any  # jitted: (state, batch) to (state, metrics)
  _init: Any
  eval_batch: Batch  # abstract
  _eval_sums: Any

  @staticmethod
  def of(
    config: MaxTextConfig,
    mesh: Mesh,
    objective: Objective | None = None,
    optimizer: optax.GradientTransformation | None = None,
  ) -> "Program":
    """Builds everything that needs no array. Without an objective the run pre-trains; without an optimizer it takes
    the configured one and reports its learning rate."""
    model = build_model(config, mesh)
    config = with_devices(config, mesh.devices.flatten().tolist())
    if not model.params:
      raise ConfigError(f"trainable_parameters_mask={config.trainable_parameters_mask} leaves nothing to train.")
    schedule = learning_rate(schedule_options(config)) if optimizer is None else None
    optimizer = optimizer or make_optimizer(optimizer_options(config), model.matrices)
    updated = update_shardings(model, config.shard_optimizer_over_data)
    _refuse_offload_without_memory(config, mesh)
    state = abstract_state(
      model, optimizer, updated, config.parameter_memory_host_offload, config.optimizer_memory_host_offload
    )
    update = make_train_step(
      model,
      objective or LanguageModeling(config.z_loss_multiplier, config.num_vocab_tiling, config.mtp_loss_scaling_factor),
      optimizer,
      schedule,
      updated=updated,
      clip=config.gradient_clipping_threshold,
      accumulation=config.gradient_accumulation_steps,
      grad_dtype=config.grad_dtype.value,
      after=partial(clip_queries_and_keys, model, config.qk_clip_threshold) if config.use_qk_clip else None,
    )
    apart = _apart(config, mesh)
    if apart is not None:
      state, update = apart.abstract(state), apart.step(update)
    shardings = jax.tree.map(lambda a: a.sharding, state)
    replicated = NamedSharding(mesh, PartitionSpec())
    measured = objective or LanguageModeling(tiles=config.num_vocab_tiling, alone=True)

    jit = partial(jax.jit, compiler_options=_compiler_options(config, mesh))

    def dealt(batch: Batch) -> Batch:
      """Rows in the order in which their parts have the same work."""
      order = model.how.attention.order
      if order is None:
        return batch
      return jax.tree.map(lambda a: auto_axes(order.apply, jax.typeof(a).sharding, a), batch)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
      return update(on_devices(state, shardings), dealt(batch))

    def init(seed: jax.Array) -> TrainState:
      state = initial_state(model, optimizer, seed)
      return state if apart is None else apart.initial(state)

    def evaluate(params: Params, buffers: Params, batch: Batch) -> Metrics:
      return evaluation_sums(model, measured, on_devices(params, shardings.params), buffers, dealt(batch))

    made = Program(
      config,
      model,
      state,
      _abstract_batch(config, model.how, "per_device_batch_size", config.gradient_accumulation_steps),
      jit(train_step, donate_argnums=0, out_shardings=(shardings, replicated)),
      jit(init, out_shardings=shardings),
      _abstract_batch(config, model.how, "eval_per_device_batch_size"),
      jit(evaluate, out_shardings=replicated),
    )
    if model.how.explicit:
      made._check_types()
    return made

  def init(self) -> TrainState:
    """The first state, made where it lives."""
    return self._init(np.uint32(self.config.init_weights_seed))

  @property
  def state_bytes(self) -> int:
    """Of the whole state, on all devices together."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state))

  def start_from(self, state: TrainState, params: Params, buffers: Params) -> TrainState:
    """A first state with other parameters."""
    state = dataclasses.replace(state, params=params, buffers=buffers)
    if not self.config.enable_diloco:
      return state
    shardings = jax.tree.map(lambda a: a.sharding, self.state)
    return jax.jit(diloco.together, donate_argnums=0, out_shardings=shardings)(state)

  def check_data(self) -> None:
    """Raises where data of training or evaluation is missing or wrong, before anything costly has begun."""
    _ = self._data
    if self.config.eval_interval > 0:
      _ = self._eval_data

  @cached_property
  def _data(self) -> OpenedData:
    return open_data(data_options(self.config), self.batch)

  @cached_property
  def _eval_data(self) -> OpenedData:
    return open_data(data_options(self.config), self.eval_batch, "eval")

  def feed(self, position: IteratorState | None = None) -> Iterator[BatchWithState]:
    """The data from a position on."""
    return make_dataloader(data_options(self.config), self.batch, position, data=self._data)

  def evaluate(self, state: TrainState, stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """The objective's figures per target over `eval_steps` batches of the evaluation data, and the targets' number.

    None where `stop`, which is asked after every batch, ends it.
    """
    feed = make_dataloader(data_options(self.config), self.eval_batch, split="eval", data=self._eval_data)
    batches = islice(feed, None if self.config.eval_steps == -1 else self.config.eval_steps)
    found = []
    for fed in batches:
      found.append(self._eval_sums(state.params, state.buffers, fed.batch))
      if stop():
        return None
    if not found:
      raise RunError("the evaluation data has no batch; leave eval_interval out, or give it more.")
    sums = {name: sum(float(one[name]) for one in found) for name in found[0]}
    targets = sums.pop("weight")
    return {name: value / targets for name, value in sums.items()} | {"tokens": targets}

  def _check_types(self) -> None:
    """Refuses a step with an operation whose sharding does not follow from its operands' and is not said."""
    try:
      self.step.eval_shape(self.state, self.batch)
    except ShardingTypeError as error:
      raise ConfigError(
        f"shard_mode=explicit: decoder_block={self.config.decoder_block.value} with opt_type="
        f"{self.config.opt_type.value} has an operation that does not say where its result lives: write "
        f"shard_mode=auto. JAX says: {str(error).splitlines()[0]}"
      ) from error

  def lower(self) -> jax.stages.Lowered:
    """The step for this mesh, from shapes alone."""
    return self.step.lower(self.state, self.batch)


_ROWS = {"per_device_batch_size": global_batch_size, "eval_per_device_batch_size": eval_batch_size}


def hlo_folder(config: MaxTextConfig) -> Path:
  """Where the compiler leaves its files on this machine."""
  return Path(config.dump_hlo_local_dir) / process_folder(config.dump_hlo_upload_all)


def _abstract_batch(config: MaxTextConfig, how: How, key: str, accumulation: int = 1) -> Batch:
  mesh, shape = how.mesh, (_ROWS[key](config, how.mesh.size), config.max_target_length)
  axes = config.input_data_sharding_logical_axes
  if len(axes) != 2 or not set(axes) <= set(LOGICAL_AXES):
    raise ConfigError(
      f"input_data_sharding_logical_axes={axes} must name two dimensions, of rows and of length, such as "
      f"[activation_embed_and_logits_batch, activation_norm_length]."
    )
  rows, length = how.rules.partition(mesh, axes, shape)
  replicas = (diloco.AXIS,) if diloco.AXIS in mesh.shape else ()
  whole = NamedSharding(mesh, PartitionSpec((*replicas, *mesh_axes_of(rows)), length))
  micro = shape[0] // accumulation
  split = (*replicas, *dict(how.rules.pairs)[axes[0]])
  shards = num_shards_of(mesh, split)
  over = " x ".join(f"{a}={mesh.shape[a]}" for a in split if mesh.shape[a] > 1)
  if micro % shards:
    raise ConfigError(
      f"A micro-batch of {micro} sequences ({key}={getattr(config, key)} x {mesh.size} devices) cannot be split over "
      f"{over}, {shards} groups: make {key} a multiple of {shards / mesh.size:g}."
    )

  def array(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

  # Synthetic rows are one document each.
  segments = None if config.dataset_type == DatasetType.SYNTHETIC else array(jnp.int32)
  return Batch(array(jnp.int32), array(jnp.int32), array(jnp.int32), segments, array(jnp.float32))


def _apart(config: MaxTextConfig, mesh: Mesh) -> diloco.Diloco | None:
  """How replicas train apart; None where there are none."""
  c = config
  if not c.enable_diloco:
    return None
  replicas = mesh.shape[diloco.AXIS]
  return diloco.Diloco(replicas, c.diloco_sync_period, c.diloco_outer_lr, c.diloco_outer_momentum)


def _compiler_options(config: MaxTextConfig, mesh: Mesh) -> dict[str, str | bool]:
  """What the compiler is told beside the program."""
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


def _refuse_offload_without_memory(config: MaxTextConfig, mesh: Mesh) -> None:
  """A device of a topology that is only compiled for does not say what memories it has."""
  device = mesh.devices.flat[0]
  if device.process_index != jax.process_index() or config.compile_topology:
    return
  kinds = {memory.kind for memory in device.addressable_memories()}
  for key in ("parameter_memory_host_offload", "optimizer_memory_host_offload"):
    if getattr(config, key) and "pinned_host" not in kinds:
      raise ConfigError(f"{key}=true, but {device.platform} devices have no pinned host memory: leave it out.")
