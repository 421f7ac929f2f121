"""Traces of a few steps, for xprof or Perfetto."""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from maxtext.data.batch import IteratorState
from maxtext.training.callbacks.base import Callback
from maxtext.training.state import TrainState


class Profile(Callback):
  """Traces `steps` steps after the first `skip` have finished, so that compiling is not among them, and again every
  `period` steps where that is above 0.

  `cleanly` holds the devices at both ends, so that the trace has whole steps and nothing else. `options` are those of
  the device's own tracer.
  """

  def __init__(
    self, folder: Path, skip: int, steps: int, period: int, cleanly: bool, options: Mapping[str, int | bool]
  ) -> None:
    self._folder, self._first, self._steps, self._period, self._cleanly = folder, max(skip, 1), steps, period, cleanly
    self._tracing = False
    self._options = jax.profiler.ProfileOptions()
    self._options.advanced_configuration = dict(options)

  def due(self, step: int) -> bool:
    return self._cleanly and (self._begins(step) or self._begins(step - self._steps))

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    self._turn(step)
    return False

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    if not self._cleanly:
      self._turn(step)

  def close(self) -> None:
    if self._tracing:
      jax.profiler.stop_trace()
      self._tracing = False

  def _turn(self, step: int) -> None:
    if self._begins(step - self._steps):
      self.close()
    if self._begins(step):
      jax.profiler.start_trace(str(self._folder / f"after-step-{step}"), profiler_options=self._options)
      self._tracing = True

  def _begins(self, step: int) -> bool:
    past = step - self._first
    return past == 0 or (past > 0 and self._period > 0 and past % self._period == 0)
