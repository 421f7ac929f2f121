"""The form of a callback."""

from collections.abc import Callable

from maxtext.data.batch import Position
from maxtext.train.state import TrainState


class Callback:
  """Called by the loop on every process; override what is needed."""

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    """The step-th step (from 1) has finished, and these are its figures."""

  def on_update(self, step: int, state: TrainState, position: Callable[[], Position]) -> bool:
    """The step-th update (from 1) is under way and gives this state; `position()` is where the data stands after it.

    Read or copy the arrays before returning: the next step takes them over. True ends the run after this step; all
    processes must answer alike.
    """
    return False

  def on_end(self, state: TrainState) -> None:
    """The last step has finished."""

  def close(self) -> None:
    """Called once, however the run ends."""
