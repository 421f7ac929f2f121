"""Conversion of weights between Hugging Face folders and checkpoints: `maxtext.convert` and `maxtext convert`."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from maxtext.checkpoint.inspect import chosen_keys
from maxtext.checkpoint.location import locate
from maxtext.checkpoint.tokenizer import kind_of
from maxtext.configs.errors import ConfigError
from maxtext.configs.loader import values_and_origins
from maxtext.models.build import abstract_model
from maxtext.weights.config_json import keys_of_folder
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.from_hugging_face import convert_from_hugging_face
from maxtext.weights.hugging_face_folder import HuggingFaceFolder
from maxtext.weights.plain_weights import Progress, no_progress
from maxtext.weights.resolve import resolve_keys
from maxtext.weights.to_hugging_face import convert_to_hugging_face
from maxtext.weights.to_peft import write_adapters

if TYPE_CHECKING:
  from maxtext.configs.keys import ConfigKeys

_LOG = logging.getLogger(__name__)


def convert(
  source: str | os.PathLike[str],
  target: str | os.PathLike[str],
  *,
  to: Literal["maxtext", "huggingface", "peft"] | None = None,
  shard_gigabytes: float = 5.0,
  progress: Progress | None = None,
  strict: bool = False,
  **keys: "Unpack[ConfigKeys]",
) -> Path:
  """Converts weights from a Hugging Face folder to a checkpoint of parameters, or the other way.

  An interrupted conversion resumes when it is started again.

  Args:
    source: a folder with `config.json` and safetensors; or a run folder, its checkpoints, one step, or parameters.
    target: a folder that does not exist yet.
    to: what is written; None is whatever `source` is not. "huggingface" merges the adapters of a LoRA run into its
      weights, and "peft" writes them alone. A source without `config.json` needs `to="maxtext"`, and
      `model_name`, or `decoder_block` and its sizes.
    shard_gigabytes: the largest safetensors file that is written.
    progress: called with parts done, all parts, bytes done, all bytes.
    strict: makes keys without an effect an error instead of a warning.
    **keys: configuration keys, such as `weight_dtype="bfloat16"` for what is written. They win over those of the run or
      the folder.

  Returns:
    The folder that was written: for `load_parameters_path` and `LLM`, or for transformers.

  Raises:
    ConfigError: (a ValueError) the folders or the keys are invalid, or the weights are not those of the model.
  """
  source, given = os.fspath(source), dict[str, Any](keys)
  if to not in ("maxtext", "huggingface", "peft", None):
    raise ConfigError(f"to={to!r} is neither 'maxtext', 'huggingface' nor 'peft'.")
  if to is None:
    to = "maxtext" if is_hugging_face(source) else "huggingface"
  if to == "maxtext":
    return _from_hugging_face(source, Path(target), given, strict, progress or no_progress)
  if to == "peft":
    return _to_peft(source, Path(target), given, strict)
  if not 0 < shard_gigabytes < float("inf"):
    raise ConfigError(f"shard_gigabytes={shard_gigabytes:g} must be a number above 0.")
  return _to_hugging_face(source, Path(target), given, strict, progress or no_progress, int(shard_gigabytes * 10**9))


def _from_hugging_face(source: str, target: Path, given: dict[str, Any], strict: bool, progress: Progress) -> Path:
  folder, own = HuggingFaceFolder(source), dict[str, Any]()
  values = {"dataset_type": "synthetic"} | given
  if not values.keys() & {"model_name", "decoder_block"}:
    own = keys_of_folder(folder)
    values = own | values
    _LOG.info(f"{folder.path} is {own.get('model_name') or folder.config['model_type'] + ' of sizes of its own'}")
  resolved = resolve_keys(values, strict, recorded=own.keys() - given.keys())
  record = values_and_origins(resolved.config, resolved.origins)
  model = abstract_model(resolved.config)
  path = convert_from_hugging_face(resolved.config, model, folder, target, record, progress)
  _LOG.info(f"{path}: {model.size:,} parameters, for load_parameters_path")
  return path


def _to_hugging_face(
  source: str, target: Path, given: dict[str, Any], strict: bool, progress: Progress, most: int
) -> Path:
  keys = chosen_keys(source, given)
  config = resolve_keys(keys, strict, recorded=keys.keys() - given.keys()).config
  model = abstract_model(config)
  path = convert_to_hugging_face(config, model, locate(source), target, progress, most)
  _LOG.info(f"{path}: {model.size:,} parameters, for transformers")
  if kind_of(path) is None:
    _LOG.info("without a tokenizer, as none is kept with them: tokenizer_path=... puts one beside the weights")
  return path


def _to_peft(source: str, target: Path, given: dict[str, Any], strict: bool) -> Path:
  keys = chosen_keys(source, given)
  config = resolve_keys(keys, strict, recorded=keys.keys() - given.keys()).config
  path = write_adapters(config, abstract_model(config), locate(source), target)
  _LOG.info(f"{path}: LoRA adapters of rank {config.lora_rank}, for PEFT and lora_input_adapters_path")
  return path
