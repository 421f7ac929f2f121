"""`config.json` of a Hugging Face folder beside our configuration: checked against it, and models found by it."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.loader import load_config, model_names
from maxtext.models.build import FAMILIES
from maxtext.models.hugging_face import HuggingFace
from maxtext.weights.folder import Folder

SPARE_ROWS = 256  # by which a vocabulary may be padded to a round number, here or there
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What says nothing about the weights, may be left out of them, or is written down in several ways.
_NOT_COMPARED = {"max_position_embeddings", "num_nextn_predict_layers", "rope_theta", *TOKENS}


def description(config: MaxTextConfig) -> HuggingFace:
  """What a model is there; a family that says nothing of it is refused."""
  family = FAMILIES[config.decoder_block]
  if hasattr(family, "hugging_face"):
    return family.hugging_face(config)
  if hasattr(family, "HUGGING_FACE"):
    return family.HUGGING_FACE
  raise ConfigError(f"decoder_block={config.decoder_block.value} has no HUGGING_FACE in its file: it is not converted.")


def find_model(folder: Folder) -> str:
  """The name of the model in a folder; where several are alike but for their weights, the first."""
  if not folder.config:
    raise ConfigError(f"{folder.path} has no config.json to tell the model by: write model_name=...")
  for spare_rows in (0, SPARE_ROWS):
    for name, config in _named_models().items():
      if not differences(config, folder.config, spare_rows):
        return name
  raise ConfigError(
    f"No model of the catalogue has the sizes of {folder.path / 'config.json'}: write model_name=..., or "
    f"decoder_block=... and the sizes."
  )


def differences(config: MaxTextConfig, theirs: Mapping[str, Any], spare_rows: int = SPARE_ROWS) -> list[str]:
  """Where a folder's description contradicts a configuration, in words; what it leaves out contradicts nothing."""
  about = description(config)
  ours, found = _comparable(about.config(config)), []
  for name, value in _comparable(theirs).items():
    same = name not in ours or value is None or ours[name] == value
    also = name == "model_type" and value in about.also
    padded = name == "vocab_size" and abs(ours[name] - value) <= spare_rows
    if not (same or also or padded):
      found.append(f"{name}={value} there, {ours[name]} here")
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
  """The entries that are single numbers, the kind of model, and its rotary positions."""
  single = {
    key: value
    for key, value in content.items()
    if key not in _NOT_COMPARED and (value is None or isinstance(value, (int, float)))
  }
  return single | {"model_type": content.get("model_type")} | _positions(content)


def _positions(content: Mapping[str, Any]) -> dict[str, Any]:
  """The rotary positions of layers that see all, however they are written down: that has changed over the years."""
  found = content.get("rope_parameters") or {}
  found = found.get("full_attention", found)
  if not found and "rope_theta" in content:
    found = {"rope_theta": content["rope_theta"]} | (content.get("rope_scaling") or {})
  kind = found.get("rope_type", found.get("type", "default")) if found else None
  return {"rope_theta": found.get("rope_theta"), "rope_type": kind, "rope_factor": found.get("factor")}
