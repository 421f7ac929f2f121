"""The training loop: a step, a state and batches; everything else is a callback."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import jax

from maxtext.data.batch import BatchWithState
from maxtext.observe.phases import PhaseClock
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
  clock: PhaseClock | None = None,
) -> TrainState:
  """Runs the steps, until a callback or the data ends the run, and returns the last state.

  Metrics are read one step late, so that the devices never wait; only a callback that takes the state stops them.
  `flops_per_token` is one device's share, for the metrics of its speed; `peak_flops` is the most that it can do in a
  second, 0 where that is not known. `clock` learns what the time goes into; it is `compile` until the first step is
  dispatched.
  """
  timer, clock = _StepTimer(flops_per_token, peak_flops), clock or PhaseClock()
  finishes = _FinishTimes()
  pending: tuple[int, dict[str, Any], float] | None = None

  def report() -> None:
    if pending is not None:
      step, metrics, waited = pending
      _on_step(callbacks, step, timer.measure(metrics, waited, finishes.next()))

  step, position = steps.start, None
  with clock.within("data_wait"):
    fed, waited = _timed(feed)
  clock.enter("compile")
  try:
    while fed is not None and step < steps.stop:
      state, metrics = step_fn(state, fed.batch)
      clock.enter("step")
      finishes.watch(metrics)
      step, position, used = step + 1, fed.iterator_state, waited
      if step < steps.stop:
        fed, waited = _timed(feed)
        clock.move(finishes.seconds_since(waited), "step", "data_wait")
      report()
      pending = step, metrics, used
      if due := [callback for callback in callbacks if callback.due(step)]:
        measured, pending = timer.measure(metrics, used, finishes.next()), None
        ended = []
        for callback in due:
          with clock.within(callback.phase):
            ended.append(callback.on_update(step, state, position, measured))
        _on_step(callbacks, step, measured)
        timer.start()
        if any(ended):
          break
    report()
    if position is not None:
      for callback in callbacks:
        with clock.within(callback.phase):
          callback.on_end(step, state, position)
  finally:
    finishes.close()
  return state


class _FinishTimes:
  """When steps have finished, which a thread waits for: the loop may be busy with the next batch then, and a device
  whose next batch comes later is idle."""

  def __init__(self) -> None:
    self._steps: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    self._times: SimpleQueue[float] = SimpleQueue()
    self._dispatched = self._finished = 0
    self._finished_at = 0.0
    threading.Thread(target=self._wait, name="finish times", daemon=True).start()

  def watch(self, metrics: dict[str, Any]) -> None:
    """A step has been dispatched, and these will be its metrics."""
    self._dispatched += 1
    self._steps.put(metrics)

  def next(self) -> float:
    """When the first step finished, or will, that this was not asked of yet."""
    return self._times.get()

  def seconds_since(self, waited: float) -> float:
    """How much of the last `waited` seconds no step was running."""
    return min(waited, time.perf_counter() - self._finished_at) if self._finished == self._dispatched else 0.0

  def close(self) -> None:
    """Ends the thread, when the device is done."""
    self._steps.put(None)

  def _wait(self) -> None:
    while (metrics := self._steps.get()) is not None:
      with suppress(Exception):  # whoever reads the metrics reports it
        jax.block_until_ready(metrics)
      self._finished_at = time.perf_counter()
      self._finished += 1
      self._times.put(self._finished_at)


class _StepTimer:
  """The time from the end of one step to the end of the next, and the speed that follows from it."""

  def __init__(self, flops_per_token: float, peak_flops: float) -> None:
    self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
    self.start()

  def start(self) -> None:
    """Starts the time of the next step; work since the last step belongs to none."""
    self._last = time.perf_counter()

  def measure(self, device_metrics: dict[str, Any], data_wait: float, finished: float) -> dict[str, float]:
    """The metrics of a step that finished at that time."""
    metrics = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
    seconds, self._last = finished - self._last, finished
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
