"""MaxText: train large language models in pure Python and JAX.

`load_config` builds a run's configuration, `maxtext.train(config)` trains it.
"""

import importlib
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig, load_config

__all__ = ["ConfigError", "MaxTextConfig", "load_config", "train"]


def __getattr__(name: str) -> Any:
  if name == "train":  # importing it costs JAX, which configuration does not need
    return importlib.import_module("maxtext.train")
  raise AttributeError(f"module 'maxtext' has no attribute '{name}'")
