"""Saving a run's steps with Orbax's manager: when one is due, in the background, and what happens when one fails."""

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from maxtext.checkpoint.files import contents, handlers, reason
from maxtext.checkpoint.location import failures, unfinished_in
from maxtext.checkpoint.tree import named
from maxtext.configs import MaxTextConfig


class Writer:
  """The steps of one run, under `folder`. Every process calls every method at the same step."""

  def __init__(self, config: MaxTextConfig, folder: epath.Path, keys: Mapping[str, Any]) -> None:
    self._config, self._folder, self._keys = config, folder, keys
    self._saving: int | None = None
    self.last: int | None = None  # the last step that is safely there

  def due(self, step: int) -> bool:
    """Whether this step is to be saved, by period or because the last save has ended."""
    if self._config.enable_continuous_checkpointing:
      return self._manager.should_save(step)
    return step % self._config.checkpoint_period == 0

  def save(self, step: int, state: Any, position: Mapping[str, Any]) -> None:
    """Starts a save; the arrays may be overwritten when this returns. A failure is reported and the run goes on."""
    self.wait()
    arrays = named({**named(state), "data": dict(position)})
    try:
      self._manager.save(step, args=contents(self._config, arrays, step, 0, self._keys), force=True)
    except failures() as error:
      self._failed(step, error)
      return
    self._saving = step
    if not self._config.async_checkpointing:
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
      self.last = step

  def close(self) -> None:
    """Waits, and lets go of everything."""
    self.wait()
    if "_manager" in vars(self):
      self._manager.close()

  @cached_property
  def _manager(self) -> ocp.CheckpointManager:
    c = self._config
    options = ocp.CheckpointManagerOptions(
      save_decision_policy=policies.ContinuousCheckpointingPolicy(),  # asked only by `due`
      preservation_policy=policies.LatestN(c.max_num_checkpoints_to_keep),
      enable_async_checkpointing=c.async_checkpointing,
      todelete_subdir=c.checkpoint_todelete_subdir,
    )
    found = handlers(c)
    return ocp.CheckpointManager(self._folder, options=options, item_names=tuple(found), item_handlers=found)

  def _failed(self, step: int, error: BaseException) -> None:
    """Says so, frees what the half-written step holds, and forgets what Orbax had planned to remove for it."""
    kept = f"the last good one is step {self.last}" if self.last is not None else "there is none yet from this process"
    if jax.process_index() == 0:
      print(f"maxtext: the checkpoint of step {step} failed: {reason(error)}; {kept}.", flush=True)
      self._free(step)
    self._manager.reload()

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
