"""What a run would need and how fast it would be, from the real step compiled for the real topology."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.execution import ExecutionConfig
from maxtext.mesh.rules import mesh_axes_of, num_shards_of
from maxtext.mesh.topology import Topology
from maxtext.models.flops import train_flops_per_token
from maxtext.plan.calibration import CALIBRATION
from maxtext.plan.compile import program_for
from maxtext.plan.cost_model import forward_costs, saved_bytes
from maxtext.plan.estimate import Estimate, Operation, estimate
from maxtext.plan.hlo import CompiledProgram
from maxtext.plan.kernel_blocks import kernel_efficiency
from maxtext.training.compiled import save
from maxtext.training.program import Program


@dataclass(frozen=True)
class Memory:
  """Bytes of one device's memory."""

  parameters: int
  optimizer: int
  batch: int
  temporaries: int  # activations kept for the backward pass among them
  peak: int
  there: int


@dataclass(frozen=True)
class Plan:
  """A run that has not been rented yet. Without an estimate the step did not compile, since it does not fit, or since
  there is no compiler: then memory is the least that it takes."""

  model: str
  topology: str
  chips: int
  axes: Mapping[str, int]
  tokens: int  # a step
  memory: Memory
  state_bytes: int  # of the whole run
  model_flops: float  # a step and chip
  peak_flops: float
  compile_seconds: float
  estimate: Estimate | None
  compiled: bool = True

  @property
  def fits(self) -> bool:
    """Whether the step's memory is there."""
    return self.memory.peak <= self.memory.there

  @property
  def least_seconds(self) -> float:
    """A step at the chip's peak, were there nothing but the model's arithmetic."""
    return self.model_flops / self.peak_flops

  @property
  def mfu(self) -> float | None:
    """The model's arithmetic over what the chip could do in the estimated time."""
    return self.least_seconds / self.estimate.seconds if self.estimate else None

  @property
  def tokens_per_second_per_chip(self) -> float | None:
    """Speed."""
    return self.tokens / self.chips / self.estimate.seconds if self.estimate else None

  def collectives(self) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes a step and chip, by kind and mesh axes."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for o in self.estimate.operations if self.estimate else ():
      if o.kind == "collective":
        found[o.name, o.axes] += o.bytes
    return dict(found.most_common())

  def most_expensive(self, count: int = 10) -> list[Operation]:
    """The operations that cost most, those of one place in the sources together."""
    return _merge_operations(self.estimate.operations if self.estimate else ())[:count]

  def as_json(self) -> dict[str, Any]:
    """Everything, for a program to read."""
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


def make_plan(config: MaxTextConfig) -> Plan:
  """Compiles the step and reads what the compiler says of it; without a compiler, reckons the least it takes."""
  start = time.perf_counter()
  program, topology = program_for(config)
  mesh, chip = program.model.execution.sharding.mesh, topology.chip
  memory, found = _compiled(program, topology) if topology.compiles else (_memory_lower_bound(program, topology), None)
  rows, length = program.batch.inputs.shape
  chips = mesh.size // chip.devices
  return Plan(
    config.model_name,
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
  assert stats is not None, "the TPU compiler gives both"
  assert text is not None
  execution, parsed = program.model.execution, CompiledProgram.parse(text)
  filled, attended = _filled_rows(program.config, execution), kernel_efficiency(program, topology)
  found = estimate(parsed, topology, execution.sharding.mesh, CALIBRATION[topology.name], filled, attended)
  return _memory(program, topology, stats.peak_memory_in_bytes, stats.temp_size_in_bytes), found


def _memory_lower_bound(program: Program, topology: Topology) -> Memory:
  """State, and what is larger of the tensors that layers keep for the backward pass and of gradients."""
  config, state = program.config, program.state
  if config.compiled_trainstep_file:
    raise ConfigError(
      f"compiled_trainstep_file={config.compiled_trainstep_file}: there is no compiler for "
      f"compile_topology={config.compile_topology} here; leave it out."
    )
  work, inputs = forward_costs(program)
  execution, grad_dtype = program.model.execution, jnp.dtype(config.grad_dtype.value)
  kept = int(
    (inputs + saved_bytes(work, execution.remat)) / (config.gradient_accumulation_steps * execution.sharding.mesh.size)
  )
  gradients = bytes_per_device(
    {n: jax.ShapeDtypeStruct(p.shape, grad_dtype, sharding=p.sharding) for n, p in state.params.items()}
  )
  temporaries = max(kept, gradients)
  return _memory(program, topology, bytes_per_device((state, program.batch)) + temporaries, temporaries)


def _filled_rows(config: MaxTextConfig, execution: ExecutionConfig) -> float:
  """The share of a device's rows of experts that hold a token if all experts get as many."""
  owners = num_shards_of(
    execution.sharding.mesh, mesh_axes_of(execution.sharding.partition((config.num_experts,), "activation_expert")[0])
  )
  room = min(execution.kernels.experts.buffer or owners, owners)  # over an even share
  return 1 / max(room, 1)


def _memory(program: Program, topology: Topology, peak: int, temporaries: int) -> Memory:
  state = program.state
  parameters, optimizer, batch = (
    bytes_per_device(tree) for tree in ((state.params, state.buffers), state.opt_state, program.batch)
  )
  there = topology.chip.hbm_bytes // topology.chip.devices
  return Memory(parameters, optimizer, batch, temporaries, peak, there)


def bytes_per_device(tree: Any) -> int:
  """What one device holds of a tree of shapes."""
  return sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _needed_bytes(message: str) -> int:
  """The bytes that the compiler says it would need; other failures are passed on."""
  units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
  found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", message)
  if not found:
    raise RuntimeError(message)
  return int(float(found[1]) * units[found[2]])


def _merge_operations(operations: Sequence[Operation]) -> list[Operation]:
  joined: dict[tuple[str, str, bool], Operation] = {}
  for o in operations:
    name = "compute" if o.kind == "compute" else o.name
    old = joined.get((name, o.source, o.recomputed))
    seconds, moved = (old.seconds, old.bytes) if old else (0.0, 0)
    joined[name, o.source, o.recomputed] = Operation(
      name, o.kind, o.source, o.times, seconds + o.seconds, moved + o.bytes, o.axes, o.recomputed
    )
  return sorted(joined.values(), key=lambda o: -o.seconds)
