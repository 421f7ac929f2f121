"""The training loop. It knows a step, a state and batches; all else hangs on it as callbacks."""

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
) -> TrainState:
  """Runs the steps, until a callback or the data ends the run, and returns the last state.

  Figures are read one step late, so that the devices never wait.

  `flops_per_token` is one device's share, for the figure of its speed.
  """
  pending: tuple[int, dict[str, Any], float] | None = None
  finished = time.perf_counter()

  def report() -> None:
    nonlocal finished
    if pending is None:
      return
    step, metrics, waited = pending
    figures = {name: float(value) for name, value in jax.device_get(metrics).items()}
    now = time.perf_counter()
    figures["seconds"], finished = now - finished, now
    figures["input_seconds"] = waited
    figures["tokens_per_second"] = figures["tokens"] / figures["seconds"]
    figures["tflops_per_device"] = figures["tokens_per_second"] * flops_per_token / 1e12
    for callback in callbacks:
      callback.on_step(step, figures)

  fed, waited = _timed(feed)
  for step in steps:
    if fed is None:
      break
    state, metrics = step_fn(state, fed.batch)
    ended = [callback.on_update(step + 1, state, fed.position) for callback in callbacks]
    used = waited
    if step + 1 < steps.stop and not any(ended):
      fed, waited = _timed(feed)
    report()
    pending = step + 1, metrics, used
    if any(ended):
      break
  report()
  for callback in callbacks:
    callback.on_end(state)
  return state


def _timed(feed: Iterator[Fed]) -> tuple[Fed | None, float]:
  start = time.perf_counter()
  return next(feed, None), time.perf_counter() - start
