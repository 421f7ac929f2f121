"""Blocks of attention's kernels, by the compiler's own schedules of them.

Larger blocks are fewer, and each costs some hundred cycles beside its products; smaller ones leave out more of what a
mask hides. Kernels are compiled alone, in a process of their own, since only a compiler that was told so before it was
loaded writes schedules down.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs.types import SplashAttention
from maxtext.kernels.attention import Attention
from maxtext.kernels.scores import Scoring, Tokens
from maxtext.kernels.splash import SplashBlocks
from maxtext.layers.attention import GQA
from maxtext.layers.mla import MLA
from maxtext.mesh.compiler import compiler_options
from maxtext.mesh.topology import Topology
from maxtext.plan.schedule import Schedule
from maxtext.train.program import Program

# Queries, keys, and keys per product.
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
class Attended:
  """Attention of some of a model's layers."""

  query_width: int
  value_width: int
  scoring: Scoring
  sinks: bool


@dataclass(frozen=True)
class Cost:
  """Operations of a kernel's products for one head of every layer, and the cycles that it takes."""

  flops: float
  cycles: float


def reach(program: Program, topology: Topology) -> dict[str, float]:
  """How many times as fast as with default blocks each kernel multiplies; nothing where the run has those."""
  blocks, attended = program.model.how.attention.blocks, attention_of(program)
  if blocks == SplashBlocks() or not attended:
    return {}
  ours, plain = _costs(program, topology, attended, [blocks, SplashBlocks()])
  return {name: ours[name].flops / ours[name].cycles * plain[name].cycles / plain[name].flops for name in ours}


def best_blocks(program: Program, topology: Topology) -> dict[str, int | bool]:
  """Keys of the blocks with which kernels take the fewest cycles, where they are not those of the run."""
  attended, length = attention_of(program), program.config.max_target_length
  sizes = [size for size in SIZES if all(length % part == 0 for part in size)]
  if not attended or not sizes:
    return {}
  tried = [_blocks(*size, fused) for fused in (False, True) for size in sizes]
  costs = _costs(program, topology, attended, tried)
  choices = []
  for fused in (False, True):
    cycles, keys = 0.0, {_KEYS["fused_backward"]: fused}
    for name, kernel in _kernels(fused).items():
      known = [(c[name].cycles, i) for i, c in enumerate(costs) if tried[i].fused_backward == fused and name in c]
      fewest, best = min(known, default=(inf, 0))
      cycles += fewest
      keys |= {_KEYS[field]: getattr(tried[best], field) for field in kernel.fields}
    choices.append((cycles, keys))
  keys = min(choices, key=lambda choice: choice[0])[1]
  return {key: value for key, value in keys.items() if value != getattr(program.config, key)}


def attention_of(program: Program) -> dict[Attended, int]:
  """The kinds of attention that the splash kernel computes, with how many layers each has."""
  found: dict[Attended, int] = {}
  if program.model.how.attention.kernel == "splash":
    for group in program.model.spec.groups:
      for kind in filter(None, (_attended(block.mixer) for block in group.cycle)):
        found[kind] = found.get(kind, 0) + group.repeats
  return found


def seen_blocks(scoring: Scoring, length: int, q: int, kv: int) -> np.ndarray:
  """Which blocks of keys each block of queries sees something of, [length/q, length/kv]."""
  queries, first_keys = np.arange(length).reshape(-1, q), np.arange(0, length, kv)
  reach = queries if scoring.window is None else np.minimum(queries, scoring.window - 1)
  if scoring.window is not None and scoring.chunked:
    reach = queries % scoring.window
  first, last = (queries - reach).min(1, keepdims=True), queries.max(1, keepdims=True)
  return (first_keys <= last) & (first_keys + kv > first)


@dataclass(frozen=True)
class _Kernel:
  """A kernel's fields of `SplashBlocks`, and how often it multiplies by queries' and by values' widths."""

  fields: tuple[str, ...]
  by_query: int
  by_value: int
  keys_down: bool = False  # rows of its grid are blocks of keys


_FORWARD = _Kernel(("q", "kv", "kv_compute"), 1, 1)
_APART = {
  "fwd": _FORWARD,
  "dq": _Kernel(("q_dq", "kv_dq"), 2, 1),
  "dkv": _Kernel(("q_dkv", "kv_dkv", "kv_dkv_compute"), 2, 2, keys_down=True),
}
_FUSED = {"fwd": _FORWARD, "dkv": replace(_APART["dkv"], by_query=3)}
_KEYS = dict(zip((field.name for field in fields(SplashBlocks)), SplashAttention.model_fields, strict=False))


@dataclass(frozen=True)
class _Asked:
  """What the process that compiles has to know."""

  topology: Topology
  attended: tuple[Attended, ...]
  tried: tuple[SplashBlocks, ...]
  length: int
  dtype: str
  segments: bool
  flags: str


def _attended(mixer: Any) -> Attended | None:
  if isinstance(mixer, GQA) and mixer.blocks is None:
    return Attended(mixer.head_dim, mixer.head_dim, mixer.scoring, mixer.sinks)
  if isinstance(mixer, MLA) and mixer.indexer is None:
    return Attended(mixer.key_dim, mixer.value_dim, mixer.scoring, sinks=False)
  return None


def _kernels(fused: bool) -> Mapping[str, _Kernel]:
  return _FUSED if fused else _APART


def _blocks(q: int, kv: int, compute: int, fused: bool) -> SplashBlocks:
  return SplashBlocks(q, kv, compute, q, kv, compute, q, kv, fused)


def _costs(
  program: Program, topology: Topology, attended: Mapping[Attended, int], tried: Sequence[SplashBlocks]
) -> list[dict[str, Cost]]:
  """Of every choice of blocks, by kernel; nothing of a choice that does not fit into the chip's own memory."""
  config = program.config
  asked = _Asked(
    topology,
    tuple(attended),
    tuple(tried),
    config.max_target_length,
    jnp.dtype(program.model.how.dtype).name,
    program.batch.segments is not None,
    config.compile_xla_flags,
  )
  with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    found = pool.submit(_schedules, asked).result()
  return [
    {name: _cost(name, blocks, attended, [kind[name] for kind in kinds], asked) for name in kinds[0]}
    for blocks, kinds in zip(tried, found, strict=True)
  ]


def _cost(
  name: str, blocks: SplashBlocks, attended: Mapping[Attended, int], schedules: Sequence[Schedule], asked: _Asked
) -> Cost:
  chip, length = asked.topology.chip, asked.length
  cores_cycles = chip.clock * chip.devices * chip.cores
  kernel, done, cycles = _kernels(blocks.fused_backward)[name], 0.0, 0.0
  q, kv = (min(getattr(blocks, field), length) for field in kernel.fields[:2])
  for (kind, layers), schedule in zip(attended.items(), schedules, strict=True):
    seen = seen_blocks(kind.scoring, length, q, kv)
    grid = seen.T if kernel.keys_down else seen
    flops = 2.0 * (kernel.by_query * kind.query_width + kernel.by_value * kind.value_width) * q * kv
    steps = len(grid) * int(grid.sum(1).max())
    cycles += layers * schedule.cycles(len(grid), steps, int(seen.sum()), flops * cores_cycles / chip.flops)
    done += layers * int(seen.sum()) * flops
    if (
      kernel is _FUSED["dkv"]
    ):  # each block of keys leaves gradients of all queries, which are written, read and summed
      moved = 2 * len(grid) * length * kind.query_width * jnp.dtype(asked.dtype).itemsize
      cycles += layers * moved * cores_cycles / chip.hbm_bandwidth
  return Cost(done, cycles)


def _schedules(asked: _Asked) -> list[list[dict[str, Schedule]]]:
  """For each choice of blocks and each kind of attention, of the kernels by name."""
  jax.config.update("jax_enable_compilation_cache", False)
  with tempfile.TemporaryDirectory() as folder:
    dump = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
    flags = " ".join(f"--xla_jf_dump_{name}={value}" for name, value in dump.items())
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"
    device = asked.topology.devices()[0]
    return [[_compiled(asked, kind, blocks, device, Path(folder)) for kind in asked.attended] for blocks in asked.tried]


def _compiled(
  asked: _Asked, kind: Attended, blocks: SplashBlocks, device: jax.Device, folder: Path
) -> dict[str, Schedule]:
  heads, mesh = 2, Mesh(np.array([device]), ("one",))
  attend, spec = Attention("splash", blocks=blocks), PartitionSpec(None, None, None, None)

  def total(floats: list[jax.Array], positions: jax.Array, segments: jax.Array | None) -> jax.Array:
    q, k, v, *sinks = floats
    tokens = Tokens(positions, segments)
    out = attend(q, k, v, tokens, kind.scoring, *(sinks or (None,)), mesh=mesh, q_spec=spec, kv_spec=spec)
    return out.astype(jnp.float32).sum()

  def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

  rows = (1, asked.length)
  floats = [
    struct((*rows, heads, width), asked.dtype) for width in (kind.query_width, kind.query_width, kind.value_width)
  ] + [struct((heads,), jnp.float32)] * kind.sinks
  tokens = struct(rows, jnp.int32)
  for file in folder.iterdir():
    file.unlink()
  step = jax.jit(jax.grad(total), compiler_options=compiler_options(device, asked.flags))
  try:
    step.lower(floats, tokens, tokens if asked.segments else None).compile()
  except jax.errors.JaxRuntimeError as error:
    if "vmem" not in str(error).lower():
      raise
    return {}
  found = {name: list(folder.glob(f"*-splash_mha_{name}_*[0-9]-final_bundles.txt")) for name in _APART}
  return {name: Schedule.parse(files[0].read_text()) for name, files in found.items() if files}
