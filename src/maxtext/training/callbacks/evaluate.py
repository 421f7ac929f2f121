"""Measuring the loss on data that is not trained on."""

import logging
import time
from collections.abc import Callable

import jax

from maxtext.data.batch import IteratorState
from maxtext.status_line import show_phase
from maxtext.training.callbacks.base import Callback
from maxtext.training.state import TrainState

_LOG = logging.getLogger(__name__)


class Evaluate(Callback):
  """Evaluates every `interval` steps and adds what it finds to that step's metrics, with the prefix `eval_`.

  The run ends when the loss comes down to `target`; 0 is no target. An evaluation that returns None was stopped by a
  signal, and the run ends with it.
  """

  phase = "evaluation"

  def __init__(self, evaluate: Callable[[TrainState], dict[str, float] | None], interval: int, target: float) -> None:
    self._evaluate, self._interval, self._target = evaluate, interval, target

  def due(self, step: int) -> bool:
    return step % self._interval == 0

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    start = time.perf_counter()
    show_phase(f"evaluating step {step}")
    found = self._evaluate(state)
    if found is None:
      return True
    metrics |= {f"eval_{name}": value for name, value in found.items()}
    metrics["eval_seconds"] = time.perf_counter() - start
    reached = found["loss"] <= self._target
    if reached and not jax.process_index():
      _LOG.info(f"target_eval_loss={self._target} is reached at step {step}: ending.")
    return reached
