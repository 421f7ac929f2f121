"""Figures of finished steps, to the sinks that were asked for."""

from collections.abc import Sequence

from maxtext.observe.metric_writers import MetricWriter
from maxtext.training.callbacks.base import Callback


class Report(Callback):
  """Hands every step's figures to every sink."""

  def __init__(self, sinks: Sequence[MetricWriter]) -> None:
    self._sinks = sinks

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    for sink in self._sinks:
      sink.write(step, figures)

  def close(self) -> None:
    for sink in self._sinks:
      sink.close()
