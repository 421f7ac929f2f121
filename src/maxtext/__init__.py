"""MaxText: train large language models in pure Python and JAX, and let them write.

`load_config` builds a run's configuration, `maxtext.train(config)` trains it, `LLM` answers with what came of it.
Importing this package imports no JAX; the names that need it are found when they are first used.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from maxtext.configs import ConfigError, MaxTextConfig, load_config

if TYPE_CHECKING:
  from maxtext.inference.llm import LLM, RequestOutput
  from maxtext.inference.sampling import SamplingParams
  from maxtext.training.callbacks.base import Callback
  from maxtext.training.run import train

  __version__: str

__all__ = [
  "LLM",
  "Callback",
  "ConfigError",
  "MaxTextConfig",
  "RequestOutput",
  "SamplingParams",
  "__version__",
  "load_config",
  "train",
]

_LAZY = {
  "LLM": "maxtext.inference.llm",
  "RequestOutput": "maxtext.inference.llm",
  "SamplingParams": "maxtext.inference.sampling",
  "Callback": "maxtext.training.callbacks.base",
  "train": "maxtext.training.run",
}


def __getattr__(name: str) -> Any:
  if name == "__version__":
    return importlib.metadata.version("maxtext")
  if name not in _LAZY:
    raise AttributeError(f"module 'maxtext' has no attribute '{name}'")
  value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
