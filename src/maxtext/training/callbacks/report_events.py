"""Telling a command what happens to the run."""

from maxtext.observe.events import EventHook
from maxtext.training.callbacks.base import Callback


class ReportEvents(Callback):
  """Tells the hook of every step; the hook looks for stalls."""

  def __init__(self, hook: EventHook) -> None:
    self._hook = hook

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    self._hook.finished(step)
