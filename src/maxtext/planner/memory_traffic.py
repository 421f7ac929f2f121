"""Bytes that a compiled program moves from and to a chip's memory, read from its schedule.

Operands and results of an instruction count once each, unless they are in on-chip memory. A fusion that slices an
operand reads the slice; one that updates a part writes that part. A Pallas call has its own cost estimate.
"""

import re
from collections.abc import Iterator

from maxtext.planner.hlo import ArrayType, CompiledProgram, Computation, Instruction, called_computations, tuple_parts

_NO_TRAFFIC = (
  "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call", "call-start",
  "after-all", "partition-id", "replica-id", "iota",
)  # fmt: skip
_TYPED_ARRAY = re.compile(r"(?<!\w)([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_ESTIMATE = re.compile(r'"bytes_accessed":"(\d+)"')
_PARTS = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is the part


def memory_traffic(program: CompiledProgram) -> Iterator[tuple[Instruction, int]]:
  """Instructions with the bytes that each moves in one run, without branches of conditionals."""
  owner = {id(i): c for c in program.computations.values() for i in c.instructions}
  for instruction, times in program.walk():
    if moved := bytes_moved(program, owner[id(instruction)], instruction) * times:
      yield instruction, moved


def bytes_moved(program: CompiledProgram, computation: Computation, i: Instruction) -> int:
  """Bytes that one run of an instruction of a computation moves."""
  if i.opcode in _NO_TRAFFIC or i.opcode.endswith("-done"):
    return 0
  if i.opcode == "custom-call":
    return own_estimate(i)
  operands = [computation.by_name[o] for o in i.operands if o in computation.by_name]
  if i.opcode == "fusion":
    inside = program.computations[called_computations(i)[0]]
    taken = sum(
      min(_bytes_read(program, inside, n), size) for n, o in enumerate(operands) if (size := _hbm_bytes(o.type))
    )
    return taken + _bytes_written(program, inside, inside.instructions[-1], i.type)
  if i.opcode in _PARTS:
    return 2 * _hbm_bytes(i.type)
  if i.opcode in ("slice-start", "dynamic-slice-start"):  # its type: operand, part, flag
    whole, part = _TYPED_ARRAY.findall(i.type)[:2]
    return _size(part) * sum("S(" not in place for *_, place in (whole, part))
  if i.opcode == "copy-start":  # its type: result, operand, flag
    return _hbm_bytes(i.type)
  if i.opcode in _UPDATES:
    return 2 * _hbm_bytes(operands[_UPDATES[i.opcode]].type)
  result = (
    max((_size(t) for t in _arrays_in_hbm(i.type)), default=0) if i.opcode.endswith("-start") else _hbm_bytes(i.type)
  )
  return result + sum(_hbm_bytes(o.type) for o in operands)


def own_estimate(i: Instruction) -> int:
  """Bytes that a Pallas call says it moves; 0 if it says nothing."""
  found = _ESTIMATE.search(i.rest)
  return int(found[1]) if found else 0


def _bytes_read(program: CompiledProgram, inside: Computation, number: int) -> int:
  """Bytes that a fusion reads of one of its parameters; fusions may be nested."""
  [parameter] = [i for i in inside.instructions if i.opcode == "parameter" and int(i.operands[0]) == number]
  whole = sum(a.bytes for a in parameter.arrays)
  read, names = 0, [parameter.name]
  for use in inside.instructions:
    taken = [place for place, name in enumerate(use.operands) if name in names]
    if not taken or use.opcode == "parameter":
      continue
    if _is_view(program, use):
      names.append(use.name)
    elif use.opcode == "fusion":
      read += sum(_bytes_read(program, program.computations[called_computations(use)[0]], place) for place in taken)
    elif use.opcode in _PARTS and taken == [0]:
      read += sum(a.bytes for a in use.arrays)
    elif not (use.opcode in _UPDATES and taken == [0]):
      read += whole
  return whole if inside.instructions[-1].name in names else read


def _is_view(program: CompiledProgram, use: Instruction) -> bool:
  """Whether an instruction within a fusion gives an array in another form, of which a later one may take a part."""
  if use.opcode == "fusion":
    [target] = called_computations(use)
    return all(i.opcode == "parameter" or _is_view(program, i) for i in program.computations[target].instructions)
  return use.opcode in ("bitcast", "copy")


def _bytes_written(program: CompiledProgram, inside: Computation, root: Instruction, written: str) -> int:
  """Bytes of this type that a fusion writes by this instruction."""
  if root.opcode == "tuple":
    results = zip(root.operands, tuple_parts(written), strict=True)
    return sum(_bytes_written(program, inside, inside.by_name[name], part) for name, part in results)
  if _is_view(program, root):
    return _bytes_written(program, inside, inside.by_name[root.operands[0]], written)
  if root.opcode in _UPDATES:
    return sum(a.bytes for a in inside.by_name[root.operands[_UPDATES[root.opcode]]].arrays)
  return _hbm_bytes(written)


def _arrays_in_hbm(text: str) -> list[tuple[str, str, str]]:
  return [found for found in _TYPED_ARRAY.findall(text) if "S(" not in found[2]]


def _size(placed: tuple[str, str, str]) -> int:
  dtype, dims, _ = placed
  return ArrayType(dtype, tuple(map(int, filter(None, dims.split(","))))).bytes


def _hbm_bytes(text: str) -> int:
  """Bytes of the arrays of a type that are in HBM."""
  return sum(map(_size, _arrays_in_hbm(text)))
