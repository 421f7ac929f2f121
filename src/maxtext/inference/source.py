"""The configuration of a trained model, by where it lies: what `maxtext decode`, `maxtext serve` and `LLM` begin with.

Imports no JAX.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.resolve import resolve_keys, resolve_source


def resolve_model(source: str | None, given: Mapping[str, Any], strict: bool = False) -> MaxTextConfig:
  """Of a run's folder or checkpoint, a folder of safetensors, or a file, recipe or model with `load_parameters_path`.

  A run brings its own keys, but for those of the machine that trained it. The environment and keys that are given
  come first.
  """
  folder = source is not None and ("://" in source or Path(source).expanduser().is_dir())
  if source is None or not folder or is_hugging_face(source):
    return resolve_source(source, given, strict).config
  from maxtext.checkpoint.inspect import served_keys

  keys = served_keys(source, given)
  return resolve_keys(keys, strict, recorded=keys.keys() - given.keys()).config


def resolve_draft(source: str, option: str) -> MaxTextConfig:
  """Of a model that guesses for another; `option` is what a mistake is named by."""
  if "://" not in source and not Path(source).expanduser().is_dir():
    raise ConfigError(f"{option} {source}: there is no such folder of a run or checkpoint.")
  return resolve_model(source, {})
