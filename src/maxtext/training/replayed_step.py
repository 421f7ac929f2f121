"""Running a step twice: the results are equal to the last bit, unless a device has computed one of them wrongly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxtext.training.corruption import Distrust, end_run
from maxtext.training.device_checksums import DeviceChecksums
from maxtext.training.state import TrainState
from maxtext.training.synchronized_compile import SynchronizedCompile


class ReplayedStep:
  """A step function that runs every so many steps twice, from the same state and batch, and ends the run where the two
  results differ. It needs memory for a second state while it does.

  Args:
    step: to run.
    mesh: of the state.
    period: steps from one replay to the next.
    began: the step that the run begins with; the last replay was at a multiple of the period.
    distrust: leaves a note for the next start.
  """

  def __init__(self, step: Any, mesh: Mesh, period: int, began: int, distrust: Distrust) -> None:
    self._step, self._mesh, self._period, self._finished, self._distrust = step, mesh, period, began, distrust
    self._checksums = DeviceChecksums(mesh)
    self._copy: SynchronizedCompile | None = None

  def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    self._finished += 1
    if self._finished % self._period:
      return self._step(state, batch)
    first = self._checksums(self._step(self._copied(state), batch))
    result = self._step(state, batch)
    if different := np.flatnonzero((self._checksums(result) != first).any(1)).tolist():
      devices = [self._mesh.devices.flat[i] for i in different]
      one_host = len({device.process_index for device in devices}) == 1
      verb = "computes" if len(devices) == 1 else "compute"
      what = f"{verb} other bits when the same step is run again, or take them in from a device that does,"
      end_run(self._finished, devices, what, self._finished - self._period, self._distrust, one_host)
    return result

  def _copied(self, state: TrainState) -> TrainState:
    if self._copy is None:
      shardings = jax.tree.map(lambda a: a.sharding, state)
      self._copy = SynchronizedCompile(jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=shardings), batch=0)
    return self._copy(state)
