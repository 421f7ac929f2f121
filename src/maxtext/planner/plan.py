"""Memory and speed of a run, estimated from its train step compiled for the target topology."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.execution import ExecutionConfig
from maxtext.mesh.rules import mesh_axes_of, num_shards_of
from maxtext.mesh.topology import Topology
from maxtext.models.flops import train_flops_per_token
from maxtext.planner.calibration import CALIBRATION
from maxtext.planner.compile import program_for
from maxtext.planner.cost_model import forward_costs, saved_bytes
from maxtext.planner.estimate import Estimate, Operation, estimate
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.kernel_blocks import kernel_efficiency
from maxtext.training.compiled import save
from maxtext.training.program import Program
from maxtext.training.state import bytes_per_device


@dataclass(frozen=True)
class Memory:
  """Bytes of one device's memory."""

  parameters: int
  optimizer: int
  batch: int
  temporaries: int  # including activations saved for the backward pass
  peak: int
  there: int


@dataclass(frozen=True)
class Plan:
  """The plan of a run.

  `estimate` is None if the step did not compile, because it does not fit or because there is no compiler. `memory` is
  then a lower bound.
  """

  model: str
  topology: str
  chips: int
  axes: Mapping[str, int]
  tokens: int  # per step
  memory: Memory
  state_bytes: int  # of the whole run
  model_flops: float  # per step and chip
  peak_flops: float
  compile_seconds: float
  estimate: Estimate | None
  compiled: bool = True

  @property
  def fits(self) -> bool:
    """Whether the step fits into the device's memory."""
    return self.memory.peak <= self.memory.there

  @property
  def least_seconds(self) -> float:
    """A lower bound of the step time: the model's FLOPs at the chip's peak."""
    return self.model_flops / self.peak_flops

  @property
  def mfu(self) -> float | None:
    """Model FLOPs utilisation: the model's FLOPs over the chip's peak in the estimated time."""
    return self.least_seconds / self.estimate.seconds if self.estimate else None

  @property
  def tokens_per_second_per_chip(self) -> float | None:
    """Estimated throughput."""
    return self.tokens / self.chips / self.estimate.seconds if self.estimate else None

  def collectives(self) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes per step and chip, by kind of collective and mesh axes."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for o in self.estimate.operations if self.estimate else ():
      if o.kind == "collective":
        found[o.name, o.axes] += o.bytes
    return dict(found.most_common())

  def most_expensive(self, count: int = 10) -> list[Operation]:
    """The most expensive operations, merged by source line."""
    return _merge_operations(self.estimate.operations if self.estimate else ())[:count]

  def as_json(self) -> dict[str, Any]:
    """The whole plan as JSON values."""
    e = self.estimate
    return {
      "model": self.model,
      "topology": self.topology,
      "chips": self.chips,
      "mesh": dict(self.axes),
      "tokens_per_step": self.tokens,
      "fits": self.fits,
      "peak_hbm_bytes_per_chip": self.memory.peak,
      "hbm_bytes_per_chip": self.memory.there,
      "argument_bytes": self.memory.parameters + self.memory.optimizer + self.memory.batch,
      "temp_bytes": self.memory.temporaries,
      "memory": asdict(self.memory),
      "model_flops_per_chip": self.model_flops,
      "compiled": self.compiled,
      "least_step_seconds": self.least_seconds,
      "recomputed_share": e.recomputed_share if e else None,
      "estimated_step_seconds": e.seconds if e else None,
      "estimated_seconds": e.seconds_by_kind() if e else None,
      "estimated_tokens_per_second_per_chip": self.tokens_per_second_per_chip,
      "estimated_mfu": self.mfu,
      "collectives": [
        {"kind": kind, "axes": list(axes), "bytes": moved} for (kind, axes), moved in self.collectives().items()
      ],
      "most_expensive": [asdict(o) for o in self.most_expensive()],
      "compile_seconds": self.compile_seconds,
    }


def plan(config: MaxTextConfig, *, config_name: str = "") -> Plan:
  """Compiles the train step for `compile_topology` and estimates its memory and time: `maxtext.plan`.

  No device of that topology is needed. Without a compiler for it (GPUs), memory and time are lower bounds.

  Args:
    config: a run with `compile_topology`, such as "v5p-128".
    config_name: what to call it; empty is `model_name`.

  Raises:
    ConfigError: (a ValueError) there is no `compile_topology`, or the run does not fit to its mesh.
  """
  start = time.perf_counter()
  program, topology = program_for(config)
  mesh, chip = program.model.execution.sharding.mesh, topology.chip
  memory, found = _compiled(program, topology) if topology.compiles else (_memory_lower_bound(program, topology), None)
  rows, length = program.batch.inputs.shape
  chips = mesh.size // chip.devices
  return Plan(
    config_name or config.model_name,
    config.compile_topology,
    chips,
    {axis: size for axis, size in mesh.shape.items() if size > 1},
    rows * length,
    memory,
    program.state_bytes,
    train_flops_per_token(program.model, length) * rows * length / chips,
    chip.flops,
    time.perf_counter() - start,
    found,
    topology.compiles,
  )


def _compiled(program: Program, topology: Topology) -> tuple[Memory, Estimate | None]:
  file, lowered = program.config.compiled_trainstep_file, program.lower()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    peak = _needed_bytes(str(error))
    return _memory(program, topology, peak, peak), None
  if file:
    save(program, lowered, compiled, Path(file))
  stats, text = compiled.memory_analysis(), compiled.as_text()
  assert stats is not None, "the TPU compiler returns both"
  assert text is not None
  execution, parsed = program.model.execution, CompiledProgram.parse(text)
  filled, attended = _filled_rows(program.config, execution), kernel_efficiency(program, topology)
  found = estimate(parsed, topology, execution.sharding.mesh, CALIBRATION[topology.name], filled, attended)
  return _memory(program, topology, stats.peak_memory_in_bytes, stats.temp_size_in_bytes), found


def _memory_lower_bound(program: Program, topology: Topology) -> Memory:
  """The state plus the larger of two: tensors saved for the backward pass, and gradients."""
  config, state = program.config, program.state
  if config.compiled_trainstep_file:
    raise ConfigError(
      f"compiled_trainstep_file={config.compiled_trainstep_file}: there is no compiler for "
      f"compile_topology={config.compile_topology} here; leave it out."
    )
  costs, inputs = forward_costs(program)
  execution, grad_dtype = program.model.execution, jnp.dtype(config.grad_dtype.value)
  saved = int(
    (inputs + saved_bytes(costs, execution.remat)) / (config.gradient_accumulation_steps * execution.sharding.mesh.size)
  )
  gradients = bytes_per_device(
    {n: jax.ShapeDtypeStruct(p.shape, grad_dtype, sharding=p.sharding) for n, p in state.params.items()}
  )
  temporaries = max(saved, gradients)
  return _memory(program, topology, bytes_per_device((state, program.batch)) + temporaries, temporaries)


def _filled_rows(config: MaxTextConfig, execution: ExecutionConfig) -> float:
  """The fraction of a device's expert rows that hold a token if tokens are spread evenly over experts."""
  owners = num_shards_of(
    execution.sharding.mesh, mesh_axes_of(execution.sharding.partition((config.num_experts,), "activation_expert")[0])
  )
  capacity = min(execution.kernels.experts.buffer or owners, owners)  # relative to an even share
  return 1 / max(capacity, 1)


def _memory(program: Program, topology: Topology, peak: int, temporaries: int) -> Memory:
  state = program.state
  parameters, optimizer, batch = (
    bytes_per_device(tree) for tree in ((state.params, state.buffers), state.opt_state, program.batch)
  )
  there = topology.chip.hbm_bytes // topology.chip.devices
  return Memory(parameters, optimizer, batch, temporaries, peak, there)


def _needed_bytes(message: str) -> int:
  """The bytes that an out-of-memory message of the compiler reports; raises `RuntimeError` for other messages."""
  units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
  found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", message)
  if not found:
    raise RuntimeError(message)
  return int(float(found[1]) * units[found[2]])


def _merge_operations(operations: Sequence[Operation]) -> list[Operation]:
  merged: dict[tuple[str, str, bool], Operation] = {}
  for o in operations:
    name = "compute" if o.kind == "compute" else o.name
    old = merged.get((name, o.source, o.recomputed))
    seconds, moved = (old.seconds, old.bytes) if old else (0.0, 0)
    merged[name, o.source, o.recomputed] = Operation(
      name, o.kind, o.source, o.times, seconds + o.seconds, moved + o.bytes, o.axes, o.recomputed
    )
  return sorted(merged.values(), key=lambda o: -o.seconds)
