"""Training. `maxtext.train` is this package and, called with a configuration, trains it."""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    from maxtext.train.run import train

    return train(*args, **kwargs)


# `maxtext.train(config)` is the public call and `python -m maxtext.train` the command: one name must be both.
sys.modules[__name__].__class__ = _CallableModule
