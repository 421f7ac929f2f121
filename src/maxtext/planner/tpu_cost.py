"""What an instruction for TPUs costs by its FLOPs and bytes, where the compiler has not estimated its cycles."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from maxtext.planner.hlo import ArrayType, CompiledProgram, Computation, Instruction, called_computations
from maxtext.planner.memory_traffic import bytes_moved

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_MATMULS = ("convolution", "dot")  # the compiler writes matmuls as convolutions


@dataclass(frozen=True)
class TpuCost:
  """FLOPs of the matmuls of one run of an instruction, dtypes of their operands, and bytes from and to the HBM."""

  flops: float
  dtypes: frozenset[str]
  bytes: int


def tpu_cost(program: CompiledProgram, computation: Computation, i: Instruction) -> TpuCost:
  """The cost of an instruction of a computation."""
  products = list(_products(program, computation, i))
  dtypes = frozenset(a.dtype for _, operands in products for a in operands)
  return TpuCost(sum(flops for flops, _ in products), dtypes, bytes_moved(program, computation, i))


def _products(
  program: CompiledProgram, computation: Computation, i: Instruction
) -> Iterator[tuple[float, list[ArrayType]]]:
  """The matmuls of an instruction and of what is fused with it: FLOPs and operands.

  Of a matmul [M,K] x [K,N] the three arrays have (MKN) ** 2 elements together, however their dimensions are divided.
  """
  if i.opcode in _MATMULS:
    operands = [computation.by_name[o].arrays[0] for o in i.operands[:2]]
    arrays = (*operands, i.arrays[0])
    yield 2.0 * math.sqrt(prod(prod(a.shape) for a in arrays) / _batch(i, arrays)), operands
  elif i.opcode == "fusion":
    for target in called_computations(i):
      inside = program.computations[target]
      for j in inside.instructions:
        yield from _products(program, inside, j)


def _batch(i: Instruction, arrays: tuple[ArrayType, ...]) -> int:
  """Matmuls in one: of a convolution, spatial dimensions that operands and result have."""
  labels = _LABELS.search(i.rest)
  if not labels:
    return 1
  sizes = [dict(zip(names, a.shape, strict=True)) for names, a in zip(labels.groups(), arrays, strict=True)]
  spatial = (tuple(of[label] for of in sizes) for label in sizes[0] if label.isdigit())
  return prod(size[0] for size in spatial if len(set(size)) == 1)
