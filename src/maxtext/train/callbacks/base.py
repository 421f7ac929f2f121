"""The form of a callback."""

from maxtext.train.state import TrainState


class Callback:
  """Called by the loop on every process; override what is needed."""

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    """The step-th step (from 1) has finished, and these are its figures."""

  def on_end(self, state: TrainState) -> None:
    """The last step has finished."""

  def close(self) -> None:
    """Called once, however the run ends."""
