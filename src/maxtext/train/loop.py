"""The training loop. It knows a step, a state and a feed; all else hangs on it as callbacks."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from maxtext.data.batch import Batch, Fed
from maxtext.train.callbacks.base import Callback
from maxtext.train.state import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]


def run_loop(
  step_fn: Step,
  state: TrainState,
  feed: Iterator[Fed],
  steps: range,
  callbacks: Sequence[Callback] = (),
  flops_per_token: float = 0.0,
  peak_flops: float = 0.0,
) -> TrainState:
  """Runs the steps, until a callback or the data ends the run, and returns the last state.

  Figures are read one step late, so that the devices never wait; only a callback that takes the state stops them.
  `flops_per_token` is one device's share, for the figure of its speed; `peak_flops` what it could do in a second, 0
  where that is not known.
  """
  reports = _Reports(callbacks, flops_per_token, peak_flops)
  fed, waited = _timed(feed)
  for step in steps:
    if fed is None:
      break
    state, metrics = step_fn(state, fed.batch)
    position, used = fed.position, waited
    if step + 1 < steps.stop:
      fed, waited = _timed(feed)
    reports.send()
    reports.expect(step + 1, metrics, used)
    if due := [callback for callback in callbacks if callback.due(step + 1)]:
      jax.block_until_ready(metrics)
      finished = time.perf_counter()
      ended = [callback.on_update(step + 1, state, position) for callback in due]
      reports.send(finished)
      if any(ended):
        break
  reports.send()
  for callback in callbacks:
    callback.on_end(state)
  return state


class _Reports:
  """The figures of a step, from when it is under way to when it has finished."""

  def __init__(self, callbacks: Sequence[Callback], flops_per_token: float, peak_flops: float) -> None:
    self._callbacks, self._flops_per_token, self._peak_flops = callbacks, flops_per_token, peak_flops
    self._expected: tuple[int, dict[str, Any], float] | None = None
    self._last = time.perf_counter()

  def expect(self, step: int, metrics: dict[str, Any], waited: float) -> None:
    self._expected = step, metrics, waited

  def send(self, finished: float | None = None) -> None:
    """Waits for the expected step, if any. `finished` is given where more than the step was done since."""
    if self._expected is None:
      return
    (step, metrics, waited), self._expected = self._expected, None
    figures = {name: float(value) for name, value in jax.device_get(metrics).items()}
    now = time.perf_counter()
    seconds, self._last = (finished or now) - self._last, now
    speed = figures["tokens"] / seconds
    flops = speed * self._flops_per_token
    figures |= {
      "seconds": seconds,
      "input_seconds": waited,
      "tokens_per_second": speed,
      "tflops_per_device": flops / 1e12,
    }
    if self._peak_flops:
      figures["mfu"] = flops / self._peak_flops
    for callback in self._callbacks:
      callback.on_step(step, figures)


def _timed(feed: Iterator[Fed]) -> tuple[Fed | None, float]:
  start = time.perf_counter()
  return next(feed, None), time.perf_counter() - start
