"""Memory and speed of a run, estimated from its train step compiled for the target topology."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.layers.execution import ExecutionConfig
from maxtext.mesh.rules import mesh_axes_of, num_shards_of
from maxtext.mesh.topology import Topology
from maxtext.models.flops import train_flops_per_token
from maxtext.planner.advice import WORTH_MENTIONING, advice
from maxtext.planner.calibration import CALIBRATION, Accuracy, accuracy, run_kind
from maxtext.planner.compile import program_for
from maxtext.planner.compiled_step import CompiledStep
from maxtext.planner.cost_model import forward_costs, policy_that_fits, saved_bytes
from maxtext.planner.estimate import Estimate, Operation, estimate
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.kept_steps import find_step
from maxtext.planner.kernel_blocks import kernel_efficiency
from maxtext.planner.schedule import Schedule, schedule
from maxtext.planner.torus import TorusSide, torus_sides
from maxtext.status_line import show_phase
from maxtext.training.program import Program
from maxtext.training.state import bytes_per_device

if TYPE_CHECKING:  # engine and rollouts take a second to import, which other plans do not wait for
  from maxtext.planner.rollouts import RolloutPlan


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
  torus: Sequence[TorusSide] = ()
  policy: tuple[str, int] | None = None  # a remat_policy that saves more and fits, and the bytes it saves beside
  rollouts: "RolloutPlan | None" = None  # of policy optimization
  accuracy: Accuracy | None = None  # of estimates for such runs on such chips

  @property
  def fits(self) -> bool:
    """Whether the step, and what generates beside it, fits into the device's memory."""
    return self.memory.peak <= self.memory.there and (self.rollouts is None or self.rollouts.fits)

  @property
  def least_seconds(self) -> float:
    """A lower bound of the step time: the model's FLOPs at the chip's peak."""
    return self.model_flops / self.peak_flops

  @property
  def seconds_per_step(self) -> float:
    """The estimated time of a step, with its share of rollouts; 0 without an estimate."""
    own = self.estimate.seconds if self.estimate else 0.0
    return own if self.rollouts is None else own * self.rollouts.batch_seconds / self.rollouts.update_seconds

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
    """The most expensive operations, merged by label."""
    return _merge_operations(self.estimate.operations if self.estimate else ())[:count]

  def advice(self) -> list[str]:
    """What would make the step faster, by the plan's numbers: at most three sentences."""
    return advice(self)

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
      "expected_error": self.accuracy.as_json() if self.accuracy else None,
      "collectives": [
        {"kind": kind, "axes": list(axes), "bytes": moved} for (kind, axes), moved in self.collectives().items()
      ],
      "most_expensive": [asdict(o) for o in self.most_expensive()],
      "advice": self.advice(),
      "compile_seconds": self.compile_seconds,
    } | ({"rollouts": self.rollouts.as_json()} if self.rollouts else {})


def plan(config: MaxTextConfig, *, config_name: str = "", cache: Path | None = None, quick: bool = False) -> Plan:
  """Compiles the train step for `compile_topology` and estimates its memory and time: `maxtext.plan`.

  No device of that topology is needed. Without JAX's CUDA plugin, memory and time of GPUs are lower bounds.

  Args:
    config: a run with `compile_topology`, such as "v5p-128".
    config_name: what to call it; empty is `model_name`.
    cache: a folder of compiled steps, in which this one is found or kept.
    quick: compile the train step only as far as the schedule, and take times from FLOPs and bytes.

  Raises:
    ConfigError: (a ValueError) there is no `compile_topology`, or the run does not fit to its mesh.
  """
  program, topology = program_for(config)
  mesh, chip = program.model.execution.sharding.mesh, topology.chip
  if quick and topology.gpu:
    raise ConfigError("--quick is for TPUs: leave it out.")
  step = find_step(program, topology, cache, quick=quick) if topology.compiles else None
  rows, length = program.batch.inputs.shape
  chips = mesh.size // chip.devices
  memory = _memory(program, topology, step.peak, step.temporaries) if step else _memory_lower_bound(program, topology)
  found = _estimate(program, topology, step, cache, quick) if step else None
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
    step.seconds if step else 0.0,
    found,
    topology.compiles,
    () if topology.gpu else torus_sides(mesh, topology),
    policy_that_fits(program, memory.there - memory.peak)
    if found and found.recomputed_share >= WORTH_MENTIONING
    else None,
    _rollouts(config, topology, program, found, memory.peak),
    accuracy(topology.name, run_kind(config), quick) if found else None,
  )


def step_schedule(
  program: Program, topology: Topology, step: CompiledStep, cache: Path | None = None, *, blocks: bool = True
) -> Schedule | None:
  """The schedule of a compiled step, with its kernels at their blocks, or as if these were the default; None if it does
  not fit."""
  if step.text is None:
    return None
  show_phase("compiling the kernels of attention at their blocks")
  execution = program.model.execution
  return schedule(
    CompiledProgram.parse(step.text),
    topology,
    execution.sharding.mesh,
    filled_rows(program.config, execution),
    kernel_efficiency(program, topology, cache) if blocks else {},
  )


def filled_rows(config: MaxTextConfig, execution: ExecutionConfig) -> float:
  """The fraction of a device's expert rows that hold a token if tokens are spread evenly over experts."""
  owners = num_shards_of(
    execution.sharding.mesh, mesh_axes_of(execution.sharding.partition((config.num_experts,), "activation_expert")[0])
  )
  return 1 / max(execution.kernels.experts.room(owners), 1)


def _rollouts(
  config: MaxTextConfig, topology: Topology, program: Program, found: Estimate | None, peak: int
) -> "RolloutPlan | None":
  """Those of policy optimization, where its step could be compiled."""
  if not config.use_grpo or found is None:
    return None
  from maxtext.planner.rollouts import plan_rollouts

  return plan_rollouts(config, topology, program, found.seconds, peak)


def _estimate(
  program: Program, topology: Topology, step: CompiledStep, cache: Path | None, quick: bool
) -> Estimate | None:
  work = step_schedule(program, topology, step, cache, blocks=not quick)
  return estimate(work, CALIBRATION[topology.name]) if work else None


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


def _memory(program: Program, topology: Topology, peak: int, temporaries: int) -> Memory:
  state = program.state
  parameters, optimizer, batch = (
    bytes_per_device(tree) for tree in ((state.params, state.buffers), state.opt_state, program.batch)
  )
  there = topology.chip.hbm_bytes // topology.chip.devices
  return Memory(parameters, optimizer, batch, temporaries, peak, there)


def _merge_operations(operations: Sequence[Operation]) -> list[Operation]:
  """Sums operations that have the same label and mesh axes; the source is that of the most expensive."""
  merged: dict[tuple[str, str, tuple[str, ...]], list[Operation]] = {}
  for o in operations:
    merged.setdefault(("" if o.kind == "compute" else o.name, o.label, o.axes), []).append(o)
  sums = (
    replace(
      max(same, key=lambda o: o.seconds),
      name="compute" if same[0].kind == "compute" else same[0].name,
      seconds=sum(o.seconds for o in same),
      bytes=sum(o.bytes for o in same),
    )
    for same in merged.values()
  )
  return sorted(sums, key=lambda o: -o.seconds)
