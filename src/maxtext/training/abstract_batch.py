"""The batch that an objective declares, as shapes, dtypes and placement on a mesh."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import eval_batch_size, global_batch_size
from maxtext.configs.types import DatasetType
from maxtext.data.batch import BatchSource
from maxtext.data.documents import LABEL
from maxtext.data.media import AUDIO, VISION
from maxtext.data.media_rows import tower_arrays
from maxtext.data.options import media_options
from maxtext.data.reference_log_probs import REFERENCE
from maxtext.data.teacher_outputs import TEACHER_LOG_PROBS, TEACHER_TOKENS
from maxtext.layers.execution import ExecutionConfig
from maxtext.mesh.rules import LOGICAL_AXES, mesh_axes_of, num_shards_of
from maxtext.models.media import TowerInputs
from maxtext.training import diloco
from maxtext.training.objectives.base import BATCH, LENGTH, Field, Objective, token_batch, token_field

_ROWS = {"per_device_batch_size": global_batch_size, "eval_per_device_batch_size": eval_batch_size}


def abstract_batch(
  config: MaxTextConfig,
  execution: ExecutionConfig,
  objective: Objective,
  data: BatchSource | None,
  key: str,
  accumulation: int = 1,
) -> Any:
  """The tree of the objective's fields with a `jax.ShapeDtypeStruct` for each. `key` gives the rows per device."""
  mesh, rows = execution.sharding.mesh, _ROWS[key](config, execution.sharding.mesh.size)
  own = config.input_data_sharding_logical_axes
  if len(own) != 2 or not set(own) <= set(LOGICAL_AXES):
    raise ConfigError(
      f"input_data_sharding_logical_axes={own} must name two dimensions, of rows and of length, such as "
      f"[activation_embed_and_logits_batch, activation_norm_length]."
    )
  replicas = (diloco.AXIS,) if diloco.AXIS in mesh.shape else ()
  if not config.elastic_enabled:  # rows that cannot be split are on every device until the step deals them
    _check_rows(
      config, execution, key, rows // accumulation, (*replicas, *dict(execution.sharding.rules.pairs)[own[0]])
    )
  names = dict(zip((BATCH, LENGTH), own, strict=True))

  def array(path: Any, field: Field) -> jax.ShapeDtypeStruct:
    _check_field(objective, jax.tree_util.keystr(path), field, rows)
    axes = [names.get(axis, axis) if axis else None for axis in field.axes]
    first, *rest = execution.sharding.rules.partition(mesh, axes, field.shape)
    sharding = NamedSharding(mesh, PartitionSpec((*replicas, *mesh_axes_of(first)), *rest))
    return jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=sharding)

  return jax.tree_util.tree_map_with_path(array, declared_batch(config, objective, data, rows))


def declared_batch(config: MaxTextConfig, objective: Objective, data: BatchSource | None, rows: int) -> Any:
  """The tree of the objective's fields, with what the configured data brings beside them."""
  declared = objective.batch(rows, config.max_target_length)
  if data is None:
    extra = {name: field for name, field in getattr(declared, "extra", {}).items() if name in _brought(config)}
    if declared != replace(token_batch(rows, config.max_target_length), extra=extra):
      raise ConfigError(
        f"{type(objective).__name__} declares a batch that the configured data does not make: give maxtext.train the "
        f"argument data."
      )
    if config.dataset_type == DatasetType.SYNTHETIC and not extra:  # its rows are one document each
      declared = replace(declared, segments=None)
  if data is None or config.use_grpo:
    declared = replace(declared, **_media(config, rows))
  return declared


def unfed_towers(config: MaxTextConfig, objective: Objective | None, data: BatchSource | None) -> Collection[str]:
  """Towers for which the run's batches bring no media; a caller's own objective or data may bring any."""
  if not config.use_grpo and (objective is not None or data is not None):
    return ()
  return {VISION, AUDIO} - _media(config, 1).get("media", {}).keys()


def _media(config: MaxTextConfig, rows: int) -> dict[str, Any]:
  """The fields of a batch with media; {} of text alone."""
  options, length = media_options(config), config.max_target_length
  if options is None:
    return {}
  towers = dict[str, TowerInputs]()
  for tower, room in options.rooms.items():
    arrays = tower_arrays(room, length)
    del arrays["indices"]
    fields: dict[str, Any] = {
      name: Field((rows, *array.shape), array.dtype, (BATCH, *(None,) * len(array.shape)))
      for name, array in arrays.items()
    }
    indices: Any = token_field(rows, length)
    towers[tower] = TowerInputs(indices=indices, **fields)
  axes = Field((rows, length, 3), jnp.int32, (BATCH, LENGTH, None))
  return {"media": towers, "rotary_positions": None if options.axes is None else axes}


def _brought(config: MaxTextConfig) -> tuple[str, ...]:
  """Extra values of targets that the configured data can bring."""
  if config.use_dpo:
    return REFERENCE, LABEL
  return (TEACHER_TOKENS, TEACHER_LOG_PROBS) if config.offline_data_dir else ()


def token_paths(declared: Any) -> frozenset[Any]:
  """The paths of the fields that have a value for each token of a row, and so follow the order of the tokens."""
  fields = jax.tree_util.tree_leaves_with_path(declared)
  return frozenset(path for path, field in fields if LENGTH in field.axes)


def _check_field(objective: Objective, path: str, field: Field, rows: int) -> None:
  where = f"{type(objective).__name__}.batch: {path} {list(field.shape)} with axes {list(field.axes)}"
  if len(field.axes) != len(field.shape):
    raise ConfigError(f"{where} needs one logical axis for each dimension; None is one that is not split.")
  if field.axes[:1] != (BATCH,) or field.shape[0] != rows:
    raise ConfigError(f"{where} must have the {rows} rows of the batch as its first dimension, with axis '{BATCH}'.")
  if LENGTH in (*field.axes[:1], *field.axes[2:]):
    raise ConfigError(f"{where} must have the tokens of a row, axis '{LENGTH}', as its second dimension.")
  if unknown := [axis for axis in field.axes[1:] if axis not in (LENGTH, None, *LOGICAL_AXES)]:
    raise ConfigError(f"{where}: '{unknown[0]}' is neither '{LENGTH}' nor a name of logical_axis_rules.")


def _check_rows(
  config: MaxTextConfig, execution: ExecutionConfig, key: str, micro: int, split: tuple[str, ...]
) -> None:
  mesh = execution.sharding.mesh
  shards = num_shards_of(mesh, split)
  over = " x ".join(f"{a}={mesh.shape[a]}" for a in split if mesh.shape[a] > 1)
  if micro % shards:
    raise ConfigError(
      f"A micro-batch of {micro} sequences ({key}={getattr(config, key)} x {mesh.size} devices) cannot be split over "
      f"{over}, {shards} groups: make {key} a multiple of {shards / mesh.size:g}."
    )
