"""What a run starts from and what it keeps: the restore order of its checkpoints, and the callback that saves them."""

import logging
import signal
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from maxtext.checkpoint.location import folder_of, is_there, steps_in
from maxtext.checkpoint.options import checkpoint_options, local_checkpoint_options, restore_options
from maxtext.configs import MaxTextConfig
from maxtext.data.batch import BatchWithState
from maxtext.distributed.interrupt import Interrupt
from maxtext.distributed.lease import Lease
from maxtext.distributed.multihost import broadcast_from_first
from maxtext.distributed.shared_folder import check_shared_folder
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.guard import LossGuard
from maxtext.training.program import Program
from maxtext.training.state import TrainState

_LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
  from maxtext.checkpoint.restore import Restored


class Kept:
  """The checkpoints of one run. Orbax is imported when there is something to read or to write.

  Args:
    config: the run.
    name: its name; a run of the same name goes on where it stopped.
    record: every key with its value and origin, kept with every step.
  """

  def __init__(self, config: MaxTextConfig, name: str, record: Mapping[str, Any]) -> None:
    self._config, self._record = config, record
    self._name = name
    self._folder = folder_of(config.base_output_directory, name)
    self._began = 0  # the step of its own that it goes on from
    self._lease = Lease(self._folder.parent, name)
    self._interrupt = Interrupt()

  def hold(self) -> None:
    """Sees that all hosts share the run's folder and that no other run is at work in it; without checkpoints nothing in
    it is worth that. `release` lets go."""
    if self._config.enable_checkpointing:
      check_shared_folder("base_output_directory", self._folder.parent)
      self._lease.acquire()

  def release(self) -> None:
    """Lets another run of this name begin."""
    self._lease.release()

  def asked_to_end(self) -> bool:
    """Whether all processes are to end now, with a checkpoint; all of them ask at the same time."""
    return self._config.enable_checkpointing and self._interrupt.should_stop()

  def start(self, program: Program) -> tuple[TrainState, Iterator[BatchWithState]]:
    """The first state and its data: of this run's latest good step, of a named state, of named parameters, or new.

    Local disks come first where they hold a step that is as late.
    """
    c = self._config
    if found := self._own(program):
      self._began = int(found.state.step)
    elif c.load_full_state_path:
      from maxtext.checkpoint.restore import load_state

      found = load_state(restore_options(c), "load_full_state_path", c.load_full_state_path, program.state)
    if found:
      _say(f"goes on from {found.folder}")
      return found.state, program.feed(found.position)
    state = program.init()
    if c.load_parameters_path:
      state = self._with_parameters(program, state)
    return state, program.feed()

  def saved_config(self, step: int) -> Mapping[str, Any]:
    """What a step of this run was saved with; empty where it is not there, or cannot be read."""
    from maxtext.checkpoint.record import Record

    try:
      return Record.read(self._folder / str(step)).config
    except Exception:  # damage, disks, object stores: it is only for a line
      return {}

  def callbacks(self, guard: LossGuard) -> list[Callback]:
    """What saves, if anything is to be; the guard says which state is not worth it."""
    c = self._config
    if not c.enable_checkpointing:
      return []
    from maxtext.checkpoint.writer import Writer
    from maxtext.training.callbacks.save import Save, SaveLocally

    if jax.process_count() > 1:  # JAX keeps a notice that comes while the step compiles; alone, that ends at once
      self._interrupt.listen(signal.SIGTERM)
    writer = Writer(checkpoint_options(c), self._folder, self._record, self._began, self._lease.check)
    saves: list[Callback] = [Save(writer, self._interrupt, guard, c.save_checkpoint_on_completion)]
    if c.enable_emergency_checkpoint:
      from maxtext.checkpoint.local import LocalWriter, local_folder

      options = local_checkpoint_options(c)
      saves.append(SaveLocally(LocalWriter(options, local_folder(options.directory, self._name)), guard))
    return saves

  def _own(self, program: Program) -> "Restored | None":
    """The latest good step of this run, which local disks may hold."""
    c = self._config
    if not c.enable_checkpointing:
      return None
    # Hosts remember names for a while, so process 0 decides.
    there = broadcast_from_first("there" if is_there(self._folder) else "") == "there"
    from maxtext.checkpoint.restore import resume, set_blamed_aside

    blamed = set_blamed_aside(self._folder) if there else None
    if c.enable_emergency_checkpoint:
      from maxtext.checkpoint.local import local_folder, resume_locally

      latest = int(broadcast_from_first(str(max(steps_in(self._folder), default=0))))
      if found := resume_locally(local_folder(c.local_checkpoint_directory, self._name), program.state, latest, blamed):
        return found
    return resume(restore_options(c), self._folder, program.state) if there else None

  def _with_parameters(self, program: Program, state: TrainState) -> TrainState:
    from maxtext.weights.from_hugging_face import load_weights

    found = load_weights(self._config, program.model, program.state.params | program.state.buffers)
    _say(f"starts with the parameters of {self._config.load_parameters_path}")
    return program.start_from(state, _taken(found, state.params), _taken(found, state.buffers))


def _taken(found: Mapping[str, jax.Array], there: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """What was found; a file of weights has nothing of what implementations of the matmul keep beside them."""
  return {name: found.get(name, value) for name, value in there.items()}


def _say(what: str) -> None:
  if jax.process_index() == 0:
    _LOG.info(f"maxtext: {what}")
