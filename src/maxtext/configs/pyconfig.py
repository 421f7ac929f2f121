"""`pyconfig.initialize(argv)`, the specification's way to a configuration with every derived value in it."""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from maxtext.configs.loader import load_config, parse_assignments
from maxtext.configs.types import MaxTextConfig


def initialize(argv: Sequence[str], **keys: Any) -> MaxTextConfig:
  """The run that a script's words describe, on the devices that JAX finds.

  Args:
    argv: the script's name, a YAML file (or a recipe, or a model), then `key=value`.
    **keys: single keys, which win over all.
  """
  words = [str(word) for word in argv[1:]]
  source = words.pop(0) if words and "=" not in words[0] else None
  config = load_config(source, environment=os.environ, **(parse_assignments(words) | keys))
  return import_module("maxtext.mesh.devices").with_devices(config)  # a room above, and JAX: only when asked for
