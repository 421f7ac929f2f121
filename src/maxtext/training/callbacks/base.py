"""The interface of a callback."""

from collections.abc import Callable
from typing import ClassVar

from maxtext.data.batch import IteratorState
from maxtext.observe.phases import Phase
from maxtext.training.state import TrainState


class Callback:
  """Called by the loop on every process; override what is needed. Steps count from 1.

  Attributes:
    evaluates: called before what saves, so that what it adds to the metrics of a step is saved with that step.
    phase: what the time counts as that it takes while the devices wait.
  """

  evaluates: ClassVar[bool] = False
  phase: ClassVar[Phase] = "other"

  def due(self, step: int) -> bool:
    """Whether this callback takes the state of a step: the devices wait while it does. All processes answer alike."""
    return False

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    """A step that was due has finished with this state and these metrics, which may be added to; `position()` is where
    the data stands after it.

    Read or copy the arrays before returning: the next step takes them over. True ends the run after this step; all
    processes answer alike.
    """
    return False

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    """A step has finished, and these are its metrics."""

  def on_end(self, step: int, state: TrainState, position: Callable[[], IteratorState]) -> None:
    """The run has come to its end after this step."""

  def close(self) -> None:
    """Called once, however the run ends."""
