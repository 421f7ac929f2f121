"""A run on fewer hosts than it began with: the global batch is kept, and its rows are dealt anew."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.configs import MaxTextConfig
from maxtext.distributed.hosts import hosts_of_whole_run
from maxtext.layers.execution import Sharding
from maxtext.mesh.rules import num_shards_of


def for_live_hosts(config: MaxTextConfig) -> MaxTextConfig:
  """The configuration with more rows for each device where hosts are lost, so that the global batch is kept."""
  live = jax.process_count()
  whole = hosts_of_whole_run(live)
  if not config.elastic_enabled or whole == live:
    return config
  keys = ("per_device_batch_size", "eval_per_device_batch_size")
  changes: dict[str, Any] = {key: getattr(config, key) * whole / live for key in keys}
  if config.num_slices == whole:
    changes["num_slices"] = live
  return config.model_copy(update=changes)


def deal_rows(config: MaxTextConfig, sharding: Sharding, batch: Any) -> Any:
  """The batch, split over the devices: where its rows do not divide, with rows of no segment and no weight."""
  if not config.elastic_enabled:
    return batch
  rows, (by_row, by_token) = len(batch.inputs), config.input_data_sharding_logical_axes
  shards = num_shards_of(sharding.mesh, dict(sharding.rules.pairs)[by_row])
  unit = shards * config.gradient_accumulation_steps
  if not (added := -rows % unit):
    return batch
  segments = jnp.ones(batch.inputs.shape, jnp.int32) if batch.segments is None else batch.segments

  def one(array: jax.Array) -> jax.Array:
    array = jnp.pad(array, [(0, added), *[(0, 0)] * (array.ndim - 1)])
    axes = (by_row, by_token if array.shape[1] == batch.inputs.shape[1] else None, *[None] * (array.ndim - 2))
    return jax.lax.with_sharding_constraint(array, sharding.rules.sharding(sharding.mesh, axes, array.shape))

  return jax.tree.map(one, replace(batch, segments=segments))
