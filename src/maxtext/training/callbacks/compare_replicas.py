"""Comparing the replicas of the state, which are equal unless a device is wrong."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.checkpoint.tree import named
from maxtext.configs.errors import plural
from maxtext.data.batch import IteratorState
from maxtext.training.callbacks.base import Callback
from maxtext.training.corruption import Distrust, end_run
from maxtext.training.device_checksums import DeviceChecksums, compare_replicas, first_holders
from maxtext.training.state import TrainState


class CompareReplicas(Callback):
  """Ends the run when two devices that hold the same part of the state hold other bits.

  Args:
    mesh: of the state.
    abstract: the state's shapes and shardings.
    period: steps from one comparison to the next.
    proven: the step that the run begins with.
    distrust: leaves a note for the next start.
  """

  def __init__(self, mesh: Mesh, abstract: TrainState, period: int, proven: int, distrust: Distrust) -> None:
    self._mesh, self._period, self._proven, self._distrust = mesh, period, proven, distrust
    self._names, leaves = list(named(abstract)), jax.tree.leaves(abstract)
    self._holders, self._checksums = first_holders(mesh, leaves), DeviceChecksums(mesh)
    copies = (self._holders != np.arange(mesh.size)[:, None]).any(0)
    sizes = np.array([leaf.size * leaf.dtype.itemsize for leaf in leaves])
    self.share = float(sizes[copies].sum() / sizes.sum())
    """The part of the state's bytes that more than one device holds."""

  def due(self, step: int) -> bool:
    return step % self._period == 0

  def on_update(
    self, step: int, state: TrainState, position: Callable[[], IteratorState], metrics: dict[str, float]
  ) -> bool:
    self.check(step, state)
    return False

  def on_end(self, step: int, state: TrainState, position: Callable[[], IteratorState]) -> None:
    self.check(step, state)

  def check(self, step: int, state: TrainState) -> None:
    """Raises `RunError`, on all processes, where replicas differ. All processes call it; a second call is free."""
    if step == self._proven:
      return
    found = compare_replicas(self._checksums(state), self._holders)
    if found is None:
      self._proven = step
      return
    devices = [self._mesh.devices.flat[i] for i in found.devices]
    first, more = self._names[found.arrays[0]], len(found.arrays) - 1
    which = f"{first} and {plural(more, 'more array')}" if more else first
    verb = "holds" if len(devices) == 1 else "hold"
    what = (
      f"{verb} other bits than the replicas in {which}"
      if found.is_certain
      else f"{verb} different bits of {which}, as replicas that should be equal, and which are right is not known,"
    )
    end_run(step, devices, what, self._proven, self._distrust, found.is_certain)
