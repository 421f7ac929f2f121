"""Asynchronous checkpointing with Orbax's manager: when a save is due, and what happens when one fails."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from maxtext.checkpoint.best import best_step, scores_in
from maxtext.checkpoint.files import contents, handlers
from maxtext.checkpoint.location import failures, unfinished_in
from maxtext.checkpoint.metadata import Base, NotFiniteError, Score
from maxtext.checkpoint.notes import NonfiniteNote
from maxtext.checkpoint.options import CheckpointOptions
from maxtext.checkpoint.quiet import quiet_failed_saves
from maxtext.checkpoint.storage import reason
from maxtext.checkpoint.tree import named
from maxtext.distributed.lease import LeaseLostError
from maxtext.distributed.multihost import broadcast_from_first
from maxtext.observe.metric_writers import warn
from maxtext.storage.atomic import sync, sync_tree

_LEAST = 2  # steps that are there while a run goes on: of the latest it is not known yet whether it leads anywhere
_LOUD = 3  # saves that failed in a row, from which on the run says more


class Writer:
  """The steps of one run, under `folder`. Every process calls every method at the same step.

  A state that is not finite is never committed: that is a save that failed. Beside the latest steps, the one with the
  best score is kept, until a better one is safely there.

  Args:
    options: when it saves, and what it keeps.
    folder: its folder of checkpoints.
    keys: every key with its value and origin.
    began: the step that the run resumes from; 0 is a new run.
    fence: asked before a step counts; raises `LeaseLostError` where the folder is another run's by now.
    base: the frozen weights of the state, which are not saved; None saves everything.
  """

  def __init__(
    self,
    options: CheckpointOptions,
    folder: epath.Path,
    keys: Mapping[str, Any],
    began: int = 0,
    fence: Callable[[], None] = lambda: None,
    base: Base | None = None,
  ) -> None:
    self._options, self._folder, self._keys, self._began, self._fence = options, folder, keys, began, fence
    self._base = base
    self._saving: int | None = None
    self._failures = 0  # since the last save that succeeded
    self._scores: dict[int, Score] | None = {}  # of steps; None where those of before cannot be read
    self._noted: int | None = None  # the first step of which something was not finite
    self.last: int | None = None  # the last step that is safely there
    quiet_failed_saves()

  def due(self, step: int) -> bool:
    """Whether this step is to be saved, by period or because the last save has ended."""
    if self._options.continuous:
      return self._manager.should_save(step)
    return step % self._options.period == 0

  def save(self, step: int, state: Any, position: Mapping[str, Any], score: Score | None = None) -> None:
    """Starts a save; the arrays may be overwritten when this returns. A failure is reported and the run continues.

    `score` is that of the evaluation of this step, if there was one.
    """
    self.wait()
    apart = {} if self._base is None else self._base.stored_names
    kept = {name: array for name, array in named(state).items() if name not in apart}
    arrays = named({**kept, "data": dict(position)})
    args = contents(self._options.storage, arrays, step, 0, self._keys, finite=True, score=score, base=self._base)
    try:
      manager = self._manager
      if score is not None and self._scores is not None:
        self._scores[step] = score
      manager.save(step, args=args, force=True)
    except failures() as error:
      self._failed(step, error)
      return
    self._saving = step
    if not self._options.asynchronous:
      self.wait()

  def poll(self) -> None:
    """Looks whether a save in the background has ended, and reports how."""
    if self._saving is not None and not self._manager.is_saving_in_progress():
      self.wait()

  def wait(self) -> None:
    """Waits for the save in the background, if any."""
    if self._saving is None:
      return
    step, self._saving = self._saving, None
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except failures() as error:
      self._failed(step, error)
    else:
      self._succeeded(step)

  def blame(self, step: int, what: str) -> None:
    """Notes that something of a step was not finite, and so the state before it leads nowhere."""
    self._note(step, what, blamed=step - 1)

  def trim(self) -> None:
    """Waits, and removes what is more than the run keeps, when a run has come to a good end."""
    self.wait()
    most = self._options.keep
    if most is None or self._noted is not None or "_manager" not in vars(self):
      return
    self._fence()
    for step in sorted(self.superfluous(self._manager.all_steps(), most)):
      with suppress(*failures()):
        self._manager.delete(step)

  def superfluous(self, steps: Sequence[int], most: int) -> set[int]:
    """The steps that are neither among the latest `most` nor the best."""
    if self._scores is None:
      return set()
    best = best_step({step: score for step, score in self._scores.items() if step in steps})
    return {*sorted(steps)[:-most]} - {best}

  def close(self) -> None:
    """Waits, and lets go of everything."""
    self.wait()
    if "_manager" in vars(self):
      self._manager.close()

  @cached_property
  def _manager(self) -> ocp.CheckpointManager:
    own, most = self._options, self._options.keep
    self._scores = {} if most is None else self._read_scores()
    options = ocp.CheckpointManagerOptions(
      save_decision_policy=policies.ContinuousCheckpointingPolicy(),  # asked only by `due`
      preservation_policy=policies.LatestN() if most is None else _LatestAndBest(self, max(most, _LEAST)),
      enable_async_checkpointing=own.asynchronous,
      todelete_subdir=own.todelete_subdir,
      temporary_path_class=None if "://" in str(self._folder) else _DurableRename,
    )
    found = handlers(own.storage, self._fence)
    return _Manager(self._folder, options=options, item_names=tuple(found), item_handlers=found)

  def _read_scores(self) -> dict[int, Score] | None:
    """The scores of the steps that are there, as process 0 reads them; None where storage does not answer, and then
    nothing is removed, since the best is not known."""
    found: dict[int, Any] | None = None
    if jax.process_index() == 0:
      try:
        found = {step: {"score": asdict(score)} for step, score in scores_in(self._folder).items()}
      except failures() as error:
        warn(f"no checkpoint is removed, since evaluations cannot be read: {reason(error)}.")
    bodies = json.loads(broadcast_from_first(json.dumps(found)))
    if bodies is None:
      return None
    return {int(step): score for step, body in bodies.items() if (score := Score.parse(body)) is not None}

  def _succeeded(self, step: int) -> None:
    self.last, self._failures = step, 0
    if self._noted is None or step >= self._noted:
      self._noted = None
      if jax.process_index() == 0:
        with suppress(*failures()):
          NonfiniteNote.remove(self._folder)

  def _note(self, step: int, what: str, blamed: int | None) -> None:
    """The first of them, until a later step is safely there."""
    if self._noted is not None:
      return
    self._noted = step
    if jax.process_index() == 0:
      try:
        self._fence()
        NonfiniteNote(step, what, blamed, self._began).write(self._folder)
      except failures() as error:
        warn(f"{self._folder} cannot be written: {reason(error)}.")

  def _failed(self, step: int, error: BaseException) -> None:
    """Says so, frees what the half-written step holds, and forgets what Orbax had planned to remove for it."""
    if isinstance(error, LeaseLostError):  # what is there belongs to the run that took over
      raise error
    kept = f"the last good one is step {self.last}" if self.last is not None else "there is none yet from this process"
    self._failures += 1
    if jax.process_index() == 0:
      warn(f"the checkpoint of step {step} failed: {reason(error)}; {kept}.")
      if self._failures >= _LOUD:
        since = self._began if self.last is None else self.last
        warn(
          f"WARNING: {self._failures} checkpoints in a row have failed. Whatever ends this run now costs "
          f"{step - since} steps; see to {self._folder}.",
          on_stderr=True,
        )
      self._free(step)
    self._manager.reload()
    if isinstance(error, NotFiniteError):
      self._note(step, reason(error), blamed=None)

  def _free(self, step: int) -> None:
    """Removes a half-written step. Other threads of the save may still be at it, so this looks until all is quiet."""
    deadline, quiet = time.monotonic() + 10, 0
    while quiet < 3 and time.monotonic() < deadline:
      found = [path for path in unfinished_in(self._folder) if path.name.partition(".")[0] == str(step)]
      quiet = 0 if found else quiet + 1
      for path in found:
        with suppress(OSError):
          path.rmtree(missing_ok=True)
      time.sleep(0.05)


@dataclass
class _LatestAndBest(policies.PreservationPolicy):
  """Orbax asks when a save begins, with the step that is saved, and removes when that is committed."""

  writer: Writer
  most: int

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
    removed = self.writer.superfluous([checkpoint.step for checkpoint in checkpoints], self.most)
    return [checkpoint.step not in removed for checkpoint in checkpoints]


class _Manager(ocp.CheckpointManager):
  """Orbax's, without its look for preemption notices: JAX's service is to be asked with one count, `Interrupt`'s."""

  def reached_preemption(self, step: int) -> bool:
    return False


class _DurableRename(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """Orbax's commit by renaming a folder, of which nothing is left in memory alone before and after.

  TensorStore syncs the files of arrays itself, on the process that writes them. Older steps are removed after this.
  """

  async def finalize(self) -> None:
    await asyncio.to_thread(sync_tree, self.get())
    await super().finalize()
    final = self.get_final()
    for path in (*(path for path in final.iterdir() if path.is_file()), final, final.parent):
      await asyncio.to_thread(sync, path)  # Orbax has added the time of the commit
