"""`generation_config.json` of a Hugging Face folder: how its model samples, and which tokens end its outputs.

Imports no JAX.
"""

import math
from collections.abc import Mapping
from typing import Any

from maxtext.checkpoint.tokenizer import SIDE_FOLDER
from maxtext.configs import ConfigError
from maxtext.configs.types import SamplingStrategy
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.hugging_face_folder import HuggingFaceFolder

_FILE = "generation_config.json"
_MOST_ENDS = 7  # together with the three of the tokenizer, at most so many as a request can have


def sampling_keys(folder: HuggingFaceFolder) -> dict[str, Any]:
  """The keys of default sampling parameters; none for a model that is to answer greedily, as transformers reads it."""
  content = folder.json(_FILE)
  if not content.get("do_sample"):
    return {}
  temperature = _number(folder, content, "temperature", 1.0)
  top_p, top_k = _number(folder, content, "top_p", 1.0), int(_number(folder, content, "top_k", 50))
  if temperature <= 0 or not 0 < top_p <= 1 or top_k < 0:
    raise ConfigError(
      f"{folder.path / _FILE} has temperature={temperature}, top_p={top_p}, top_k={top_k}, with which nothing can be "
      "sampled: correct it, or set do_sample to false there."
    )
  return {
    "decode_sampling_strategy": SamplingStrategy.COMPOSITE.value,
    "decode_sampling_temperature": temperature,
    "decode_sampling_nucleus_p": top_p,
    "decode_sampling_top_k": top_k,
  }


def end_token_ids(path: str) -> tuple[int, ...]:
  """The `eos_token_id` of a folder, or of the one that a checkpoint was converted from; besides the tokenizer's own."""
  place = next((one for one in (path, f"{path}/{SIDE_FOLDER}") if path and is_hugging_face(one)), None)
  if place is None:
    return ()
  folder = HuggingFaceFolder(place)
  found = folder.json(_FILE).get("eos_token_id")
  found = folder.config.get("eos_token_id") if found is None else found
  ids = found if isinstance(found, list) else [] if found is None else [found]
  if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
    raise ConfigError(f"{folder.path / _FILE} has eos_token_id={found}, which is no token id and no list of them.")
  return tuple(ids[:_MOST_ENDS])


def _number(folder: HuggingFaceFolder, content: Mapping[str, Any], name: str, default: float) -> float:
  value = content.get(name)
  if value is None:
    return default
  if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
    raise ConfigError(f"{folder.path / _FILE} has {name}={value!r}, which is no number.")
  return value
