"""Frozen models: built like the trained one, with parameters that the program holds and no optimizer touches."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.models.build import build_model
from maxtext.models.model import Model, Params
from maxtext.training.objectives.base import FrozenModel


def build_frozen(
  described: Mapping[str, FrozenModel], config: MaxTextConfig, model: Model, mesh: Mesh
) -> dict[str, tuple[MaxTextConfig, Model]]:
  """The configuration and the model of each frozen model, for the mesh of the trained `model`."""
  built = {
    name: (config, model) if frozen.config is None else (frozen.config, build_model(frozen.config, mesh))
    for name, frozen in described.items()
  }
  for name, (_, other) in built.items():
    if other.execution.kernels.attention.order != model.execution.kernels.attention.order:
      raise ConfigError(
        f"The frozen model '{name}' wants another context-parallel order of tokens than the trained one: give both the "
        f"same context_parallel_load_balance and context_parallel_strategy."
      )
  return built


def frozen_params(config: MaxTextConfig, model: Model) -> Params:
  """The parameters and buffers that a new run of this configuration starts from, where they live."""
  structs = model.params | model.buffers
  shardings = {name: struct.sharding for name, struct in structs.items()}

  def init(seed: jax.Array) -> Params:
    params, buffers = model.init(seed)
    return params | buffers

  initial = jax.jit(init, out_shardings=shardings)(np.uint32(config.init_weights_seed))
  return initial | _loaded(config, model, structs)


def _loaded(config: MaxTextConfig, model: Model, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Params:
  if config.load_parameters_path:
    from maxtext.weights.load import load_weights

    found = load_weights(config, model, structs)
  elif config.load_full_state_path:
    from maxtext.weights.load import load_from_checkpoint

    found = load_from_checkpoint(config, model, "load_full_state_path", config.load_full_state_path, structs)
  else:
    found = {}
  return {name: value for name, value in found.items() if name in structs}
