"""Checks of what a program hands to `maxtext.train` and `maxtext.evaluate`."""

from collections.abc import Sequence
from typing import Any

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.iterable import as_batch_source
from maxtext.training.callbacks.base import Callback
from maxtext.training.objectives.base import Objective


def check_arguments(
  config: Any, objective: Any = None, optimizer: Any = None, data: Any = None, callbacks: Sequence[Any] = ()
) -> None:
  """Raises `ConfigError` where an argument is of another type than it must be."""
  if not isinstance(config, MaxTextConfig):
    raise ConfigError(f"config is {_kind(config)}: make a configuration with maxtext.load_config(...).")
  if objective is not None and not isinstance(objective, Objective):
    raise ConfigError(f"objective is {_kind(objective)}: it must be an instance of a subclass of maxtext.Objective.")
  if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
    raise ConfigError(
      f"optimizer is {_kind(optimizer)}: it must be an optax.GradientTransformation, such as optax.adamw(1e-3)."
    )
  if not isinstance(callbacks, Sequence):
    raise ConfigError(f"callbacks is {_kind(callbacks)}: it must be a list of instances of maxtext.Callback.")
  for callback in callbacks:
    if not isinstance(callback, Callback):
      raise ConfigError(f"callbacks has {_kind(callback)}: each must be an instance of a subclass of maxtext.Callback.")
  as_batch_source(data)


def _kind(value: Any) -> str:
  return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
