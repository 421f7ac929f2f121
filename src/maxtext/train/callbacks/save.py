"""Keeping the state of a run: by period, when it ends, and when it is told to end."""

import signal
from collections.abc import Callable

from maxtext.checkpoint.writer import Writer
from maxtext.configs.errors import RunError
from maxtext.data.batch import Position
from maxtext.mesh.interrupt import Interrupt
from maxtext.train.callbacks.base import Callback
from maxtext.train.callbacks.guard import LossGuard
from maxtext.train.state import TrainState


class Save(Callback):
  """Saves through a writer, and ends the run with a checkpoint when a signal asks for it.

  A state whose loss ends the run is not kept.
  """

  def __init__(self, writer: Writer, interrupt: Interrupt, guard: LossGuard, on_completion: bool) -> None:
    self._writer, self._interrupt, self._guard, self._on_completion = writer, interrupt, guard, on_completion
    self._saves = self._ends = False

  def due(self, step: int) -> bool:
    self._interrupt.listen()
    self._writer.poll()
    self._saves, self._ends = self._writer.due(step), self._interrupt.agreed(step)
    return self._saves or self._ends

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], Position], figures: dict[str, float]
  ) -> bool:
    self._guard.check(step, figures)
    if self._saves:
      self._writer.save(step, state, position())
    return self._ends

  def on_end(self, step: int, state: TrainState, position: Callable[[], Position]) -> None:
    asked = self._interrupt.signal
    self._writer.wait()
    if (self._on_completion or asked) and self._writer.last != step:
      self._writer.save(step, state, position())
      self._writer.wait()
      if self._writer.last != step:
        raise RunError(f"the run ended at step {step}, and its last state could not be saved.")
    if asked == signal.SIGINT:
      raise KeyboardInterrupt
    if asked is not None:
      raise SystemExit(128 + asked)

  def close(self) -> None:
    self._interrupt.close()
    self._writer.close()
