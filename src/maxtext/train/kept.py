"""What a run starts from and what it keeps: the restore order of its checkpoints, and the callback that saves them."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from maxtext.checkpoint.location import folder_of, steps_in
from maxtext.configs import MaxTextConfig
from maxtext.data.batch import Fed
from maxtext.mesh.interrupt import Interrupt
from maxtext.mesh.multihost import from_first
from maxtext.train.callbacks.base import Callback
from maxtext.train.callbacks.guard import LossGuard
from maxtext.train.program import Program
from maxtext.train.state import TrainState


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

  def start(self, program: Program) -> tuple[TrainState, Iterator[Fed]]:
    """The first state and its data: of this run's latest good step, of a named state, of named parameters, or new.

    Local disks come first where they hold a step that is as late.
    """
    c = self._config
    if c.enable_emergency_checkpoint:
      from maxtext.checkpoint.local import local_folder, resume_locally

      latest = max(steps_in(self._folder), default=0)
      if found := resume_locally(local_folder(c, self._name), program.state, at_least=int(from_first(str(latest)))):
        _say(f"goes on from {found.folder}")
        return found.state, program.feed(found.position)
    if c.enable_checkpointing and self._folder.exists():
      from maxtext.checkpoint.restore import resume

      if found := resume(c, self._folder, program.state):
        _say(f"goes on from {found.folder}")
        return found.state, program.feed(found.position)
    if c.load_full_state_path:
      from maxtext.checkpoint.restore import load_state

      found = load_state(c, "load_full_state_path", c.load_full_state_path, program.state)
      _say(f"goes on from {found.folder}")
      return found.state, program.feed(found.position)
    state = program.init()
    if c.load_parameters_path:
      state = self._with_parameters(program, state)
    return state, program.feed()

  def callbacks(self, guard: LossGuard) -> list[Callback]:
    """What saves, if anything is to be; the guard says which state is not worth it."""
    c = self._config
    if not c.enable_checkpointing:
      return []
    from maxtext.checkpoint.writer import Writer
    from maxtext.train.callbacks.save import Save, SaveLocally

    writer = Writer(c, self._folder, self._record)
    saves: list[Callback] = [Save(writer, Interrupt(), guard, c.save_checkpoint_on_completion)]
    if c.enable_emergency_checkpoint:
      from maxtext.checkpoint.local import LocalWriter, local_folder

      saves.append(SaveLocally(LocalWriter(c, local_folder(c, self._name)), guard))
    return saves

  def _with_parameters(self, program: Program, state: TrainState) -> TrainState:
    from maxtext.weights.incoming import load_named

    found = load_named(self._config, program.model, program.state.params | program.state.buffers)
    _say(f"starts with the parameters of {self._config.load_parameters_path}")
    return program.start_from(state, _taken(found, state.params), _taken(found, state.buffers))


def _taken(found: Mapping[str, jax.Array], there: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """What was found; a file of weights has nothing of what hooks keep beside them."""
  return {name: found.get(name, value) for name, value in there.items()}


def _say(what: str) -> None:
  if jax.process_index() == 0:
    print(f"maxtext: {what}", flush=True)
