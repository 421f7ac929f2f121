"""A run made ready: the model, the compiled step, and the abstract state and batch it takes. No array exists yet."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import global_batch_size
from maxtext.configs.types import DatasetType
from maxtext.data.batch import Batch, Fed, Position
from maxtext.data.feed import make_feed
from maxtext.mesh.rules import LOGICAL_AXES, Rules
from maxtext.models.build import build_model
from maxtext.models.clip import clip_queries_and_keys
from maxtext.models.model import Model
from maxtext.optim.optimizer import make_optimizer
from maxtext.optim.schedules import learning_rate
from maxtext.train.objectives.language_modeling import LanguageModeling
from maxtext.train.state import TrainState, abstract_state, initial_state
from maxtext.train.step import Objective, make_train_step


@dataclass(frozen=True, eq=False)
class Program:
  """What the loop runs and the planner compiles; another mesh is another `Program`."""

  config: MaxTextConfig
  model: Model
  state: TrainState  # abstract
  batch: Batch  # abstract
  step: Any  # jitted: (state, batch) to (state, metrics)
  _init: Any

  @staticmethod
  def of(config: MaxTextConfig, mesh: Mesh, objective: Objective | None = None) -> "Program":
    """Builds everything that needs no array. Without an objective the run pre-trains."""
    model = build_model(config, mesh)
    if not model.params:
      raise ConfigError(f"trainable_parameters_mask={config.trainable_parameters_mask} leaves nothing to train.")
    optimizer = make_optimizer(config, model.matrices)
    state = abstract_state(model, optimizer)
    step = make_train_step(
      model,
      objective or LanguageModeling(config.z_loss_multiplier, config.num_vocab_tiling, config.mtp_loss_scaling_factor),
      optimizer,
      learning_rate(config),
      clip=config.gradient_clipping_threshold,
      accumulation=config.gradient_accumulation_steps,
      grad_dtype=config.grad_dtype.value,
      after=partial(clip_queries_and_keys, model, config.qk_clip_threshold) if config.use_qk_clip else None,
    )
    shardings = jax.tree.map(lambda a: a.sharding, state)
    replicated = NamedSharding(mesh, PartitionSpec())
    return Program(
      config,
      model,
      state,
      _abstract_batch(config, mesh, model.how.rules),
      jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated)),
      jax.jit(lambda seed: initial_state(model, optimizer, seed), out_shardings=shardings),
    )

  def init(self) -> TrainState:
    """The first state, made where it lives."""
    return self._init(np.uint32(self.config.init_weights_seed))

  def feed(self, position: Position | None = None) -> Iterator[Fed]:
    """The data from a position on."""
    return make_feed(self.config, self.batch, position)

  def lower(self) -> jax.stages.Lowered:
    """The step for this mesh, from shapes alone."""
    return self.step.lower(self.state, self.batch)


def _abstract_batch(config: MaxTextConfig, mesh: Mesh, rules: Rules) -> Batch:
  shape = global_batch_size(config, mesh.size), config.max_target_length
  axes = config.input_data_sharding_logical_axes
  if len(axes) != 2 or not set(axes) <= set(LOGICAL_AXES):
    raise ConfigError(
      f"input_data_sharding_logical_axes={axes} must name two dimensions, of rows and of length, such as "
      f"[activation_embed_and_logits_batch, activation_norm_length]."
    )
  whole = rules.sharding(mesh, axes, shape)
  micro = shape[0] // config.gradient_accumulation_steps
  split = dict(rules.pairs)[axes[0]]
  shards = prod(mesh.shape[a] for a in split)
  over = " x ".join(f"{a}={mesh.shape[a]}" for a in split if mesh.shape[a] > 1)
  if micro % shards:
    raise ConfigError(
      f"A micro-batch of {micro} sequences (per_device_batch_size={config.per_device_batch_size} x {mesh.size} "
      f"devices) cannot be split over {over}, {shards} groups: "
      f"make per_device_batch_size a multiple of {shards / mesh.size:g}."
    )

  def array(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

  # Synthetic rows are one document each.
  segments = None if config.dataset_type == DatasetType.SYNTHETIC else array(jnp.int32)
  return Batch(array(jnp.int32), array(jnp.int32), array(jnp.int32), segments, array(jnp.float32))
