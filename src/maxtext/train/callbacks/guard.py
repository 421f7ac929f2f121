"""Stopping a run whose loss is no longer a number."""

import math
from collections.abc import Mapping

from maxtext.configs.errors import RunError
from maxtext.train.callbacks.base import Callback


class LossGuard(Callback):
  """Looks at every finished step; sinks have its figures before the run ends."""

  def __init__(self, on_nan: bool, on_inf: bool) -> None:
    self._on_nan, self._on_inf = on_nan, on_inf

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    self.check(step, figures)

  def check(self, step: int, figures: Mapping[str, float]) -> None:
    """Ends the run if these figures say so."""
    loss = figures["loss"]
    if math.isnan(loss) and self._on_nan:
      raise RunError(f"the loss is not a number at step {step}; abort_on_nan_loss=false would go on.")
    if math.isinf(loss) and self._on_inf:
      raise RunError(f"the loss is infinite at step {step}; abort_on_inf_loss=false would go on.")
