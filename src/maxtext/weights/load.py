"""The weights that a run starts from, or that a trained model answers with, on their devices."""

from collections.abc import Collection, Mapping

import jax

from maxtext.checkpoint.layout import Layout
from maxtext.checkpoint.location import locate
from maxtext.checkpoint.options import restore_options
from maxtext.checkpoint.restore import readable, refuse_other
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.lora import is_adapter
from maxtext.layers.quantized_weight import weight_of
from maxtext.layers.sparse_matmul import is_mask
from maxtext.models.model import Model
from maxtext.weights.base import load_base, rounds_base
from maxtext.weights.from_hugging_face import load_from_hugging_face
from maxtext.weights.from_peft import load_adapters
from maxtext.weights.weights_at_rest import load_stored


def load_weights(
  config: MaxTextConfig, model: Model, wanted: Mapping[str, jax.ShapeDtypeStruct], unstacked: bool = False
) -> dict[str, jax.Array]:
  """The parameters that `load_parameters_path` names, in a Hugging Face folder or a checkpoint, and the adapters of
  `lora_input_adapters_path`. Adapters that neither has are left out. Buffers of matmul implementations (ranges of
  delayed scaling, masks) that the checkpoint does not have are new. Weights that are read piece by piece may come
  `unstacked` (`load_rounded`)."""
  path = config.load_parameters_path
  if config.source_checkpoint_layout == "safetensors":
    found = load_from_hugging_face(config, model, path, unstacked)
  else:
    found = load_from_checkpoint(config, model, "load_parameters_path", path, wanted, unstacked)
  if config.lora_input_adapters_path:
    found |= load_adapters(config, model, found)
  own = {name: wanted[name] for name in model.matmul_buffers if name in wanted and name not in found}
  return found | (model.initial_buffers(own) if own else {})


def load_from_checkpoint(
  config: MaxTextConfig,
  model: Model,
  key: str,
  path: str,
  wanted: Mapping[str, jax.ShapeDtypeStruct],
  unstacked: bool = False,
) -> dict[str, jax.Array]:
  """The parameters of a checkpoint that a key of the configuration names, and those of its base where it holds adapters
  alone. Adapters and buffers of matmul implementations that it lacks are left out."""
  folder, options = locate(path), restore_options(config)
  metadata = readable(folder)
  base, there, layout = metadata.base, metadata.parameters, Layout(metadata.stacked)
  apart = {name: struct for name, struct in wanted.items() if base and weight_of(name) in base.arrays}
  stored = {name: layout.stored(name, struct).keys() for name, struct in wanted.items() if name not in apart}
  _check_nothing_is_lost(config, key, path, there, {part for parts in stored.values() for part in parts})
  optional = {name for name in stored if is_adapter(name)}.union(model.matmul_buffers)
  known = {name: wanted[name] for name, parts in stored.items() if name not in optional or parts <= there.keys()}
  found = load_stored(config, model, key, path, known, unstacked)
  if base is None:
    return found
  if not rounds_base(model, base):
    refuse_other(options.values, folder, metadata, {f"buffers/{name}": struct for name, struct in apart.items()})
  return found | load_base(config, model, folder, base, apart)


def _check_nothing_is_lost(
  config: MaxTextConfig, key: str, path: str, there: Collection[str], stored: Collection[str]
) -> None:
  """Raises where a checkpoint has adapters or masks that this run would leave out."""
  lost = [name for name in there if name not in stored]
  if any(map(is_adapter, lost)) or (config.lora_input_adapters_path and any(map(is_adapter, there))):
    raise ConfigError(
      f"{key}={path} has LoRA adapters, and this run, with lora_rank={config.lora_rank}, would leave "
      "them out: set lora_rank, lora_alpha and lora_targets as they were and no lora_input_adapters_path, or start "
      "from its merged weights (maxtext convert to-hf)."
    )
  if any(map(is_mask, lost)):
    raise ConfigError(
      f"{key}={path} has masks of N:M sparsity, which this run would leave out: set weight_sparsity_n "
      "and weight_sparsity_m as they were."
    )
