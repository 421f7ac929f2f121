"""From a configuration and a mesh to a model."""

import pkgutil
import re
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs import types as t
from maxtext.configs.derived import scaled_sizes
from maxtext.configs.types import DecoderBlockType
from maxtext.configs.types.enums import REGISTERED_FAMILIES
from maxtext.configs.types.section import Section
from maxtext.configs.unsupported import keys_with_no_effect
from maxtext.configs.values import default_of, plain_value
from maxtext.layers.execution import ExecutionConfig, Numerics, Sharding
from maxtext.layers.lora import is_adapter
from maxtext.layers.matmul import UnfitWeightError
from maxtext.layers.weight_format import PlainFormat
from maxtext.media.processed import MediaProcessor
from maxtext.models import families
from maxtext.models.execution.adapters import adapters, check_adapters
from maxtext.models.execution.execution import execution_of_model, sharding_rules
from maxtext.models.execution.quantization import check_weight_format, weights_at_rest
from maxtext.models.features import with_features
from maxtext.models.model import Model
from maxtext.models.spec import DecoderSpec, towers_of
from maxtext.models.weight_table import Table


class Family(Protocol):
  """The interface of a module in `families`; it also has `WEIGHTS` or `weights(spec)`, `HUGGING_FACE`, and with towers
  `processors(config)`."""

  def spec(self, config: MaxTextConfig) -> DecoderSpec:
    """The decoder that a configuration describes; a `ModelSpec` where it has towers."""
    ...


# Every module in `families` is a family. Its name is the value of decoder_block.
FAMILIES: dict[DecoderBlockType, Family] = {
  DecoderBlockType(module.name): cast(Family, import_module(f"{families.__name__}.{module.name}"))
  for module in pkgutil.iter_modules(families.__path__)
}


def register_family(name: str, family: Any) -> None:
  """Makes a family from outside the package the one that `decoder_block=name` means, in this process.

  Call it before `load_config`. Registering the same name again replaces the family, as notebooks do; a family of the
  package cannot be replaced.

  Args:
    name: the value of `decoder_block`.
    family: a module or an object with `spec(config)`; for `convert` also `WEIGHTS` or `weights(spec)`, and
      `HUGGING_FACE`.

  Raises:
    ConfigError: (a ValueError) the name is taken or no identifier, or the family has no `spec`.
  """
  if not name.isidentifier() or name.startswith("_"):
    raise ConfigError(f"register_family: {name!r} must be an identifier, such as 'my_model'.")
  if not callable(getattr(family, "spec", None)):
    raise ConfigError(f"register_family: {name} has no function spec(config).")
  if name in _OWN_FAMILIES:
    raise ConfigError(f"register_family: {name} is a family of the package; choose another name.")
  REGISTERED_FAMILIES.add(name)
  FAMILIES[DecoderBlockType(name)] = cast(Family, family)


_OWN_FAMILIES = frozenset(block.value for block in FAMILIES)

# Sections that describe a model: their keys have no effect on a family that does not read them.
_DESCRIBES_A_MODEL = (
  t.ModelArchitecture, t.Attention, t.MlaAttention, t.AttentionIndexer, t.Llama4Attention, t.DeepSeekMoE, t.Qwen3Next,
  t.PositionalEmbedding, t.Rope, t.YarnRope,
)  # fmt: skip
# By tower, with the key that adds it.
_DESCRIBES_A_TOWER: dict[str, tuple[str, tuple[type[Section], ...]]] = {
  "vision": ("use_multimodal", (t.VisionTower, t.VisionProjector)),
  "audio": ("use_audio", (t.AudioEncoder,)),
}
_DESCRIBES_IMAGES = {"image_size_for_vit", "use_mrope", "mrope_section"}
_DESCRIBES_EXPERTS = {"moe_expert_input_dim", "base_moe_mlp_dim", "interleave_moe_layer_step", "norm_topk_prob"}


def build_model(config: MaxTextConfig, mesh: Mesh, serving: bool = False, unfed: Collection[str] = ()) -> Model:
  """Builds the abstract model of a run, for training or for inference (`serving`).

  Towers that are `unfed`, since no batch brings their media, are left as they are: weight decay would shrink them.
  """
  spec = model_spec(config)
  execution = execution_of_model(config, mesh, spec, serving)
  try:
    model = Model.of(spec, execution, _trained(config, unfed))
    check_weight_format(config, model)
  except UnfitWeightError as error:
    raise ConfigError(str(error)) from None
  check_adapters(config, model.params.keys() | model.buffers.keys())
  return model


def abstract_model(config: MaxTextConfig, serving: bool = False) -> Model:
  """Builds the abstract model on one device, without checking keys of meshes or kernels. It must not be run.

  With `serving`, weights are stored as for inference; otherwise plainly.
  """
  mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes)), config.mesh_axes)
  lora, numerics = adapters(config), Numerics(weight_dtype=config.weight_dtype.value)
  matmul = () if lora is None else (lora,)
  format_ = weights_at_rest(config, serving=True) if serving else PlainFormat()
  execution = ExecutionConfig(
    Sharding(mesh, sharding_rules(config, mesh)), numerics, matmul=matmul, weight_format=format_
  )
  try:
    return Model.of(model_spec(config), execution)
  except UnfitWeightError as error:
    raise ConfigError(str(error)) from None


def model_spec(config: MaxTextConfig) -> DecoderSpec:
  """The architecture that a configuration describes.

  Raises:
    ConfigError: a key that describes a model is set, and the model's family does not read it.
  """
  fixed = {"routed_bias_update_rate": 0.0} if config.lora_rank else {}  # the base is frozen, with the routers' biases
  reader = _Reader(config.model_copy(update=scaled_sizes(config) | fixed))
  read = cast(MaxTextConfig, reader)
  spec = with_features(read, FAMILIES[config.decoder_block].spec(read))
  sections: tuple[type[Section], ...] = _DESCRIBES_A_MODEL
  for name, (key, of_tower) in _DESCRIBES_A_TOWER.items():
    if not getattr(config, key):
      continue
    if name not in [tower.name for tower in towers_of(spec)]:
      raise ConfigError(f"{key}=true: decoder_block={config.decoder_block.value} has no {name} encoder: leave it out.")
    sections = (*sections, *of_tower)
  keys = _DESCRIBES_EXPERTS.union(*(section.model_fields for section in sections))
  keys |= _DESCRIBES_IMAGES if config.use_multimodal else set()
  unread = keys - reader.read - _READ_ELSEWHERE
  for key in sorted(unread - keys_with_no_effect(config, unread).keys()):
    value = getattr(config, key)
    if value != default_of(key):
      raise ConfigError(
        f"{key}={plain_value(value)} has no effect here, on decoder_block={config.decoder_block.value}: leave it out."
      )
  return spec


def media_processors(config: MaxTextConfig) -> dict[str, MediaProcessor]:
  """What makes inputs of the towers of each kind of media: "image", "video", "audio"; {} for a model of text alone."""
  family, towers = FAMILIES[config.decoder_block], config.use_multimodal or config.use_audio
  return family.processors(config) if towers and hasattr(family, "processors") else {}


def weight_table(config: MaxTextConfig, spec: DecoderSpec) -> Table:
  """The table of a model's weights in Hugging Face files."""
  family = FAMILIES[config.decoder_block]
  if hasattr(family, "weights"):
    return family.weights(spec)
  if not hasattr(family, "WEIGHTS"):
    raise ConfigError(f"decoder_block={config.decoder_block.value}: the family has neither WEIGHTS nor weights(spec).")
  return family.WEIGHTS


class _Reader:
  """A configuration that records which keys were read."""

  def __init__(self, config: MaxTextConfig) -> None:
    self._config, self.read = config, set[str]()

  def __getattr__(self, key: str) -> Any:
    self.read.add(key)
    return getattr(self._config, key)


# Keys that are read for execution, or checked when a configuration is loaded.
_READ_ELSEWHERE = {
  "decoder_block", "dense_init_scale", "attention", "use_ragged_attention", "ragged_block_size", "use_iota_embed",
  "max_position_embeddings", "qk_clip_threshold", "global_parameter_scale", "use_batch_split_schedule",
  "batch_split_factor",
}  # fmt: skip


def _trained(config: MaxTextConfig, unfed: Collection[str]) -> Callable[[str], bool]:
  if config.lora_rank:
    return is_adapter
  patterns = [re.compile(p) for p in config.student_params_to_update or config.trainable_parameters_mask]
  frozen, idle = (tuple(f"towers/{tower}/" for tower in towers) for towers in (_frozen_towers(config), unfed))

  def trained(path: str) -> bool:
    if path.startswith(idle) or (path.startswith(frozen) and not _OF_A_PROJECTOR.search(path)):
      return False
    return not patterns or any(pattern.search(path) for pattern in patterns)

  return trained


_OF_A_PROJECTOR = re.compile(r"^towers/\w+/(projector|deepstack)/")


def _frozen_towers(config: MaxTextConfig) -> list[str]:
  """Encoders that are not trained; their projectors are."""
  frozen = {
    "vision": config.use_multimodal and config.freeze_vision_encoder_params,
    "audio": config.use_audio and config.freeze_audio_encoder_params,
  }
  return [tower for tower, is_frozen in frozen.items() if is_frozen]
