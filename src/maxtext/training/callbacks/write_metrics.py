"""Writing the metrics of finished steps."""

from collections.abc import Sequence

from maxtext.observe.metric_writers import MetricWriter
from maxtext.training.callbacks.base import Callback


class WriteMetrics(Callback):
  """Gives the metrics of every step to every metric writer."""

  def __init__(self, writers: Sequence[MetricWriter]) -> None:
    self._writers = writers

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    for writer in self._writers:
      writer.write(step, metrics)

  def close(self) -> None:
    for writer in self._writers:
      writer.close()
