"""What a compiled step asks of a chip: its schedule, each operation with its time at the peak of what it uses.

A schedule depends on the compiled program and the data sheet alone; what a chip reaches of a peak is in `estimate.py`.
The TPU compiler writes an estimate of its cycles beside an operation. The one for GPUs writes none: there an operation
has its FLOPs and bytes (`gpu_cost.py`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from types import MappingProxyType
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from maxtext.kernels.attention_mask import ScoreSpec
from maxtext.kernels.splash_attention import seen_blocks
from maxtext.mesh.topology import Topology
from maxtext.planner.gpu_cost import gpu_cost
from maxtext.planner.hlo import CompiledProgram, Computation, Instruction, Transfer, called_computations, loop_body
from maxtext.planner.memory_traffic import own_estimate
from maxtext.planner.operation_names import RECOMPUTED, operation_name, source_lines
from maxtext.planner.tpu_cost import tpu_cost

Kind = Literal["compute", "kernel", "collective", "host"]
Resource = Literal["compute", "kernel", "grouped", "matmul", "matmul_8bit", "link", "between_slices", "host"]
_GROUPED = ("gmm", "ragged-dot-none")  # in the names of grouped matmul kernels: megablox's and XLA's own
_ATTENTION = "splash_mha_"  # prefix of attention kernels


@dataclass(frozen=True)
class Work:
  """One operation, or a point of the schedule where a transfer starts, ends, or both.

  Attributes:
    name: of the instruction, kernel or kind of collective.
    label: what it does, such as "attention output, backward".
    resource: what it keeps busy.
    seconds: at the resource's peak; between slices and to the host at a byte per second. Of a transfer that only ends
      here, 0.
    memory_seconds: of its bytes from and to the chip's memory at that memory's peak, which pass at the same time.
    transfer: shared by the start and the end of one transfer; empty for what runs on the chip.
    bytes: that it transfers.
  """

  name: str
  label: str
  kind: Kind
  source: str
  resource: Resource
  seconds: float
  memory_seconds: float = 0.0
  transfer: str = ""
  starts: bool = False
  ends: bool = False
  bytes: int = 0
  axes: tuple[str, ...] = ()
  recomputed: bool = False


@dataclass(frozen=True)
class Schedule:
  """Operations in their order, and how often they run where they stand: a step, or a loop in it."""

  times: int
  parts: Sequence["Work | Schedule"]


def schedule(
  program: CompiledProgram,
  topology: Topology,
  mesh: Mesh,
  filled_rows: float = 1.0,
  kernel_efficiency: Mapping[str, float] = MappingProxyType({}),
) -> Schedule:
  """The schedule of a compiled step.

  Args:
    program: the compiled step.
    topology: the hardware.
    mesh: the device mesh of the step.
    filled_rows: share of the rows of grouped matmuls that hold a token; a kernel skips the others.
    kernel_efficiency: speed of each attention kernel relative to default blocks.
  """
  reader = _ScheduleReader(program, topology, mesh, filled_rows, kernel_efficiency)
  return Schedule(1, reader.read(program.entry))


class _ScheduleReader:
  def __init__(
    self,
    program: CompiledProgram,
    topology: Topology,
    mesh: Mesh,
    filled_rows: float,
    kernel_efficiency: Mapping[str, float],
  ) -> None:
    self._program, self._topology, self._mesh = program, topology, mesh
    self._chip, self._filled_rows, self._kernel_efficiency = topology.chip, filled_rows, kernel_efficiency

  def read(self, name: str) -> list[Work | Schedule]:
    """The operations of a computation."""
    parts: list[Work | Schedule] = []
    in_flight: dict[str, Instruction] = {}
    with_host: set[str] = set()
    computation = self._program.computations[name]
    for i in computation.instructions:
      if i.opcode == "while":
        parts.append(Schedule(self._program.trips(i), self.read(loop_body(i))))
      elif i.opcode in ("call", "conditional"):
        for target in called_computations(i):
          parts += self.read(target)
      elif i.host_bytes:
        with_host.add(i.name)
        parts.append(self._with_host(i, i.name, i.host_bytes))
      elif with_host.intersection(i.operands) and i.opcode.endswith("-done"):
        parts.append(self._with_host(i, i.operands[0], 0))
      elif transfer := self._program.transfer(i):
        if transfer.starts:
          in_flight[transfer.key] = transfer.collective
        if transfer.key in in_flight:
          parts.append(self._collective(in_flight[transfer.key], i, transfer))
      elif work := self._on_chip(computation, i):
        parts.append(work)
    return parts

  def _collective(self, i: Instruction, here: Instruction, transfer: Transfer) -> Work:
    resource, _ = self._links(i)
    op_name, stack = max((self._program.origin(j) for j in (i, here)), key=lambda origin: bool(origin[1]))
    return Work(
      i.collective or i.opcode,
      operation_name(op_name, stack),
      "collective",
      source_lines(stack),
      resource,
      self._transfer_seconds(i) if transfer.starts else 0.0,
      transfer=transfer.key,
      starts=transfer.starts,
      ends=transfer.ends,
      bytes=i.bytes,
      axes=self._axes(i),
    )

  def _with_host(self, i: Instruction, transfer: str, moved: int) -> Work:
    """Where a transfer between chip and host starts, with its bytes, or where it ends."""
    op_name, stack = self._program.origin(i)
    label, source = operation_name(op_name, stack), source_lines(stack)
    seconds = float(moved * self._chip.devices)  # each device has its part of the chip's way to the host
    starts = moved > 0
    return Work(
      "host transfer", label, "host", source, "host", seconds, transfer=transfer, starts=starts, ends=not starts
    )

  def _on_chip(self, computation: Computation, i: Instruction) -> Work | None:
    kernel, resource, seconds, memory_seconds = (
      self._on_gpu(computation, i) if self._topology.gpu else self._on_tpu(computation, i)
    )
    if not seconds and not memory_seconds:
      return None
    op_name, stack = self._program.origin(i)
    label, source, again = operation_name(op_name, stack), source_lines(stack), RECOMPUTED in op_name
    kind: Kind = "kernel" if kernel else "compute"
    return Work(kernel or i.name, label, kind, source, resource, seconds, memory_seconds, recomputed=again)

  def _on_tpu(self, computation: Computation, i: Instruction) -> tuple[str | None, Resource, float, float]:
    """The name of the Pallas kernel, if it is one, what it keeps busy, and seconds of that and of the memory."""
    if not (kernel := _kernel_name(i)):
      if not self._has_cycles:
        return None, *self._at_peak(computation, i)
      return None, "compute", i.cycles / self._chip.clock, 0.0
    flops, moved = _kernel_cost(kernel, i)
    faster = (times for part, times in self._kernel_efficiency.items() if f"{_ATTENTION}{part}" in kernel)
    resource: Resource = "kernel"
    peak = self._chip.flops * next(faster, 1.0)
    if any(part in kernel for part in _GROUPED):
      resource, flops = "grouped", flops * self._filled_rows
      peak = self._chip.peak(a.dtype for a in i.operand_arrays if len(a.shape) > 1)
    devices = self._chip.devices  # each has its part of the chip
    return kernel, resource, flops / peak * devices, moved / self._chip.hbm_bandwidth * devices

  @cached_property
  def _has_cycles(self) -> bool:
    """Whether the compiler has estimated operations; it does so while it writes their code."""
    return any(i.cycles for i, _ in self._program.walk())

  def _at_peak(self, computation: Computation, i: Instruction) -> tuple[Resource, float, float]:
    """What the matrix units multiply, and seconds of them and of the memory."""
    if i.opcode.endswith("-start"):  # passes beside other work
      return "matmul", 0.0, 0.0
    cost, devices = tpu_cost(self._program, computation, i), self._chip.devices  # each has its part of the chip
    peak = self._chip.peak(cost.dtypes)
    resource: Resource = "matmul_8bit" if peak > self._chip.flops else "matmul"
    return resource, cost.flops / peak * devices, cost.bytes / self._chip.hbm_bandwidth * devices

  def _on_gpu(self, computation: Computation, i: Instruction) -> tuple[str | None, Resource, float, float]:
    """The same of the library's kernel; what is no matmul keeps the memory busy alone."""
    cost = gpu_cost(self._program, computation, i)
    seconds, memory_seconds = cost.flops / self._chip.peak(cost.dtypes), cost.bytes / self._chip.hbm_bandwidth
    return cost.kernel, "kernel" if cost.kernel else "matmul", seconds, memory_seconds

  def _transfer_seconds(self, i: Instruction) -> float:
    """Seconds of a collective: all links to a chip of the group are used; a permute uses one."""
    group = len(self._places(i))
    if group == 1:
      return 0.0
    resource, links = self._links(i)
    speed = links * (self._chip.link_bandwidth if resource == "link" else 1.0)
    share = (group - 1) / group
    passes = {"all-reduce": 2 * share, "reduce-scatter": group - 1, "collective-permute": links}
    return i.bytes * passes.get(i.collective or "", share) / speed

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

  def _links(self, i: Instruction) -> tuple[Resource, float]:
    """The network that a collective goes over, and the links to each chip of its group.

    Each torus dimension that the group spans gives two links, one for each direction of the ring. If it is no ring, or
    the group is only a part of it, the chip at the end has one. GPUs of several nodes share the network cards of those
    of the group that are in their node.
    """
    devices = self._mesh.devices.ravel()[self._places(i)]
    if self._topology.gpu:
      nodes = len({d.process_index for d in devices})
      return ("between_slices", len(devices) / nodes) if nodes > 1 else ("link", 1)
    if len({getattr(d, "slice_index", 0) for d in devices}) > 1:
      return "between_slices", 1
    extents = np.ptp([d.coords for d in devices], axis=0) + 1
    rings = [
      wraps and extent == size
      for extent, size, wraps in zip(extents, self._topology.shape, self._topology.wrap, strict=False)
    ]
    return "link", max(sum(1 + int(ring) for extent, ring in zip(extents, rings, strict=False) if extent > 1), 1)


def _kernel_name(i: Instruction) -> str | None:
  if i.opcode != "custom-call" or 'custom_call_target="tpu_custom_call"' not in i.rest:
    return None
  return re.sub(r"\.\d+$", "", i.name)


def _kernel_cost(name: str, i: Instruction) -> tuple[float, int]:
  """FLOPs and bytes of a Pallas call; for an unknown kernel, bytes alone: its own estimate of them where it has one, as
  a kernel that works in place on a stack's cache touches one layer of its operands."""
  moved = sum(a.bytes for a in (*i.operand_arrays, *i.arrays))
  if work := next((work for part, work in _FLOPS.items() if part in name), None):
    return work(i), moved
  return 0.0, own_estimate(i) or moved


def _attention(part: str, products: int, i: Instruction) -> float:
  """FLOPs of `products` matmuls of queries and keys over the blocks that are not masked. The mask's table lists all
  blocks if it is causal, else the largest number in a row of blocks. Where rows are split, all are counted. A head
  narrower than the lanes of a register takes as long as one that fills them."""
  mask = next(a.shape for a in i.operand_arrays if a.dtype == "s8")
  arrays = [a.shape for a in i.operand_arrays if len(a.shape) >= 3 and a.dtype != "s8"]
  queries, keys = (_head_dim_last(i, name, shape) for name, shape in zip("qk", arrays, strict=False))
  q, kv = (_block(i, f"block_{side}{part}") for side in ("q", "kv"))
  down, across = queries[-2] // q, keys[-2] // kv
  causal = prod(mask[-2:]) == down * across and queries[-2] == keys[-2]
  seen = int(seen_blocks(ScoreSpec(1.0), queries[-2], q, kv).sum()) if causal else prod(mask[-2:])
  heads, width = prod(queries[:-2]), max(queries[-1], _LANES)
  return products * 2.0 * heads * width * seen * q * kv


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


_LANES = 128
# FLOPs of Pallas kernels, by a part of their names; for splash kernels with the number of their matmuls.
_FLOPS: Mapping[str, Callable[[Instruction], float]] = {
  f"{_ATTENTION}fwd": partial(_attention, "", 2),
  f"{_ATTENTION}dq": partial(_attention, "_dq", 3),
  f"{_ATTENTION}dkv": _gradients,
  **dict.fromkeys(_GROUPED, _grouped),
}
