"""`config.json` of a Hugging Face folder beside our configuration: checked against it, and models found by it."""

from collections.abc import Mapping
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.loader import load_config, model_names
from maxtext.models.build import FAMILIES
from maxtext.models.hugging_face import HuggingFace
from maxtext.weights.folder import Folder

SPARE_ROWS = 256  # by which a vocabulary may be padded to a round number, here or there
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What says nothing about the weights, or says the same in several ways.
_NOT_COMPARED = {"max_position_embeddings", *TOKENS}


def description(config: MaxTextConfig) -> HuggingFace:
  """What a family is there; one that has no class there is refused."""
  found = getattr(FAMILIES[config.decoder_block], "HUGGING_FACE", None)
  if found is None:
    raise ConfigError(
      f"decoder_block={config.decoder_block.value} has no HUGGING_FACE in its file, so it cannot be converted."
    )
  return found


def find_model(folder: Folder) -> str:
  """The name of the model in a folder; where several are alike but for their weights, the first."""
  if not folder.config:
    raise ConfigError(f"{folder.path} has no config.json to tell the model by: write model_name=...")
  for name in model_names():
    try:
      config = load_config(name, dataset_type="synthetic")
    except ConfigError:  # a family that is not implemented yet
      continue
    if hasattr(FAMILIES[config.decoder_block], "HUGGING_FACE") and not differences(config, folder.config):
      return name
  raise ConfigError(
    f"No model of the catalogue has the sizes of {folder.path / 'config.json'}: write model_name=..., or "
    f"decoder_block=... and the sizes."
  )


def differences(config: MaxTextConfig, theirs: Mapping[str, Any]) -> list[str]:
  """Where a folder's description contradicts a configuration, in words."""
  about = description(config)
  ours = _comparable(about.config(config))
  found = []
  for name, value in _comparable(theirs).items():
    if name not in ours or name in _NOT_COMPARED or value is None or ours[name] == value:
      continue
    if name == "model_type" and value in about.also:
      continue
    if name == "vocab_size" and abs(ours[name] - value) <= SPARE_ROWS:
      continue
    found.append(f"{name}={value} there, {ours[name]} here")
  return found


def _comparable(content: Mapping[str, Any]) -> dict[str, Any]:
  """The entries that are single numbers, and the kind of model; older files have the base of positions apart."""
  rope = content.get("rope_parameters") or {}
  flat = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
  single = {k: v for k, v in content.items() if v is None or isinstance(v, (int, float)) or k == "model_type"}
  return flat | single
