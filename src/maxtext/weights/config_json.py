"""`config.json` of a Hugging Face folder: compared with a configuration, translated to keys, and written."""

import dataclasses
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import scaled_sizes
from maxtext.configs.errors import ConfigWarning
from maxtext.configs.loader import load_config, model_names
from maxtext.models.build import FAMILIES, model_spec
from maxtext.models.hugging_face import HuggingFace, flat_entries, rope_entries
from maxtext.models.spec import DecoderSpec
from maxtext.weights.hugging_face_folder import HuggingFaceFolder

SPARE_ROWS = 256  # rows by which a vocabulary may be padded, here or there
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Entries that do not concern the weights, are optional, or are written in several ways.
_NOT_COMPARED = {
  "architectures", "max_position_embeddings", "num_nextn_predict_layers", "rope_theta", "rope_parameters",
  "rope_scaling", "hidden_act", "hidden_activation", "activation_function", *TOKENS,
}  # fmt: skip
# Fields of specs that do not change what a model computes: how it is trained, run or stored.
_NOT_OF_THE_COMPUTATION = {
  "balance_weight",
  "selection_bias_rate",
  "chunk",
  "latent_cache",
  "tracked",
  "fused",
  "mtp",
  "loss_weight",
  "sparse_training",
}


def hugging_face_class(config: MaxTextConfig) -> HuggingFace:
  """The Hugging Face class of a model; raises `ConfigError` for a family that has none."""
  family = FAMILIES[config.decoder_block]
  if hasattr(family, "hugging_face"):
    return family.hugging_face(config)
  if hasattr(family, "HUGGING_FACE"):
    return family.HUGGING_FACE
  raise ConfigError(
    f"decoder_block={config.decoder_block.value} has no Hugging Face class (HUGGING_FACE in its file), so it cannot "
    f"be converted."
  )


def config_json_entries(config: MaxTextConfig) -> dict[str, Any]:
  """The entries of `config.json` for a model.

  Raises:
    ConfigError: the Hugging Face class cannot express the model.
  """
  scaled = config.model_copy(update=scaled_sizes(config))
  about = hugging_face_class(scaled)
  content = about.config(scaled)
  towers = {key: getattr(config, key) for key in ("use_multimodal", "use_audio")}
  theirs = model_spec(load_config(**_keys_of_content(flat_entries(content)), **towers, dataset_type="synthetic"))
  if lost := compare_specs(model_spec(config), theirs):
    raise ConfigError(
      f"{about.architecture} cannot express decoder_block={config.decoder_block.value} with these keys, so nothing "
      f"is written: {'; '.join(lost.values())}."
    )
  return content


def keys_of_folder(folder: HuggingFaceFolder) -> dict[str, Any]:
  """The keys of the model in a folder: its name if it is a named model, else every size.

  Raises:
    ConfigError: no family matches the folder's `config.json`.
  """
  if not folder.config:
    raise ConfigError(f"{folder.path} has no config.json that describes the model: write model_name=...")
  if name := find_model(folder):
    return {"model_name": name}
  try:
    return _checked_keys(folder.config)
  except ConfigError as error:
    raise ConfigError(f"{folder.path}: {error}") from None


def our_name(name: str, about: HuggingFace) -> str:
  """The name in a family's table of a tensor of a file, which may have another prefix."""
  for theirs, ours in (about.prefixes or {}).items():
    if name.startswith(theirs):
      return ours + name.removeprefix(theirs)
  return name


def find_model(folder: HuggingFaceFolder) -> str | None:
  """The name of the model in a folder; the first of several that differ only in their weights."""
  for spare_rows in (0, SPARE_ROWS):
    for name, config in _named_models().items():
      if not config_differences(config, folder.config, spare_rows):
        return name
  return None


def config_differences(config: MaxTextConfig, theirs: Mapping[str, Any], spare_rows: int = SPARE_ROWS) -> list[str]:
  """Where a folder's `config.json` contradicts a configuration, as text. Missing entries contradict nothing."""
  about = hugging_face_class(config)
  ours, found = _comparable(about.must_be(config.model_copy(update=scaled_sizes(config)))), []
  for name, value in _comparable(theirs).items():
    same = name not in ours or value is None or ours[name] == value
    also = name == "model_type" and value in about.also
    padded = name == "vocab_size" and isinstance(value, int) and abs(ours[name] - value) <= spare_rows
    if not (same or also or padded):
      found.append(f"{name}={value} there, {ours[name]} here")
  return found


def _checked_keys(content: Mapping[str, Any]) -> dict[str, Any]:
  """Every key from a `config.json`; raises `ConfigError` if the keys would not give the same `config.json`."""
  keys = _keys_of_content(content)
  with warnings.catch_warnings(action="ignore", category=ConfigWarning):  # sizes of towers, where they are left out
    config = load_config(**keys, dataset_type="synthetic")
  if contradictions := config_differences(config, content, 0):
    raise ConfigError(f"config.json describes a model that no keys can express: {'; '.join(contradictions)}.")
  return keys


def _keys_of_content(content: Mapping[str, Any]) -> dict[str, Any]:
  kind = content.get("model_type")
  for block, about in _hugging_face_classes():
    if kind == about.model_type or kind in about.also:
      return {"decoder_block": block} | about.keys(content)
  known = ", ".join(sorted({about.model_type for _, about in _hugging_face_classes()}))
  raise ConfigError(f"config.json has model_type={kind}, and this version reads {known}.")


def _hugging_face_classes() -> list[tuple[str, HuggingFace]]:
  """Each Hugging Face class with its `decoder_block`."""
  found: list[tuple[str, HuggingFace]] = []
  for block, family in FAMILIES.items():
    classes = getattr(family, "HUGGING_FACE", ())
    found += [(block.value, about) for about in (classes if isinstance(classes, tuple) else (classes,))]
  return found


@cache
def _named_models() -> dict[str, MaxTextConfig]:
  """The named models that have a Hugging Face class."""
  found = {}
  for name in model_names():
    with suppress(ConfigError):  # no published weights
      config = load_config(name, dataset_type="synthetic")
      hugging_face_class(config)
      found[name] = config
  return found


def _comparable(content: Mapping[str, Any]) -> dict[str, Any]:
  """The entries that are single values or lists, and those of rotary embeddings."""
  single = {
    key: value
    for key, value in content.items()
    if key not in _NOT_COMPARED and (value is None or isinstance(value, (int, float, str, list)))
  }
  return single | {"model_type": content.get("model_type")} | _positions(content)


def _positions(content: Mapping[str, Any]) -> dict[str, Any]:
  found = rope_entries(content)
  return {name if name.startswith("rope_") else f"rope_{name}": value for name, value in found.items()}


def compare_specs(ours: Any, theirs: Any, name: str = "") -> dict[str, str]:
  """The differences in what two decoders compute, by field; a difference of all layers is listed once."""
  if isinstance(ours, DecoderSpec):
    found: dict[str, str] = {}
    for pair in zip_longest(_layers(ours), _layers(theirs)):
      found |= compare_specs(*pair, "layer")
  elif type(ours) is type(theirs) and dataclasses.is_dataclass(ours):
    found = {}
  else:
    return {} if ours == theirs else {name: f"{name} is {_display(ours)} here and {_display(theirs)} there"}
  for field in dataclasses.fields(ours):
    if field.name not in _NOT_OF_THE_COMPUTATION and field.name != "groups":
      parts = getattr(ours, field.name), getattr(theirs, field.name)
      found |= compare_specs(*parts, f"{name}.{field.name}".lstrip("."))
  return found


def _layers(spec: DecoderSpec) -> list[Any]:
  """All layers in order, without their groups."""
  return [layer for group in spec.groups for _ in range(group.repeats) for layer in group.cycle]


def _display(part: Any) -> str:
  return type(part).__name__ if dataclasses.is_dataclass(part) else str(part)
