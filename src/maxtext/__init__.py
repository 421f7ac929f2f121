"""MaxText: train large language models in pure Python and JAX, evaluate them, convert them, and generate with them.

`load_config` makes the configuration of a run, `train` trains it, `evaluate` measures the loss of a trained one, `LLM`
generates with it, `convert` exchanges its weights with Hugging Face, `quantize` rounds them to few bits, and `plan`
says what a run needs on hardware that is not here. Importing this package imports no JAX: the names that need it are
loaded when they are first used.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from maxtext.configs import ConfigError, MaxTextConfig, load_config

if TYPE_CHECKING:
  from maxtext.configs.keys import ConfigKeys
  from maxtext.inference.llm import LLM, RequestOutput
  from maxtext.inference.sampling import SamplingParams
  from maxtext.planner.plan import Plan, plan
  from maxtext.rl.run import train
  from maxtext.training.callbacks.base import Callback
  from maxtext.training.evaluation import evaluate
  from maxtext.training.objectives.base import Objective
  from maxtext.training.state import TrainState
  from maxtext.weights.convert import convert
  from maxtext.weights.quantize import quantize

  __version__: str

__all__ = [
  "LLM",
  "Callback",
  "ConfigError",
  "ConfigKeys",
  "MaxTextConfig",
  "Objective",
  "Plan",
  "RequestOutput",
  "SamplingParams",
  "TrainState",
  "__version__",
  "convert",
  "evaluate",
  "load_config",
  "plan",
  "quantize",
  "train",
]

_LAZY = {
  "LLM": "maxtext.inference.llm",
  "RequestOutput": "maxtext.inference.llm",
  "SamplingParams": "maxtext.inference.sampling",
  "Callback": "maxtext.training.callbacks.base",
  "ConfigKeys": "maxtext.configs.keys",
  "Objective": "maxtext.training.objectives.base",
  "Plan": "maxtext.planner.plan",
  "TrainState": "maxtext.training.state",
  "convert": "maxtext.weights.convert",
  "evaluate": "maxtext.training.evaluation",
  "plan": "maxtext.planner.plan",
  "quantize": "maxtext.weights.quantize",
  "train": "maxtext.rl.run",
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
