"""`pyconfig.initialize(argv)`, the specification's function for a configuration with every derived value."""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from maxtext.configs.loader import load_config, parse_assignments
from maxtext.configs.types import MaxTextConfig


def initialize(argv: Sequence[str], **keys: Any) -> MaxTextConfig:
  """The configuration that a script's arguments describe, for the devices that JAX finds.

  Args:
    argv: the script's name, a YAML file (or a recipe, or a model), then `key=value`.
    **keys: single keys, which win over everything.
  """
  overrides = [str(argument) for argument in argv[1:]]
  source = overrides.pop(0) if overrides and "=" not in overrides[0] else None
  config = load_config(source, environment=os.environ, **(parse_assignments(overrides) | keys))
  return import_module("maxtext.mesh.devices").with_devices(
    config
  )  # it is in a higher package and imports JAX, so the import is deferred
