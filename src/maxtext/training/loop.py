"""The training loop: a step, a state and batches; everything else is a callback."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from maxtext.data.batch import BatchWithState
from maxtext.training.callbacks.base import Callback
from maxtext.training.state import TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


def run_loop(
  step_fn: Step,
  state: TrainState,
  feed: Iterator[BatchWithState],
  steps: range,
  callbacks: Sequence[Callback] = (),
  flops_per_token: float = 0.0,
  peak_flops: float = 0.0,
) -> TrainState:
  """Runs the steps, until a callback or the data ends the run, and returns the last state.

  Metrics are read one step late, so that the devices never wait; only a callback that takes the state stops them.
  `flops_per_token` is one device's share, for the metrics of its speed; `peak_flops` is the most that it can do in a
  second, 0 where that is not known.
  """
  timer = _StepTimer(flops_per_token, peak_flops)
  pending: tuple[int, dict[str, Any], float] | None = None

  def report() -> None:
    if pending is not None:
      step, metrics, waited = pending
      _on_step(callbacks, step, timer.measure(metrics, waited))

  step, position = steps.start, None
  fed, waited = _timed(feed)
  while fed is not None and step < steps.stop:
    state, metrics = step_fn(state, fed.batch)
    step, position, used = step + 1, fed.iterator_state, waited
    if step < steps.stop:
      fed, waited = _timed(feed)
    report()
    pending = step, metrics, used
    if due := [callback for callback in callbacks if callback.due(step)]:
      measured, pending = timer.measure(metrics, used), None
      ended = [callback.on_update(step, state, position, measured) for callback in due]
      _on_step(callbacks, step, measured)
      timer.start()
      if any(ended):
        break
  report()
  if position is not None:
    for callback in callbacks:
      callback.on_end(step, state, position)
  return state


class _StepTimer:
  """The time from the end of one step to the end of the next, and the speed that follows from it."""

  def __init__(self, flops_per_token: float, peak_flops: float) -> None:
    self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
    self.start()

  def start(self) -> None:
    """Starts the time of the next step; work since the last step belongs to none."""
    self._last = time.perf_counter()

  def measure(self, device_metrics: dict[str, Any], data_wait: float) -> dict[str, float]:
    """Waits for a step, and returns its metrics."""
    metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
    before = self._last
    self.start()
    seconds = self._last - before
    flops = metrics["tokens"] / seconds * self._flops_per_token
    metrics |= {
      "step_time_seconds": seconds,
      "data_wait_seconds": data_wait,
      "tokens_per_second": metrics["tokens"] / seconds,
      "tflops_per_device": flops / 1e12,
    }
    return metrics | {"mfu": flops / self._peak_flops} if self._peak_flops else metrics


def _on_step(callbacks: Sequence[Callback], step: int, metrics: dict[str, float]) -> None:
  for callback in callbacks:
    callback.on_step(step, metrics)


def _timed(feed: Iterator[BatchWithState]) -> tuple[BatchWithState | None, float]:
  start = time.perf_counter()
  return next(feed, None), time.perf_counter() - start
