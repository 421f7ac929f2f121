"""Block sizes of attention kernels, chosen by the compiler's schedules.

Each block costs some hundred cycles beside its matmuls, so larger blocks cost less; smaller blocks skip more of what a
mask hides. Kernels are compiled alone in a subprocess, since the compiler writes schedules only if that was set before
it was loaded.
"""

import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs.types import SplashAttention
from maxtext.kernels.attention import AttentionKernel
from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.splash_attention import SplashBlocks, seen_blocks
from maxtext.layers.attention import GQA
from maxtext.layers.mla import MLA
from maxtext.mesh.compiler import compiler_options
from maxtext.mesh.topology import Topology
from maxtext.planner.compiled_step import compiler_versions
from maxtext.planner.kernel_schedule import KernelSchedule
from maxtext.storage.atomic import atomic_file
from maxtext.training.program import Program

# Block sizes of queries, of keys, and of keys in one matmul.
SIZES = (
  (512, 512, 512),
  (512, 1024, 512),
  (1024, 512, 512),
  (1024, 1024, 512),
  (1024, 1024, 1024),
  (1024, 2048, 512),
  (2048, 2048, 512),
)


@dataclass(frozen=True)
class AttentionShape:
  """The shapes and mask of the attention of some layers."""

  query_width: int
  value_width: int
  scoring: ScoreSpec
  sinks: bool


@dataclass(frozen=True)
class Cost:
  """FLOPs and cycles of a kernel for one head of every layer."""

  flops: float
  cycles: float


def kernel_efficiency(program: Program, topology: Topology, cache: Path | None = None) -> dict[str, float]:
  """The FLOP/s of each kernel relative to default blocks; empty if the run has default blocks, or if these do not
  divide its rows. The folder `cache` keeps what was compiled for it."""
  blocks, shapes, default = program.model.execution.kernels.attention.blocks, attention_shapes(program), SplashBlocks()
  length = program.config.max_target_length
  if blocks == default or not shapes or length % min(default.q, length):
    return {}
  ours, plain = _costs(program, topology, shapes, [blocks, default], cache)
  return {name: ours[name].flops / ours[name].cycles * plain[name].cycles / plain[name].flops for name in ours}


def best_blocks(program: Program, topology: Topology) -> dict[str, int]:
  """The block keys with the fewest cycles of each kernel, without those that the run has already.

  Whether the backward pass is fused is not changed: fusing saves time in the kernel and costs as much outside it.
  """
  shapes, length = attention_shapes(program), program.config.max_target_length
  fused = program.config.sa_use_fused_bwd_kernel
  tried = [_blocks(*size, fused) for size in SIZES if all(length % part == 0 for part in size)]
  if not shapes or not tried:
    return {}
  costs = _costs(program, topology, shapes, tried)
  keys: dict[str, int] = {}
  for name, kernel in _kernels(fused).items():
    known = [(cost[name].cycles, i) for i, cost in enumerate(costs) if name in cost]
    if known:
      keys |= {_KEYS[field]: getattr(tried[min(known)[1]], field) for field in kernel.fields}
  return {key: size for key, size in keys.items() if size != getattr(program.config, key)}


def attention_shapes(program: Program) -> dict[AttentionShape, int]:
  """The attention shapes that the splash kernel computes, each with its number of layers."""
  found: dict[AttentionShape, int] = {}
  if program.model.execution.kernels.attention.kernel == "splash":
    for group in program.model.spec.groups:
      for kind in filter(None, (_attention_shape(block.mixer) for block in group.cycle)):
        found[kind] = found.get(kind, 0) + group.repeats
  return found


@dataclass(frozen=True)
class _Kernel:
  """A kernel's fields of `SplashBlocks`, and its number of matmuls over the width of queries and of values."""

  fields: tuple[str, ...]
  by_query: int
  by_value: int
  keys_down: bool = False  # rows of its grid are blocks of keys


_FORWARD = _Kernel(("q", "kv", "kv_compute"), 1, 1)
_SEPARATE = {
  "fwd": _FORWARD,
  "dq": _Kernel(("q_dq", "kv_dq"), 2, 1),
  "dkv": _Kernel(("q_dkv", "kv_dkv", "kv_dkv_compute"), 2, 2, keys_down=True),
}
_FUSED = {"fwd": _FORWARD, "dkv": replace(_SEPARATE["dkv"], by_query=3)}
_PROCESSES = 2  # processes that compile
_HEADS = 4  # that are compiled: more than a device has cores, so that there is a loop
_KERNEL_FLAGS = ("vmem", "mosaic")  # in names of compiler flags that a kernel's program may depend on
_KEYS = dict(zip((field.name for field in fields(SplashBlocks)), SplashAttention.model_fields, strict=False))


@dataclass(frozen=True)
class _CompileJob:
  """Kernels to compile, for a process of its own."""

  topology: Topology
  shape: AttentionShape
  blocks: SplashBlocks
  length: int
  dtype: str
  segments: bool
  flags: str

  def file(self, folder: Path) -> Path:
    """Where their schedules are kept: by all that they depend on, which of the hardware is the chip alone."""
    about = [self.topology.name, str(replace(self, topology=None)), compiler_versions()]  # type: ignore[arg-type]
    return folder / f"kernels-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]}.json"


def _attention_shape(mixer: Any) -> AttentionShape | None:
  if isinstance(mixer, GQA) and mixer.blocks is None:
    return AttentionShape(mixer.head_dim, mixer.head_dim, mixer.scoring, mixer.sinks)
  if isinstance(mixer, MLA) and (mixer.indexer is None or not mixer.indexer.selects):
    return AttentionShape(mixer.key_dim, mixer.v_head_dim, mixer.scoring, sinks=False)
  return None


def _kernels(fused: bool) -> Mapping[str, _Kernel]:
  return _FUSED if fused else _SEPARATE


def _blocks(q: int, kv: int, compute: int, fused: bool) -> SplashBlocks:
  return SplashBlocks(q, kv, compute, q, kv, compute, q, kv, fused)


def _costs(
  program: Program,
  topology: Topology,
  shapes: Mapping[AttentionShape, int],
  tried: Sequence[SplashBlocks],
  cache: Path | None = None,
) -> list[dict[str, Cost]]:
  """The costs of every choice of blocks, by kernel; empty for a choice that does not fit into on-chip memory."""
  config = program.config
  job = partial(
    _CompileJob,
    topology,
    length=config.max_target_length,
    dtype=jnp.dtype(program.model.execution.numerics.dtype).name,
    segments=program.batch.segments is not None,
    flags=" ".join(flag for flag in config.compile_xla_flags.split() if any(word in flag for word in _KERNEL_FLAGS)),
  )
  jobs = [[job(kind, blocks) for kind in shapes] for blocks in tried]
  found = _schedules([one for choice in jobs for one in choice], cache)
  return [
    {
      name: _cost(name, [(layers, one, found[one]) for layers, one in zip(shapes.values(), choice, strict=True)])
      for name in _kernels(blocks.fused_backward)
      if all(found[one] for one in choice)
    }
    for blocks, choice in zip(tried, jobs, strict=True)
  ]


def _cost(name: str, kinds: Sequence[tuple[int, _CompileJob, Mapping[str, KernelSchedule]]]) -> Cost:
  """Of a kernel over layers of several kinds, each with their number."""
  done = cycles = 0.0
  for layers, job, schedules in kinds:
    chip, length, kind = job.topology.chip, job.length, job.shape
    kernel = _kernels(job.blocks.fused_backward)[name]
    q, kv = (min(getattr(job.blocks, field), length) for field in kernel.fields[:2])
    by_segments = kind.scoring.chunked and job.segments  # compared in the kernel, which skips no block then
    seen = seen_blocks(ScoreSpec(1.0) if by_segments else kind.scoring, length, q, kv)
    grid = seen.T if kernel.keys_down else seen
    flops = 2.0 * (kernel.by_query * kind.query_width + kernel.by_value * kind.value_width) * q * kv
    steps = len(grid) * int(grid.sum(1).max())
    least = flops * chip.clock * chip.devices * chip.cores / chip.flops
    cycles += layers * schedules[name].cycles(len(grid), steps, int(seen.sum()), least)
    done += layers * int(seen.sum()) * flops
  return Cost(done, cycles)


def _schedules(jobs: Sequence[_CompileJob], cache: Path | None) -> dict[_CompileJob, dict[str, KernelSchedule]]:
  """The schedules of the kernels of every job by their names, of one that does not fit none: kept ones, and others
  compiled."""
  found = {job: kept for job in jobs if cache and (kept := _read(job.file(cache))) is not None}
  missing = [job for job in jobs if job not in found]
  if not missing:
    return found
  spawned = multiprocessing.get_context("spawn")
  with (
    tempfile.TemporaryDirectory() as folder,
    ProcessPoolExecutor(_PROCESSES, spawned, _write_schedules, (folder,)) as pool,
  ):
    for job, schedules in zip(missing, pool.map(partial(_compile_kernels, folder), missing), strict=True):
      found[job] = schedules
      if cache:
        _keep(job.file(cache), schedules)
  return found


def _read(file: Path) -> dict[str, KernelSchedule] | None:
  if not file.exists():
    return None
  return {name: KernelSchedule(**cycles) for name, cycles in json.loads(file.read_text()).items()}


def _keep(file: Path, schedules: Mapping[str, KernelSchedule]) -> None:
  file.parent.mkdir(parents=True, exist_ok=True)
  with atomic_file(file, unfinished=file.with_suffix(f".{os.getpid()}")) as target:
    target.write(json.dumps({name: asdict(one) for name, one in schedules.items()}).encode())


def _write_schedules(folder: str) -> None:
  """Lets the compiler of this process, which has not loaded it yet, write schedules."""
  jax.config.update("jax_enable_compilation_cache", False)
  own = _own_folder(folder)
  own.mkdir()
  dump = {"to": own, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
  flags = " ".join(f"--xla_jf_dump_{name}={value}" for name, value in dump.items())
  os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"


def _own_folder(folder: str) -> Path:
  return Path(folder) / str(os.getpid())


def _compile_kernels(folder: str, job: _CompileJob) -> dict[str, KernelSchedule]:
  device, kind, own = job.topology.devices()[0], job.shape, _own_folder(folder)
  mesh = Mesh(np.array([device]), ("one",))
  attend, whole = AttentionKernel("splash", blocks=job.blocks), PartitionSpec(None, None, None, None)
  sharding = AttentionSharding(mesh, whole, whole)

  def total(floats: list[jax.Array], positions: jax.Array, segments: jax.Array | None) -> jax.Array:
    q, k, v, *sinks = floats
    inputs = AttentionInputs(q, k, v, Tokens(positions, segments), *sinks)
    return attend(inputs, kind.scoring, sharding).astype(jnp.float32).sum()

  def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

  rows = (1, job.length)
  floats = [
    struct((*rows, _HEADS, width), job.dtype) for width in (kind.query_width, kind.query_width, kind.value_width)
  ] + [struct((_HEADS,), jnp.float32)] * kind.sinks
  tokens = struct(rows, jnp.int32)
  for file in own.iterdir():
    file.unlink()
  step = jax.jit(jax.grad(total), compiler_options=compiler_options(device, job.flags))
  try:
    step.lower(floats, tokens, tokens if job.segments else None).compile()
  except jax.errors.JaxRuntimeError as error:
    if "vmem" not in str(error).lower():
      raise
    return {}
  kernels = _kernels(job.blocks.fused_backward)
  files = {name: next(own.glob(f"*-splash_mha_{name}_*[0-9]-final_bundles.txt")) for name in kernels}
  return {name: KernelSchedule.parse(file.read_text()) for name, file in files.items()}
