"""Estimate of the time of a compiled step: its schedule at the speeds that a chip reaches.

The schedule is simulated with one clock for the chip and one for each network: an asynchronous transfer costs only what
is left of it when its result is needed.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from maxtext.planner.schedule import Kind, Resource, Schedule, Work


@dataclass(frozen=True)
class Calibration:
  """Corrections of the compiler's estimate and the data sheet; `docs/planner.md` has their sources.

  Attributes:
    compute: measured seconds for one second of the compiler's estimate.
    kernel: share of the chip's peak that a Pallas kernel with default blocks reaches, or cuDNN's attention.
    grouped: the same for grouped matmuls, which are those of experts.
    link: share of a link's speed that a collective reaches.
    between_slices: bytes per second and chip over the data-centre network; of GPUs, between nodes.
    host: bytes per second and chip between its memory and the host's.
    matmul: share of the peak that a matmul reaches, where the compiler has no estimate.
    matmul_8bit: the same of one of eight bits, whose peak is higher.
    memory: share of the memory's speed that kernels and such operations reach.
  """

  compute: float = 1.0
  kernel: float = 0.6
  grouped: float = 0.6
  link: float = 0.9
  between_slices: float = 6.25e9
  host: float = 32e9
  matmul: float = 1.0
  matmul_8bit: float = 1.0
  memory: float = 1.0

  def seconds(self, work: Work) -> float:
    """What an operation or a transfer takes."""
    speeds: dict[Resource, float] = {
      "compute": 1 / self.compute,
      "kernel": self.kernel,
      "grouped": self.grouped,
      "matmul": self.matmul,
      "matmul_8bit": self.matmul_8bit,
      "link": self.link,
      "between_slices": self.between_slices * self.link,
      "host": self.host,
    }
    return max(work.seconds / speeds[work.resource], work.memory_seconds / self.memory)


@dataclass(frozen=True)
class Operation:
  """One operation of the schedule; for an asynchronous one, the time that the step waits for it.

  Attributes:
    name: of the instruction, kernel or kind of collective.
    label: what it does, such as "attention output, backward".
  """

  name: str
  label: str
  kind: Kind
  source: str
  times: int
  seconds: float  # of all times together, as far as the step waits
  bytes: int = 0  # over links, all times together
  axes: tuple[str, ...] = ()
  recomputed: bool = False


@dataclass(frozen=True)
class Loop:
  """A loop of the schedule, with those inside it, and how often its body runs in a step."""

  times: int
  operations: Sequence[Operation]

  @property
  def seconds(self) -> float:
    """Of all times together."""
    return sum(o.seconds for o in self.operations)


@dataclass(frozen=True)
class Estimate:
  """A step, operation by operation."""

  operations: Sequence[Operation]
  loops: Sequence[Loop] = ()

  @property
  def seconds(self) -> float:
    """The whole step."""
    return sum(o.seconds for o in self.operations)

  def layer_loops(self) -> list[Loop]:
    """The loops over layers, forward and backward: those that take a twentieth of the step, and no other half of it."""
    own_of = [set(map(id, loop.operations)) for loop in self.loops]
    return [
      loop
      for loop, own in zip(self.loops, own_of, strict=True)
      if loop.seconds > self.seconds / 20
      and not any(
        inner < own and other.seconds > loop.seconds / 2 for inner, other in zip(own_of, self.loops, strict=True)
      )
    ]

  def seconds_by_kind(self) -> dict[str, float]:
    """Compute, kernels, waiting for collectives and for the host."""
    return {kind: sum(o.seconds for o in self.operations if o.kind == kind) for kind in get_args(Kind)}

  @property
  def recomputed_share(self) -> float:
    """Share of the chip's own time spent on what the forward pass had computed already."""
    own = [o for o in self.operations if o.kind in ("compute", "kernel")]
    return sum(o.seconds for o in own if o.recomputed) / max(sum(o.seconds for o in own), 1e-30)


def estimate(schedule: Schedule, calibration: Calibration) -> Estimate:
  """Simulates the schedule on a chip of this calibration."""
  simulator = _Simulator(calibration)
  simulator.simulate(schedule, 1)
  return Estimate(simulator.operations, simulator.loops)


class _Simulator:
  def __init__(self, calibration: Calibration) -> None:
    self._calibration = calibration
    self.operations: list[Operation] = []
    self.loops: list[Loop] = []

  def simulate(self, schedule: Schedule, times: int) -> float:
    """Simulates a schedule that runs `times` times; returns the seconds of one run."""
    now, free = 0.0, defaultdict[Resource, float](float)
    in_flight: dict[str, float] = {}
    for work in schedule.parts:
      if isinstance(work, Schedule):
        first = len(self.operations)
        now += work.times * self.simulate(work, times * work.times)
        self.loops.append(Loop(times * work.times, self.operations[first:]))
      elif not work.transfer:
        seconds = self._calibration.seconds(work)
        self._add(work, times, seconds)
        now += seconds
      else:
        if work.starts:
          free[work.resource] = max(now, free[work.resource]) + self._calibration.seconds(work)
          in_flight[work.transfer] = free[work.resource]
        if work.ends:
          done = in_flight.pop(work.transfer)
          self._add(work, times, max(done - now, 0.0))
          now = max(now, done)
    return now

  def _add(self, work: Work, times: int, seconds: float) -> None:
    self.operations.append(
      Operation(
        work.name,
        work.label,
        work.kind,
        work.source,
        times,
        seconds * times,
        work.bytes * times,
        work.axes,
        work.recomputed,
      )
    )
