"""Estimate of the time of a compiled step: the compiler's cycles, FLOPs of kernels, bytes of collectives.

The GPU compiler has no estimate of cycles: there the FLOPs and bytes of every operation take its place.

The schedule is simulated with one clock for the chip and one for its links: an asynchronous collective costs only what
is left of it when its result is needed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
from jax.sharding import Mesh

from maxtext.kernels.attention_mask import ScoreSpec
from maxtext.kernels.splash_attention import seen_blocks
from maxtext.mesh.topology import Topology
from maxtext.planner.gpu_cost import gpu_cost
from maxtext.planner.hlo import CompiledProgram, Computation, Instruction, called_computations, loop_body
from maxtext.planner.operation_names import RECOMPUTED, operation_name, source_lines


@dataclass(frozen=True)
class Calibration:
  """Corrections of the compiler's estimate and the data sheet; `docs/planner.md` has their sources.

  Attributes:
    compute: measured seconds for one second of the compiler's estimate.
    kernel: share of the chip's peak that a Pallas kernel reaches; attention's with default blocks.
    grouped: the same for grouped matmuls, which are those of experts.
    link: share of a link's speed that a collective reaches.
    between_slices: bytes per second and chip over the data-centre network.
    matmul: share of a GPU's peak that a matmul reaches.
    memory: share of its memory's speed that other operations reach.
    measured: whether a published run was compared.
  """

  compute: float = 1.0
  kernel: float = 0.6
  grouped: float = 0.6
  link: float = 0.9
  between_slices: float = 6.25e9
  matmul: float = 0.7
  memory: float = 0.9
  measured: bool = False


Kind = Literal["compute", "kernel", "collective"]
_GROUPED = "gmm"  # in the names of grouped matmul kernels
_ATTENTION = "splash_mha_"  # prefix of attention kernels


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
    """Compute, kernels, waiting for collectives."""
    return {kind: sum(o.seconds for o in self.operations if o.kind == kind) for kind in get_args(Kind)}

  @property
  def recomputed_share(self) -> float:
    """Share of the chip's own time spent on what the forward pass had computed already."""
    own = [o for o in self.operations if o.kind != "collective"]
    return sum(o.seconds for o in own if o.recomputed) / max(sum(o.seconds for o in own), 1e-30)


def estimate(
  program: CompiledProgram,
  topology: Topology,
  mesh: Mesh,
  calibration: Calibration,
  filled_rows: float = 1.0,
  kernel_efficiency: Mapping[str, float] = MappingProxyType({}),
) -> Estimate:
  """Simulates the schedule.

  Args:
    program: the compiled step.
    topology: the hardware.
    mesh: the device mesh of the step.
    calibration: of the chip.
    filled_rows: share of the rows of grouped matmuls that hold a token; a kernel skips the others.
    kernel_efficiency: speed of each attention kernel relative to default blocks.
  """
  simulator = _ScheduleSimulator(program, topology, mesh, calibration, filled_rows, kernel_efficiency)
  simulator.simulate(program.entry, 1)
  return Estimate(simulator.operations, simulator.loops)


class _ScheduleSimulator:
  def __init__(
    self,
    program: CompiledProgram,
    topology: Topology,
    mesh: Mesh,
    calibration: Calibration,
    filled_rows: float,
    kernel_efficiency: Mapping[str, float],
  ) -> None:
    self._program, self._topology, self._mesh, self._calibration = program, topology, mesh, calibration
    self._chip, self._filled_rows, self._kernel_efficiency = topology.chip, filled_rows, kernel_efficiency
    self.operations: list[Operation] = []
    self.loops: list[Loop] = []

  def simulate(self, name: str, times: int) -> float:
    """Simulates a computation that runs `times` times; returns the seconds of one run."""
    now, links_free = 0.0, {False: 0.0, True: 0.0}  # within a slice, and between slices
    in_flight: dict[str, tuple[Instruction, float]] = {}
    computation = self._program.computations[name]
    for i in computation.instructions:
      if i.opcode == "while":
        trips, first = self._program.trips(i), len(self.operations)
        now += trips * self.simulate(loop_body(i), times * trips)
        self.loops.append(Loop(times * trips, self.operations[first:]))
      elif i.opcode in ("call", "conditional"):
        now += max((self.simulate(target, times) for target in called_computations(i)), default=0.0)
      elif transfer := self._program.transfer(i):
        if transfer.starts:
          network = transfer.collective.between_slices
          links_free[network] = max(now, links_free[network]) + self._transfer_seconds(transfer.collective)
          in_flight[transfer.key] = transfer.collective, links_free[network]
        if transfer.ends and transfer.key in in_flight:
          collective, done = in_flight.pop(transfer.key)
          self._wait(collective, i, times, max(done - now, 0.0))
          now = max(now, done)
      else:
        now += self._run_on_chip(computation, i, times)
    return now

  def _wait(self, i: Instruction, end: Instruction, times: int, seconds: float) -> None:
    op_name, stack = max((self._program.origin(j) for j in (i, end)), key=lambda origin: bool(origin[1]))
    label, source = operation_name(op_name, stack), source_lines(stack)
    kind, axes = i.collective or i.opcode, self._axes(i)
    self.operations.append(Operation(kind, label, "collective", source, times, seconds * times, i.bytes * times, axes))

  def _run_on_chip(self, computation: Computation, i: Instruction, times: int) -> float:
    kernel, seconds = self._on_gpu(computation, i) if self._topology.gpu else self._on_tpu(i)
    if seconds:
      kind: Kind = "kernel" if kernel else "compute"
      op_name, stack = self._program.origin(i)
      label, source, again = operation_name(op_name, stack), source_lines(stack), RECOMPUTED in op_name
      self.operations.append(Operation(kernel or i.name, label, kind, source, times, seconds * times, recomputed=again))
    return seconds

  def _on_tpu(self, i: Instruction) -> tuple[str | None, float]:
    """The name of the Pallas kernel, if it is one, and its seconds."""
    if not (kernel := _kernel_name(i)):
      return None, self._calibration.compute * i.cycles / self._chip.clock
    flops, moved = _kernel_cost(kernel, i)
    faster = (times for part, times in self._kernel_efficiency.items() if f"{_ATTENTION}{part}" in kernel)
    efficiency = self._calibration.kernel * next(faster, 1.0)
    peak = self._chip.flops
    if _GROUPED in kernel:
      flops, efficiency = flops * self._filled_rows, self._calibration.grouped
      peak = self._chip.peak(a.dtype for a in i.operand_arrays if len(a.shape) > 1)
    seconds = max(flops / (peak * efficiency), moved / self._chip.hbm_bandwidth)
    return kernel, seconds * self._chip.devices  # each device has its part of the chip

  def _on_gpu(self, computation: Computation, i: Instruction) -> tuple[str | None, float]:
    """The name of the library's kernel, if it is one, and its seconds."""
    cost, c = gpu_cost(self._program, computation, i), self._calibration
    speed = self._chip.peak(cost.dtypes) * (c.kernel if cost.kernel else c.matmul)
    return cost.kernel, max(cost.flops / speed, cost.bytes / (self._chip.hbm_bandwidth * c.memory))

  def _transfer_seconds(self, i: Instruction) -> float:
    """Seconds of a collective: all links to a chip of the group are used; a permute uses one."""
    places = self._places(i)
    group = len(places)
    if group == 1:
      return 0.0
    links, speed = self._links(places)
    share = (group - 1) / group
    passes = {"all-reduce": 2 * share, "reduce-scatter": group - 1, "collective-permute": links}
    return i.bytes * passes.get(i.collective or "", share) / (speed * self._calibration.link)

  def _places(self, i: Instruction) -> np.ndarray:
    """The devices of one group, as flat indices into the mesh; between slices, one of each."""
    return self._one_of_each_slice if i.between_slices else i.first_group(self._mesh.size)

  @cached_property
  def _one_of_each_slice(self) -> np.ndarray:
    return np.unique([getattr(d, "slice_index", 0) for d in self._mesh.devices.flat], return_index=True)[1]

  def _axes(self, i: Instruction) -> tuple[str, ...]:
    """The mesh axes of a group."""
    index = np.stack(np.unravel_index(self._places(i), self._mesh.devices.shape))
    return tuple(a for a, row in zip(self._mesh.axis_names, index, strict=True) if len(set(row)) > 1)

  def _links(self, places: np.ndarray) -> tuple[int, float]:
    """The links to each chip of a group, and the bytes per second over all of them.

    Each torus dimension that the group spans gives two links, one for each direction of the ring. If it is no ring, or
    the group is only a part of it, the chip at the end has one. GPUs of several nodes share the network cards of those
    of the group that are in their node.
    """
    devices, between = self._mesh.devices.ravel()[places], self._calibration.between_slices
    if self._topology.gpu:
      nodes = len({d.process_index for d in devices})
      return 1, min(self._chip.link_bandwidth, between * len(devices) / nodes if nodes > 1 else np.inf)
    if len({getattr(d, "slice_index", 0) for d in devices}) > 1:
      return 1, between
    extents = np.ptp([d.coords for d in devices], axis=0) + 1
    rings = [
      wraps and extent == size
      for extent, size, wraps in zip(extents, self._topology.shape, self._topology.wrap, strict=False)
    ]
    links = max(sum(1 + int(ring) for extent, ring in zip(extents, rings, strict=False) if extent > 1), 1)
    return links, links * self._chip.link_bandwidth


def _kernel_name(i: Instruction) -> str | None:
  if i.opcode != "custom-call" or 'custom_call_target="tpu_custom_call"' not in i.rest:
    return None
  return re.sub(r"\.\d+$", "", i.name)


def _kernel_cost(name: str, i: Instruction) -> tuple[float, int]:
  """FLOPs and bytes of a Pallas call; for an unknown kernel, bytes alone."""
  arrays = i.operand_arrays
  moved = sum(a.bytes for a in (*arrays, *i.arrays))
  work = next((work for part, work in _FLOPS.items() if part in name), None)
  return (work(i) if work else 0.0), moved


def _attention(part: str, products: int, i: Instruction) -> float:
  """FLOPs of `products` matmuls of queries and keys over the blocks that are not masked. The mask's table lists all
  blocks if it is causal, else the largest number in a row of blocks. Where rows are split, all are counted."""
  mask = next(a.shape for a in i.operand_arrays if a.dtype == "s8")
  arrays = [a.shape for a in i.operand_arrays if len(a.shape) >= 3 and a.dtype != "s8"]
  queries, keys = (_head_dim_last(i, name, shape) for name, shape in zip("qk", arrays, strict=False))
  q, kv = (_block(i, f"block_{side}{part}") for side in ("q", "kv"))
  down, across = queries[-2] // q, keys[-2] // kv
  causal = prod(mask[-2:]) == down * across and queries[-2] == keys[-2]
  seen = int(seen_blocks(ScoreSpec(1.0), queries[-2], q, kv).sum()) if causal else prod(mask[-2:])
  return products * 2.0 * prod(queries) / queries[-2] * seen * q * kv


def _head_dim_last(i: Instruction, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """The shape of queries or keys, which are stored with the sequence last in the layout SEQ_MINOR (2)."""
  return (*shape[:-2], shape[-1], shape[-2]) if re.search(rf'"{name}_layout\\*": 2', i.rest) else shape


def _block(i: Instruction, name: str) -> int:
  """A block size, from the kernel's metadata."""
  found = re.search(rf'"{name}\\*": (\d+)', i.rest)
  assert found, f"a splash kernel has {name} in its metadata"
  return int(found[1])


def _gradients(i: Instruction) -> float:
  """FLOPs of the gradients of keys and values; in a fused kernel also of queries."""
  return _attention("_dkv", 5 if len(i.arrays) > 2 * 2 else 4, i)


def _grouped(i: Instruction) -> float:
  """FLOPs of a grouped matmul of rows [M,K] and weights [G,K,N] to [M,N], or of the gradient of the weights."""
  every = [a.shape for a in (*i.operand_arrays, *i.arrays)]
  weights = next(shape for shape in every if len(shape) == 3)
  inner, outer = (prod(shape) for shape in every if len(shape) == 2)
  each = prod(weights[1:])
  return 2.0 * (inner * outer / each) ** 0.5 * each


# FLOPs of Pallas kernels, by a part of their names; for splash kernels with the number of their matmuls.
_FLOPS: Mapping[str, Callable[[Instruction], float]] = {
  f"{_ATTENTION}fwd": partial(_attention, "", 2),
  f"{_ATTENTION}dq": partial(_attention, "_dq", 3),
  f"{_ATTENTION}dkv": _gradients,
  _GROUPED: _grouped,
}
