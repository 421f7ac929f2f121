"""Saving checkpoints: by period, at the end of the run, and when a signal ends it."""

import logging
import signal
from collections.abc import Callable

import jax

from maxtext.checkpoint.local import LocalWriter
from maxtext.checkpoint.metadata import Criterion, Score
from maxtext.checkpoint.writer import Writer
from maxtext.configs.errors import RunError
from maxtext.data.batch import IteratorState
from maxtext.distributed.heartbeat import finished_step
from maxtext.distributed.interrupt import NOTICE_SECONDS, Interrupt
from maxtext.distributed.progress import report_progress
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.guard import LossGuard, nonfinite_metric
from maxtext.training.state import TrainState

_LOG = logging.getLogger(__name__)

Check = Callable[[int, TrainState], None]
"""Raises where the state of a step is not to be saved."""


class SaveLocally(Callback):
  """Saves this process's shards of the state on its own disk, by period."""

  phase = "checkpoint_save"

  def __init__(self, writer: LocalWriter, guard: LossGuard, check: Check) -> None:
    self._writer, self._guard, self._check = writer, guard, check

  def due(self, step: int) -> bool:
    self._writer.poll()
    return self._writer.due(step)

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    if not self._guard.ends(metrics):
      self._check(step, state)
      self._writer.save(step, state, position())
    return False

  def close(self) -> None:
    self._writer.close()


class Save(Callback):
  """Saves through a writer, and ends the run with a checkpoint when a signal asks for it.

  A state whose loss ends the run is not saved.
  """

  phase = "checkpoint_save"

  def __init__(
    self,
    writer: Writer,
    interrupt: Interrupt,
    guard: LossGuard,
    on_completion: bool,
    criterion: Criterion,
    check: Check,
  ) -> None:
    self._writer, self._interrupt, self._guard, self._on_completion = writer, interrupt, guard, on_completion
    self._criterion, self._check = criterion, check
    self._saves = self._ends = False
    self._step, self._told = 0, writer.last
    self._scores: dict[int, Score | None] = {}  # of the last step alone
    interrupt.on_notice_expired = self._say_late

  def due(self, step: int) -> bool:
    self._step = step
    finished_step(step)
    self._interrupt.listen(signal.SIGINT, signal.SIGTERM)
    self._writer.poll()
    self._tell()
    self._saves, self._ends = self._writer.due(step), self._interrupt.should_stop()
    return self._saves or self._ends

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    self.on_step(step, metrics)
    if self._saves and not self._guard.ends(metrics):
      self._check(step, state)
      self._writer.save(step, state, position(), self._scores.get(step))
    return self._ends

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    self._scores = {step: self._criterion.score(metrics.get(self._criterion.metric))}
    name = nonfinite_metric(metrics)
    if name and "skipped_steps" not in metrics:
      self._writer.blame(step, f"{name} {metrics[name]}")

  def on_end(self, step: int, state: TrainState, position: Callable[[], IteratorState]) -> None:
    asked = self._interrupt.signal if self._interrupt.should_stop() else None  # the same on all processes
    self._writer.wait()
    if (self._on_completion or asked) and self._writer.last != step:
      self._check(step, state)
      self._writer.save(step, state, position(), self._scores.get(step))
      self._writer.wait()
      if self._writer.last != step:
        raise RunError(f"the run ended at step {step}, and its last state could not be saved.")
    if asked is None:
      self._writer.trim()
    self._tell()
    if asked is not None and not jax.process_index():
      _LOG.info(f"maxtext: step {step} was saved {self._interrupt.seconds_since_signal:.1f} s after {asked.name}.")
    if asked == signal.SIGINT:
      raise KeyboardInterrupt
    if asked is not None:
      raise SystemExit(128 + asked)

  def close(self) -> None:
    self._interrupt.close()
    self._writer.close()

  def _tell(self) -> None:
    """A supervisor counts restarts anew after every step that is safely there."""
    last, before, self._told = self._writer.last, self._told, self._writer.last
    if last is not None and last != before and not jax.process_index():
      report_progress(last)

  def _say_late(self) -> None:
    """A preempted machine goes about now."""
    last = "none was saved by this process" if self._writer.last is None else f"step {self._writer.last} is safe"
    who = f" on process {jax.process_index()}" if jax.process_count() > 1 else ""
    _LOG.warning(
      f"maxtext: {NOTICE_SECONDS:g} s after the signal{who} step {self._step} is not saved yet, and {last}: whoever "
      f"ends this machine must wait longer (Kubernetes: terminationGracePeriodSeconds).",
    )
