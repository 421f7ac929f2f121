"""What an instruction of a program for GPUs costs: the compiler writes no estimate of its own beside it.

FLOPs are those of matmuls, which are cuBLAS calls or within fusions, and of cuDNN's attention; bytes are those of
operands and results.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from maxtext.planner.hlo import ArrayType, CompiledProgram, Computation, Instruction, called_computations
from maxtext.planner.memory_traffic import bytes_moved

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]')
_MATMULS_OF_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}  # the latter computes scores again
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]')
_WINDOW = re.compile(r'"sliding_window_length": ?(\d+)')


@dataclass(frozen=True)
class GpuCost:
  """The cost of one run of an instruction.

  Attributes:
    flops: of its matmuls.
    dtypes: of their operands, as XLA names them.
    bytes: that it moves from and to the GPU's memory.
    kernel: the name of a library's attention kernel; None for what is a matmul, or no matmul.
  """

  flops: float
  dtypes: frozenset[str]
  bytes: int
  kernel: str | None = None


def gpu_cost(program: CompiledProgram, computation: Computation, i: Instruction) -> GpuCost:
  """The cost of an instruction of a computation."""
  if i.opcode != "custom-call":
    products = list(_products(program, computation, i))
    dtypes = frozenset(a.dtype for _, operands in products for a in operands)
    return GpuCost(sum(flops for flops, _ in products), dtypes, bytes_moved(program, computation, i))
  operands = _operands(computation, i)
  results = [a for a in i.arrays if a.dtype not in ("s8", "u8") or len(a.shape) > 1]  # others are buffers to work in
  moved = sum(a.bytes for a in (*operands, *results))
  if matmuls := _MATMULS_OF_ATTENTION.get(_target(i)):
    return GpuCost(matmuls * _attention(i, operands), frozenset({operands[0].dtype}), moved, _target(i))
  products = list(_products(program, computation, i))
  return GpuCost(sum(flops for flops, _ in products), frozenset(a.dtype for a in operands[:2]), moved)


def _products(
  program: CompiledProgram, computation: Computation, i: Instruction
) -> Iterator[tuple[float, list[ArrayType]]]:
  """The matmuls of an instruction and of what is fused with it: FLOPs and operands."""
  if i.opcode == "dot" or (i.opcode == "custom-call" and _target(i).startswith("__cublas$")):
    found = _CONTRACTED.search(i.rest)
    assert found, f"{i.name}: a matmul has contracted dimensions"
    operands = _operands(computation, i)[:2]
    contracted = prod(operands[0].shape[int(d)] for d in found[1].replace('"', "").split(",") if d)
    yield 2.0 * prod(i.arrays[0].shape) * contracted, operands
  elif i.opcode == "fusion":
    for target in called_computations(i):
      inside = program.computations[target]
      for j in inside.instructions:
        yield from _products(program, inside, j)


def _operands(computation: Computation, i: Instruction) -> list[ArrayType]:
  return [a for o in i.operands if o in computation.by_name for a in computation.by_name[o].arrays]


def _target(i: Instruction) -> str:
  found = _TARGET.search(i.rest)
  return found[1] if found else ""


def _attention(i: Instruction, operands: list[ArrayType]) -> float:
  """FLOPs of one matmul of queries and keys: of a causal mask half, of a window what it shows."""
  found = _SCORES.search(i.rest)
  assert found, f"{i.name}: attention has a shape of scores"
  *heads, queries, keys = (int(d) for d in re.findall(r"\d+", found[1]))
  window = _WINDOW.search(i.rest)
  seen = float(keys)
  if window and int(window[1]):
    seen = min(seen, float(window[1]))
  elif '"mask_type": "CAUSAL"' in i.rest or '"mask_type":"CAUSAL"' in i.rest:
    seen /= 2
  return 2.0 * prod(heads) * queries * seen * operands[0].shape[-1]
