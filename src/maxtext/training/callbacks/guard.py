"""Stopping a run whose loss or gradients are no longer finite."""

import math
from collections.abc import Mapping

from maxtext.configs.errors import RunError
from maxtext.training.callbacks.base import Callback

_WATCHED = {"loss": "the loss", "grad_norm": "the gradient norm"}


def nonfinite_metric(metrics: Mapping[str, float]) -> str:
  """Which of loss and gradient norm is not finite, by its name among the metrics; '' where both are.

  The loss is that of the parameters before the update: what the update does to them, the gradient norm says. A step
  that is left out for it (`skip_step_on_spikes`) leaves them as they were, so there only the loss counts.
  """
  watched = [name for name in _WATCHED if name == "loss" or "skipped_steps" not in metrics]
  return next((name for name in watched if not math.isfinite(metrics.get(name, 0.0))), "")


class LossGuard(Callback):
  """Ends the run at the first step that is not finite; metric writers have its metrics before that."""

  def __init__(self, on_nan: bool, on_inf: bool) -> None:
    self._on_nan, self._on_inf = on_nan, on_inf

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    if self.ends(metrics):
      name = nonfinite_metric(metrics)
      how, key = ("not a number", "nan") if math.isnan(metrics[name]) else ("infinite", "inf")
      raise RunError(f"{_WATCHED[name]} is {how} at step {step}; abort_on_{key}_loss=false would continue.")

  def ends(self, metrics: Mapping[str, float]) -> bool:
    """Whether the run ends with these metrics, and its state is not worth keeping."""
    name = nonfinite_metric(metrics)
    return bool(name) and (self._on_nan if math.isnan(metrics[name]) else self._on_inf)
