"""`config.json` of a Hugging Face folder beside our configuration: checked against it, and models found by it."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.derived import scaled_sizes
from maxtext.configs.loader import load_config, model_names
from maxtext.models.build import FAMILIES, model_spec
from maxtext.models.hugging_face import HuggingFace, rope_entries
from maxtext.models.spec import DecoderSpec
from maxtext.weights.folder import Folder

SPARE_ROWS = 256  # by which a vocabulary may be padded to a round number, here or there
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What says nothing about the weights, may be left out of them, or is written down in several ways.
_NOT_COMPARED = {
  "architectures", "max_position_embeddings", "num_nextn_predict_layers", "rope_theta", "rope_parameters",
  "rope_scaling", "hidden_act", "hidden_activation", "activation_function", *TOKENS,
}  # fmt: skip
# Fields of specs that say how a model is trained or run, or how its weights lie, and nothing of what it computes.
_NOT_OF_THE_FUNCTION = {"balance_weight", "selection_bias_rate", "chunk", "latent_cache", "watched", "fused", "ahead"}


def description(config: MaxTextConfig) -> HuggingFace:
  """What a model is there; a family that says nothing of it is refused."""
  family = FAMILIES[config.decoder_block]
  if hasattr(family, "hugging_face"):
    return family.hugging_face(config)
  if hasattr(family, "HUGGING_FACE"):
    return family.HUGGING_FACE
  raise ConfigError(f"decoder_block={config.decoder_block.value} has no HUGGING_FACE in its file: it is not converted.")


def entries(config: MaxTextConfig) -> dict[str, Any]:
  """What `config.json` says of a model.

  Raises:
    ConfigError: the class there cannot be what the model is.
  """
  scaled = config.model_copy(update=scaled_sizes(config))
  about = description(scaled)
  content = about.config(scaled)
  theirs = model_spec(load_config(**_read(content), dataset_type="synthetic"))
  if lost := spec_differences(model_spec(config), theirs):
    raise ConfigError(
      f"{about.architecture} is another model than decoder_block={config.decoder_block.value} with these keys, so "
      f"nothing is written: {'; '.join(lost.values())}."
    )
  return content


def folder_keys(folder: Folder) -> dict[str, Any]:
  """The keys of the model in a folder: its name where it has one here, else every size.

  Raises:
    ConfigError: no family here is what the folder describes.
  """
  if not folder.config:
    raise ConfigError(f"{folder.path} has no config.json to tell the model by: write model_name=...")
  if name := find_model(folder):
    return {"model_name": name}
  try:
    return _keys(folder.config)
  except ConfigError as error:
    raise ConfigError(f"{folder.path}: {error}") from None


def find_model(folder: Folder) -> str | None:
  """The name of the model in a folder; where several are alike but for their weights, the first."""
  for spare_rows in (0, SPARE_ROWS):
    for name, config in _named_models().items():
      if not differences(config, folder.config, spare_rows):
        return name
  return None


def differences(config: MaxTextConfig, theirs: Mapping[str, Any], spare_rows: int = SPARE_ROWS) -> list[str]:
  """Where a folder's description contradicts a configuration, in words; what it leaves out contradicts nothing."""
  about = description(config)
  ours, found = _comparable(about.must_be(config.model_copy(update=scaled_sizes(config)))), []
  for name, value in _comparable(theirs).items():
    same = name not in ours or value is None or ours[name] == value
    also = name == "model_type" and value in about.also
    padded = name == "vocab_size" and isinstance(value, int) and abs(ours[name] - value) <= spare_rows
    if not (same or also or padded):
      found.append(f"{name}={value} there, {ours[name]} here")
  return found


def _keys(content: Mapping[str, Any]) -> dict[str, Any]:
  """Every key that a `config.json` gives, checked: what the keys say again is what it says."""
  keys = _read(content)
  if contradictions := differences(load_config(**keys, dataset_type="synthetic"), content, 0):
    raise ConfigError(f"config.json describes a model that no keys here do: {'; '.join(contradictions)}.")
  return keys


def _read(content: Mapping[str, Any]) -> dict[str, Any]:
  kind = content.get("model_type")
  for block, about in _classes():
    if kind == about.model_type or kind in about.also:
      return {"decoder_block": block} | about.keys(content)
  known = ", ".join(sorted({about.model_type for _, about in _classes()}))
  raise ConfigError(f"config.json has model_type={kind}, and this version reads {known}.")


@cache
def _classes() -> list[tuple[str, HuggingFace]]:
  """Each class there with the family that it is here."""
  found: list[tuple[str, HuggingFace]] = []
  for block, family in FAMILIES.items():
    classes = getattr(family, "HUGGING_FACE", ())
    found += [(block.value, about) for about in (classes if isinstance(classes, tuple) else (classes,))]
  return found


@cache
def _named_models() -> dict[str, MaxTextConfig]:
  """Those of the catalogue that have a description there."""
  found = {}
  for name in model_names():
    with suppress(ConfigError):  # nobody has published weights of it
      config = load_config(name, dataset_type="synthetic")
      description(config)
      found[name] = config
  return found


def _comparable(content: Mapping[str, Any]) -> dict[str, Any]:
  """The entries that are single values or lists, and its rotary positions."""
  single = {
    key: value
    for key, value in content.items()
    if key not in _NOT_COMPARED and (value is None or isinstance(value, (int, float, str, list)))
  }
  return single | {"model_type": content.get("model_type")} | _positions(content)


def _positions(content: Mapping[str, Any]) -> dict[str, Any]:
  found = rope_entries(content)
  return {name if name.startswith("rope_") else f"rope_{name}": value for name, value in found.items()}


def spec_differences(ours: Any, theirs: Any, name: str = "") -> dict[str, str]:
  """What two decoders compute otherwise, by the name of the part; what all layers share is said once."""
  if isinstance(ours, DecoderSpec):
    found: dict[str, str] = {}
    for pair in zip_longest(_layers(ours), _layers(theirs)):
      found |= spec_differences(*pair, "layer")
  elif type(ours) is type(theirs) and dataclasses.is_dataclass(ours):
    found = {}
  else:
    return {} if ours == theirs else {name: f"{name} is {_words(ours)} here and {_words(theirs)} there"}
  for field in dataclasses.fields(ours):
    if field.name not in _NOT_OF_THE_FUNCTION and field.name != "groups":
      parts = getattr(ours, field.name), getattr(theirs, field.name)
      found |= spec_differences(*parts, f"{name}.{field.name}".lstrip("."))
  return found


def _layers(spec: DecoderSpec) -> list[Any]:
  """One after the other, however they are grouped."""
  return [layer for group in spec.groups for _ in range(group.repeats) for layer in group.cycle]


def _words(part: Any) -> str:
  return type(part).__name__ if dataclasses.is_dataclass(part) else str(part)
