"""The configuration of a source and keys, where the source may be a folder of weights that says what its model is.

Imports no JAX.
"""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from maxtext.configs.errors import ConfigError
from maxtext.configs.loader import Resolved, is_bundled, resolve
from maxtext.logs import ON_STDERR
from maxtext.weights.detect import is_hugging_face

_LOG = logging.getLogger(__name__)


def resolve_source(
  source: str | None,
  values: Mapping[str, Any],
  strict: bool = False,
  recorded: Collection[str] = (),
  environment: Mapping[str, str] = os.environ,
) -> Resolved:
  """The configuration of a file, recipe, model, run or folder of weights, of keys and of the environment.

  A run gives its model, its last parameters and its tokenizer to start from.

  Warns on stderr of keys that have no effect, but for `recorded` ones; `strict` raises instead.
  """
  folder = source if source and is_hugging_face(source) else None
  if folder:
    source, values = None, {"load_parameters_path": folder, **values}
  elif source and _is_run(source):
    from maxtext.checkpoint.inspect import starting_keys

    keys = starting_keys(source, values)
    found = resolve_keys(keys, strict, recorded=keys.keys() - values.keys())
    return replace(found, name=Path(source).resolve().name)
  first = resolve(source, environment, values, recorded=recorded)
  path = first.config.load_parameters_path
  if not path or not is_hugging_face(path):
    if _names_adapters(first, recorded):
      return resolve_keys(values, strict, source, recorded, environment)
    return _warn(first, strict)
  own = _folder_values(path, first)
  again = resolve_keys({**own, **values}, strict, source, recorded={*own, *recorded}, environment=environment)
  origins = {**again.origins, **dict.fromkeys(own, os.path.join(path, "config.json"))}
  return replace(again, origins=origins, name=Path(folder).resolve().name if folder else again.name)


def _is_run(source: str) -> bool:
  """Whether a source is the folder of a run or of a checkpoint, here or in a store.

  A recipe or a model of the same name wins: `./NAME` is the folder.
  """
  return "://" in source or (Path(source).expanduser().is_dir() and not is_bundled(source))


def resolve_keys(
  keys: Mapping[str, Any],
  strict: bool = False,
  source: str | None = None,
  recorded: Collection[str] = (),
  environment: Mapping[str, str] = os.environ,
) -> Resolved:
  """The configuration of those keys, of which some were `recorded` by a run or a folder of weights; warns of the others
  that have no effect. The folder of `lora_input_adapters_path` gives the keys of its adapters."""
  first = resolve(source, environment, keys, recorded=recorded)
  if not _names_adapters(first, recorded):
    return _warn(first, strict)
  from maxtext.weights.from_peft import adapter_keys
  from maxtext.weights.peft_layout import CONFIG

  own, file = adapter_keys(first.config), os.path.join(first.config.lora_input_adapters_path, CONFIG)
  for key, value in own.items():
    if key in first.origins and key not in recorded and getattr(first.config, key) != value:
      raise ConfigError(f"{key}={getattr(first.config, key)} contradicts {file}, which says {value}: leave it out.")
  again = _warn(resolve(source, environment, {**keys, **own}, recorded={*own, *recorded}), strict)
  return replace(again, origins={**again.origins, **dict.fromkeys(own, file)})


def _names_adapters(resolved: Resolved, recorded: Collection[str]) -> bool:
  """Whether the user gives adapters to load; a run that once loaded some has its keys."""
  return bool(resolved.config.lora_input_adapters_path) and "lora_input_adapters_path" not in recorded


def _warn(resolved: Resolved, strict: bool) -> Resolved:
  if resolved.warning and strict:
    raise ConfigError(resolved.warning)
  if resolved.warning and os.environ.get("JAX_PROCESS_ID", "0") == "0":  # once, where `launch` starts several
    _LOG.warning(f"maxtext: warning: {resolved.warning} (An error with --strict.)", extra=ON_STDERR)
  return resolved


def _folder_values(path: str, resolved: Resolved) -> dict[str, Any]:
  """What a folder of weights says of its model and its tokenizer, less what the user says, in whichever file."""
  ours = ("base.yml", "model ", "custom_mesh_and_rule=")
  given = {key for key, origin in resolved.origins.items() if not origin.startswith(ours)}
  own: dict[str, Any] = {"source_checkpoint_layout": "safetensors"}
  from maxtext.weights.config_json import keys_of_folder
  from maxtext.weights.generation_config import sampling_keys
  from maxtext.weights.hugging_face_folder import HuggingFaceFolder

  folder = HuggingFaceFolder(path)
  if not given & {"model_name", "decoder_block"}:
    own |= keys_of_folder(folder)
  if not any(key.startswith("decode_sampling_") for key in given):
    own |= sampling_keys(folder)
  if not given & {"tokenizer_path", "tokenizer_type"}:
    own |= _tokenizer_keys(path)
  return {key: value for key, value in own.items() if key not in given}


def _tokenizer_keys(path: str) -> dict[str, Any]:
  """The tokenizer beside the weights, if there is one, and whether its documents begin with a token for that."""
  from maxtext.checkpoint.tokenizer import kind_of
  from maxtext.data.tokenizers import adds_bos

  folder = Path(path).expanduser()
  kind = kind_of(folder)
  if kind is None:
    return {}
  begins = adds_bos(folder)
  return {"tokenizer_path": path, "tokenizer_type": kind.value} | ({} if begins is None else {"add_bos": begins})
