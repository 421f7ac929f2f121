"""The configuration of a trained model from its location, for `maxtext decode`, `maxtext serve` and `LLM`.

Imports no JAX.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.weights.detect import is_hugging_face
from maxtext.weights.resolve import resolve_keys, resolve_source


def resolve_model(source: str | None, overrides: Mapping[str, Any], strict: bool = False) -> MaxTextConfig:
  """The configuration of a run folder, a checkpoint, a safetensors folder, or a YAML file, recipe or model name.

  The last three need `load_parameters_path`. A run folder provides its own keys, except those of the machine that
  trained it. The environment and `overrides` take precedence.
  """
  folder = source is not None and ("://" in source or Path(source).expanduser().is_dir())
  if source is None or not folder or is_hugging_face(source):
    return resolve_source(source, overrides, strict).config
  from maxtext.checkpoint.inspect import served_keys

  keys = served_keys(source, overrides)
  return resolve_keys(keys, strict, recorded=keys.keys() - overrides.keys()).config


def resolve_draft_model(source: str, option: str) -> MaxTextConfig:
  """The configuration of a draft model; `option` is the flag or argument that error messages name."""
  if "://" not in source and not Path(source).expanduser().is_dir():
    raise ConfigError(f"{option} {source}: there is no such run folder or checkpoint.")
  return resolve_model(source, {})
