"""Resuming a run: the restore order of its checkpoints, and the callbacks that save them."""

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from maxtext.checkpoint.location import folder_of, is_there, steps_in
from maxtext.checkpoint.metadata import Base, CheckpointMetadata, CorruptCheckpointError, Criterion
from maxtext.checkpoint.options import checkpoint_options, local_checkpoint_options, restore_options
from maxtext.configs import MaxTextConfig
from maxtext.data.batch import BatchWithState
from maxtext.distributed.interrupt import Interrupt
from maxtext.distributed.lease import Lease
from maxtext.distributed.multihost import broadcast_from_first
from maxtext.distributed.shared_folder import check_shared_folder
from maxtext.models.model import Params
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.guard import LossGuard
from maxtext.training.frozen import frozen_params
from maxtext.training.program import Program
from maxtext.training.reference import attach_reference
from maxtext.training.state import TrainState

_LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
  from maxtext.checkpoint.restore import LoadBase, Restored


class RunCheckpoints:
  """The checkpoints of one run. Orbax is imported when there is something to read or to write.

  Args:
    config: the run.
    name: its name; a run of the same name resumes where it stopped.
    config_record: every key with its value and origin, saved with every step.
  """

  def __init__(self, config: MaxTextConfig, name: str, config_record: Mapping[str, Any]) -> None:
    self._config, self._config_record = config, config_record
    self._name = name
    self._folder = folder_of(config.base_output_directory, name)
    self._resumed_from = 0  # a step of its own; 0 is none
    self._base: Base | None = None  # what its checkpoints do not hold
    self._lease = Lease(self._folder.parent, name)
    self._interrupt = Interrupt()

  def acquire(self) -> None:
    """Checks that all hosts share the run's folder and takes its lease, so that no other run writes to it, until
    `release`. Without checkpointing it does nothing."""
    if self._config.enable_checkpointing:
      check_shared_folder("base_output_directory", self._folder.parent)
      self._lease.acquire()

  def release(self) -> None:
    """Gives the lease back, so that another run of this name can begin."""
    self._lease.release()

  def has_saved(self) -> bool:
    """Whether there is a step of this run to resume from; false where storage does not answer."""
    with suppress(Exception):
      return self._config.enable_checkpointing and bool(steps_in(self._folder))
    return False

  @property
  def resumed(self) -> bool:
    """Whether the state to start from is a step of this run."""
    return self._resumed_from > 0

  def stop_requested(self) -> bool:
    """Whether a signal asks all processes to end now, with a checkpoint; all of them call it at the same time."""
    return self._config.enable_checkpointing and self._interrupt.should_stop()

  def restore_or_init(self, program: Program) -> tuple[TrainState, Iterator[BatchWithState]]:
    """The state to start from, and the data from there on.

    The order is: this run's latest good checkpoint, on local disks where they hold a step that is as late;
    `load_full_state_path`; a new state with the parameters of `load_parameters_path`; a new state.
    """
    c = self._config
    if found := self._latest_checkpoint(program):
      self._resumed_from = int(found.state.step)
    elif c.load_full_state_path:
      from maxtext.checkpoint.restore import load_state

      key, path = "load_full_state_path", c.load_full_state_path
      found = load_state(restore_options(c), key, path, program.state, self._load_base(program))
      self._base = self._describe_base(program, found.state, path)
    if found:
      _log(f"resuming from {found.folder}")
      if self._resumed_from:
        self._attach_reference(program, lambda: frozen_params(c, program.model), is_new=False)
      else:
        self._attach_reference(program, lambda: found.state.params | found.state.buffers)
      return found.state, program.feed(found.position)
    state = program.init()
    if c.load_parameters_path:
      state = self._load_parameters(program, state)
      self._base = self._describe_base(program, state, c.load_parameters_path)
    self._attach_reference(program, lambda: state.params | state.buffers)
    return state, program.feed()

  def saved_config(self, step: int) -> Mapping[str, Any]:
    """The configuration that a step of this run was saved with; empty where it is missing or cannot be read."""
    try:
      return CheckpointMetadata.read(self._folder / str(step)).config
    except Exception:  # damage, disks, object stores: it is only for a line
      return {}

  def distrust(self, step: int, what: str, proven: int) -> None:
    """Notes that something was found to be corrupt at a step, so that the next start takes no step after the last one
    that was proven right. A failure is reported; all processes call it."""
    if self._config.enable_checkpointing and jax.process_index() == 0:
      from maxtext.checkpoint.notes import CorruptionNote

      try:
        self._lease.check()
        CorruptionNote(step, what, proven).write(self._folder)
      except Exception as error:  # disks, object stores: what is found is said anyway
        _LOG.warning(f"maxtext: {self._folder} cannot be written, so later checkpoints than {proven} stay: {error}")

  def callbacks(
    self, guard: LossGuard, criterion: Criterion, check: Callable[[int, TrainState], None]
  ) -> list[Callback]:
    """The callbacks that save, if checkpointing is enabled; a state that the guard rejects is not saved, and the best
    by the criterion is kept. `check` is asked before every save, and raises where the state is not to be saved."""
    c = self._config
    if not c.enable_checkpointing:
      return []
    from maxtext.checkpoint.writer import Writer
    from maxtext.training.callbacks.save import Save, SaveLocally

    if jax.process_count() > 1:  # JAX keeps a notice that comes while the step compiles; alone, that ends at once
      self._interrupt.listen(signal.SIGTERM)
    writer = Writer(
      checkpoint_options(c), self._folder, self._config_record, self._resumed_from, self._lease.check, self._base
    )
    saves: list[Callback] = [Save(writer, self._interrupt, guard, c.save_checkpoint_on_completion, criterion, check)]
    if c.enable_emergency_checkpoint:
      from maxtext.checkpoint.local import LocalWriter, local_folder

      options = local_checkpoint_options(c)
      saves.append(SaveLocally(LocalWriter(options, local_folder(options.directory, self._name)), guard, check))
    return saves

  def _latest_checkpoint(self, program: Program) -> "Restored | None":
    """The latest good step of this run, which local disks may hold."""
    c = self._config
    if not c.enable_checkpointing:
      return None
    # Hosts cache folder listings for a while, so process 0 decides.
    there = broadcast_from_first("there" if is_there(self._folder) else "") == "there"
    from maxtext.checkpoint.restore import forget_corruption, quarantine_blamed, quarantine_unproven, resume

    proven = quarantine_unproven(self._folder) if there else None
    blamed = quarantine_blamed(self._folder) if there else None
    found = None
    if c.enable_emergency_checkpoint:
      from maxtext.checkpoint.local import local_folder, resume_locally

      latest = int(broadcast_from_first(str(max(steps_in(self._folder), default=0))))
      folder = local_folder(c.local_checkpoint_directory, self._name)
      found = resume_locally(folder, program.state, latest, blamed, proven)
    if proven is not None:
      forget_corruption(self._folder)
    if found:
      # Local disks hold everything. Where no checkpoint names the base yet, none of this start does.
      self._base = self._saved_base(latest)
      return found
    if not there:
      return None
    found = resume(restore_options(c), self._folder, program.state, self._load_base(program))
    if found and found.base:
      from maxtext.weights.base import find_base

      self._base = find_base(c, found.folder, found.base)
    return found

  def _saved_base(self, step: int) -> Base | None:
    with suppress(CorruptCheckpointError):
      return CheckpointMetadata.read(self._folder / str(step)).base if step else None
    return None

  def _load_base(self, program: Program) -> "LoadBase":
    from maxtext.weights.base import load_base

    return partial(load_base, self._config, program.model)

  def _describe_base(self, program: Program, state: TrainState, path: str) -> Base | None:
    """The frozen weights of a new run of adapters, which came from a folder; None where checkpoints hold everything.

    They do where the weights were initialised here: another version of JAX or another kind of device may make other
    bits from the seed, and no folder has them. They do too where some weights come from a teacher, and with DiLoCo,
    whose replicas have all of them.
    """
    c = self._config
    if not (c.lora_rank and c.enable_checkpointing) or c.distill_weights_copy_map or c.enable_diloco:
      return None
    from maxtext.weights.base import describe_base

    base = {name: state.buffers[name] for name in program.model.weight_names if name in state.buffers}
    return describe_base(path, base)

  def _attach_reference(self, program: Program, initial: Callable[[], Params], is_new: bool = True) -> None:
    shared = self._config.reference_log_probs_path
    own = str(self._folder.parent / "reference_log_probs")
    attach_reference(program, shared or own, initial, is_new=is_new, is_shared=bool(shared))

  def _load_parameters(self, program: Program, state: TrainState) -> TrainState:
    from maxtext.weights.load import load_weights

    found = load_weights(self._config, program.model, program.state.params | program.state.buffers)
    _log(f"starts with the parameters of {self._config.load_parameters_path}")
    return program.start_from(state, _merge(found, state.params), _merge(found, state.buffers))


def _merge(loaded: Mapping[str, jax.Array], initial: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Loaded arrays in place of initial ones; what implementations of the matmul keep beside weights is in no file."""
  return {name: loaded.get(name, value) for name, value in initial.items()}


def _log(what: str) -> None:
  if jax.process_index() == 0:
    _LOG.info(f"maxtext: {what}")
