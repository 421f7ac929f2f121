"""Bytes that a compiled TPU program moves from and to a chip's memory, read from its schedule.

What an instruction takes and gives counts once each, unless it lies in on-chip memory. A fusion that slices an operand
reads the slice; one that updates a part writes that part. A Pallas call moves what its author estimated.
"""

import re
from collections.abc import Iterator

from maxtext.plan.hlo import ArrayType, CompiledProgram, Computation, Instruction, called

_NO_TRAFFIC = (
  "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call", "call-start",
  "after-all", "partition-id", "replica-id", "iota",
)  # fmt: skip
_PLACED = re.compile(r"(?<!\w)([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_ESTIMATE = re.compile(r'"bytes_accessed":"(\d+)"')
_PARTS = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is the part


def traffic(program: CompiledProgram) -> Iterator[tuple[Instruction, int]]:
  """Instructions with the bytes that each moves in one run; branches of conditions are left out."""
  owner = {id(i): c for c in program.computations.values() for i in c.instructions}
  for instruction, times in program.walk():
    if instruction.opcode in _NO_TRAFFIC or instruction.opcode.endswith("-done"):
      continue
    if moved := _moved(program, owner[id(instruction)], instruction) * times:
      yield instruction, moved


def _moved(program: CompiledProgram, computation: Computation, i: Instruction) -> int:
  if i.opcode == "custom-call":
    found = _ESTIMATE.search(i.rest)
    return int(found[1]) if found else 0
  operands = [computation.by_name[o] for o in i.operands if o in computation.by_name]
  if i.opcode == "fusion":
    inside = program.computations[called(i)[0]]
    taken = sum(min(_taken(program, inside, n), size) for n, o in enumerate(operands) if (size := _in_memory(o.type)))
    return taken + _given(inside, inside.instructions[-1], i)
  if i.opcode in _PARTS:
    return 2 * _in_memory(i.type)
  if i.opcode in ("slice-start", "dynamic-slice-start"):  # its type is that of the operand, of the part, and of a flag
    whole, part = _PLACED.findall(i.type)[:2]
    return _size(part) * sum("S(" not in place for *_, place in (whole, part))
  if i.opcode == "copy-start":  # of what it writes, of the operand, and of a flag
    return _in_memory(i.type)
  if i.opcode in _UPDATES:
    return 2 * _in_memory(operands[_UPDATES[i.opcode]].type)
  result = max((_size(t) for t in _placed(i.type)), default=0) if i.opcode.endswith("-start") else _in_memory(i.type)
  return result + sum(_in_memory(o.type) for o in operands)


def _taken(program: CompiledProgram, inside: Computation, number: int) -> int:
  """Bytes that a fusion reads of one of its parameters; fusions may hold others."""
  [parameter] = [i for i in inside.instructions if i.opcode == "parameter" and int(i.operands[0]) == number]
  whole = sum(a.bytes for a in parameter.arrays)
  read, names = 0, [parameter.name]
  for use in inside.instructions:
    taken = [place for place, name in enumerate(use.operands) if name in names]
    if not taken or use.opcode == "parameter":
      continue
    if use.opcode == "bitcast":
      names.append(use.name)
    elif use.opcode == "fusion":
      read += sum(_taken(program, program.computations[called(use)[0]], place) for place in taken)
    elif use.opcode in _PARTS and taken == [0]:
      read += sum(a.bytes for a in use.arrays)
    elif not (use.opcode in _UPDATES and taken == [0]):
      read += whole
  return whole if inside.instructions[-1].name in names else read


def _given(inside: Computation, root: Instruction, i: Instruction) -> int:
  """What a fusion writes."""
  if root.opcode == "bitcast":
    return _given(inside, inside.by_name[root.operands[0]], i)
  if root.opcode in _UPDATES:
    return sum(a.bytes for a in inside.by_name[root.operands[_UPDATES[root.opcode]]].arrays)
  return _in_memory(i.type)


def _placed(text: str) -> list[tuple[str, str, str]]:
  return [found for found in _PLACED.findall(text) if "S(" not in found[2]]


def _size(placed: tuple[str, str, str]) -> int:
  dtype, dims, _ = placed
  return ArrayType(dtype, tuple(map(int, filter(None, dims.split(","))))).bytes


def _in_memory(text: str) -> int:
  """Bytes of the arrays of a type that lie in the chip's main memory."""
  return sum(map(_size, _placed(text)))
