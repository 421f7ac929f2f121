"""A trace of a few steps, for xprof or Perfetto."""

from pathlib import Path

import jax

from maxtext.train.callbacks.base import Callback


class Profile(Callback):
  """Traces `steps` steps after the first `skip` have finished; compiling is not among them."""

  def __init__(self, folder: Path, skip: int, steps: int) -> None:
    self._folder, self._first, self._last = folder, max(skip, 1), max(skip, 1) + steps
    self._tracing = False

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    if step == self._first:
      jax.profiler.start_trace(str(self._folder))
      self._tracing = True
    elif step == self._last:
      self.close()

  def close(self) -> None:
    if self._tracing:
      jax.profiler.stop_trace()
      self._tracing = False
