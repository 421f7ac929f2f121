"""Parses a compiled program, with the TPU compiler's own cost estimate of each operation.

The scheduled HLO text is parsed into computations. `CompiledProgram` walks them from the entry, and counts a loop body
once per iteration. Pallas calls have no estimate, and the time that a collective waits for the network has none either.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from maxtext.layers.rounds import FURTHER_ROUNDS

_RAGGED = "ragged-all-to-all"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", _RAGGED)

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%([^\s,]+)")
_ARRAY = re.compile(r"(?<![\w])([a-z]\w*)\[([\d,]*)\]")
_BYTES = {
  "pred": 1, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1,
  "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_REDUCE_SCATTER_NAME = "all-reduce-scatter"  # prefix of the names of computations that reduce and keep one shard
_ASYNC_STARTS = ("async-start", "call-start")  # the latter runs on a core of the chip that moves data
# A schedule before code has the last three as the general form, and their names as names of instructions.
_MOVES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start", "async-start")
_HOST = "S(5)"  # the host's memory, in layouts
_FUSED_COLLECTIVES = ("AsyncCollectiveStart", "AsyncCollectiveDone")
_TABLE_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_GROUPS_BY_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?: \{([^}]*)\})?")
_GROUPS_BY_SHAPE = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUPS_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")


@dataclass(frozen=True)
class Instruction:
  """One instruction of a computation."""

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  rest: str  # attributes, metadata, backend configuration
  sent: str = ""  # of a ragged all-to-all: the type of the array it sends, which may be smaller than its output

  @property
  def cycles(self) -> int:
    """The compiler's estimate of cycles; 0 if it has none."""
    found = _CYCLES.search(self.rest)
    return int(found[1]) if found else 0

  @property
  def op_name(self) -> str | None:
    """The operation's name in the traced program; None for instructions that the compiler added."""
    found = _OP_NAME.search(self.rest)
    return found[1] if found else None

  @property
  def collective(self) -> str | None:
    """The kind of collective that starts here, if any."""
    if found := self.opcode == "recv" and _BETWEEN_SLICES.search(self.rest):
      return found[1].lower().replace("_", "-")
    kind = self.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None

  @property
  def between_slices(self) -> bool:
    """Whether it is a collective between slices (DCN), which the compiler writes as a transfer by the hosts."""
    return self.opcode == "recv" and self.collective is not None

  @property
  def arrays(self) -> list["ArrayType"]:
    """The arrays of the result."""
    return array_types(self.type)

  @property
  def operand_arrays(self) -> list["ArrayType"]:
    """The arrays that are arguments of a custom call."""
    found = re.search(r"operand_layout_constraints=\{(.*?\})\}", self.rest)
    return array_types(found[1]) if found else []

  @property
  def bytes(self) -> int:
    """Size of a collective's result: the sum of its arrays. A `-start` has them as the second part of its type, after
    its operands; that of an all-reduce has them alone.

    For a ragged all-to-all, whose buffers may be larger than the data, it is the smaller of input and output.
    """
    arrays = self.arrays
    if self.sent:
      return min(array.bytes for array in (*arrays, *array_types(self.sent)))
    if self.opcode.endswith("-start") and self.opcode != "all-reduce-start":
      arrays = array_types(tuple_parts(self.type)[1])
    return sum(array.bytes for array in arrays)

  @property
  def host_bytes(self) -> int:
    """What is moved to or from the host's memory, if that starts here: of a part of an array, the part."""
    if self.opcode not in _MOVES or _HOST not in self.type:
      return 0
    return min((array.bytes for array in self.arrays if array.shape), default=0)

  @property
  def frame(self) -> int | None:
    """Index of its stack frame in the traced program."""
    found = _FRAME.search(self.rest)
    return int(found[1]) if found else None

  @property
  def channel(self) -> str:
    """The channel of a collective, shared by all instructions of one collective."""
    found = _CHANNEL.search(self.rest)
    return found[1] if found else self.name

  def first_group(self, devices: int) -> np.ndarray:
    """The devices of one replica group of a collective, by index in the program's mesh."""
    if found := _GROUPS_BY_MESH.search(self.rest):
      sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
      names = re.findall(r"'([^']+)'", found[2] or "") or list(sizes)
      ids = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
      grouped = [list(sizes).index(name) for name in names]
      rest = [i for i in range(len(sizes)) if i not in grouped]
      return ids.transpose(*rest, *grouped).reshape(-1, prod(sizes[name] for name in names))[0]
    if found := _GROUPS_BY_SHAPE.search(self.rest):
      count, size, dims, order = int(found[1]), int(found[2]), found[3], found[4]
      ids = np.arange(count * size).reshape([int(d) for d in dims.split(",")])
      return (ids.transpose([int(i) for i in order.split(",")]) if order else ids).reshape(count, size)[0]
    if found := _GROUPS_LISTED.search(self.rest):
      return np.array([int(i) for i in found[1].split(",")])
    return np.arange(devices)


@dataclass(frozen=True)
class ArrayType:
  """Dtype and shape of an array."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def bytes(self) -> int:
    """Size of the array."""
    return int(_BYTES.get(self.dtype, 4) * prod(self.shape))


def array_types(text: str) -> list[ArrayType]:
  """The array types in a text."""
  return [ArrayType(t, tuple(map(int, filter(None, dims.split(","))))) for t, dims in _ARRAY.findall(text)]


@dataclass(frozen=True)
class Transfer:
  """A point of the schedule where a collective starts, ends, or runs synchronously (both).

  Attributes:
    collective: the collective's instruction.
    key: shared by the start and the end of one collective.
  """

  collective: Instruction
  key: str
  starts: bool = True
  ends: bool = True

  @property
  def asynchronous(self) -> bool:
    """Whether other work may run between its start and its end."""
    return not (self.starts and self.ends)


@dataclass(frozen=True)
class Computation:
  """A named list of instructions; the last is the root."""

  name: str
  instructions: list[Instruction] = field(default_factory=list)

  @cached_property
  def by_name(self) -> dict[str, Instruction]:
    """Instructions by name."""
    return {i.name: i for i in self.instructions}


class Caller(NamedTuple):
  """A function of this package that an operation was traced in: its file in the package, its name, the line."""

  file: str
  function: str  # with its class; of a function inside another, the outer one
  line: int


@dataclass(frozen=True)
class CompiledProgram:
  """All computations of a compiled program."""

  computations: dict[str, Computation]
  entry: str
  stacks: dict[int, tuple[Caller, ...]]  # by index of the stack frame, innermost first

  @staticmethod
  def parse(text: str) -> "CompiledProgram":
    """Parses `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    # A Pallas call's configuration may contain line breaks. An instruction starts with two spaces, and `}` ends a
    # computation, followed by the name of its thread if that is not the main one.
    for line in re.sub(r"\n(?=[\"}](?!, execution_thread)\S)", "", text).splitlines():
      if current is None:
        if found := _COMPUTATION.match(line):
          current = computations[found[2]] = Computation(found[2])
          entry = found[2] if found[1] else entry
      elif line.startswith("}"):
        current = None
      elif instruction := _instruction(line):
        if instruction.opcode == _RAGGED:
          operand = next(i for i in current.instructions if i.name == instruction.operands[0])
          instruction = replace(instruction, sent=operand.type)
        current.instructions.append(instruction)
    return CompiledProgram(computations, entry, _stacks(text))

  def origin(self, i: Instruction) -> tuple[str, tuple[Caller, ...]]:
    """The name of an operation in the traced program, and where it was traced.

    A fusion that the compiler gave neither has those of the first instruction inside it that has them.
    """
    fused = called_computations(i) if i.opcode == "fusion" else ()
    inside = (j for target in fused for j in self.computations[target].instructions)
    known = next((j for j in (i, *inside) if j.op_name and j.frame in self.stacks), i)
    return known.op_name or "", self.stacks.get(known.frame or 0, ())

  def walk(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Yields every scheduled instruction with how often it runs; a fusion is one instruction."""
    for instruction in self.computations[name or self.entry].instructions:
      yield instruction, times
      if instruction.opcode == "while":
        yield from self.walk(loop_body(instruction), times * self.trips(instruction))
      elif instruction.opcode in ("call", "conditional"):
        for target in called_computations(instruction):
          yield from self.walk(target, times)

  def trips(self, loop: Instruction) -> int:
    """The number of iterations of a loop: as the compiler writes it, or from its condition and its body.

    Further rounds of an exchange are as many as the data needs: none under an even load.
    """
    if FURTHER_ROUNDS in (loop.op_name or ""):
      return 0
    if found := _TRIPS.search(loop.rest):
      return int(found[1])
    condition, body = (self.computations[c] for c in _loop(loop))
    compare = condition.instructions[-1]
    counter, bound = (condition.by_name[o] for o in compare.operands)
    index = int(re.search(r"index=(\d+)", counter.rest)[1])  # type: ignore[index]
    update = body.by_name[body.instructions[-1].operands[index]]
    while update.opcode in ("copy", "bitcast"):
      update = body.by_name[update.operands[0]]
    constants = [_constant(body.by_name[o]) for o in update.operands] if update.opcode == "add" else []
    step = next((c for c in constants if c is not None), 1)
    limit = _constant(bound)
    assert limit is not None, f"{loop.name}: the bound of the loop is not a constant"
    return -(-limit // step)

  @property
  def cycles(self) -> int:
    """Estimated cycles of one execution, without Pallas calls and waiting for the network."""
    return sum(instruction.cycles * times for instruction, times in self.walk())

  def collectives(self) -> list[tuple[Transfer, int]]:
    """The starts of collectives, each with how often it runs."""
    found = ((self.transfer(instruction), times) for instruction, times in self.walk())
    return [(transfer, times) for transfer, times in found if transfer and transfer.starts]

  def transfer(self, i: Instruction) -> Transfer | None:
    """The collective that an instruction starts or ends; None if it does neither.

    The compiler writes a collective that overlaps with matmuls as a fusion that starts it, fusions that hold it and a
    matmul, and a fusion that ends it, all with the same channel.
    """
    if i.collective:
      return Transfer(i, i.name, ends=not (i.opcode.endswith("-start") or i.between_slices))
    if i.opcode.removesuffix("-done") in ("async", "call", "recv", *COLLECTIVES):
      return Transfer(i, i.operands[0], starts=False)
    if i.opcode not in (*_ASYNC_STARTS, "fusion"):
      return None
    inside = list(self._inside(i))
    collective = next((j for j in inside if j.collective), None)
    if not collective:
      return None
    if i.opcode in _ASYNC_STARTS:
      return Transfer(collective, i.name, ends=False)
    if any(target.startswith(_REDUCE_SCATTER_NAME) for target in called_computations(i)):
      return Transfer(replace(collective, opcode="reduce-scatter", type=i.type), i.name)
    starts, ends = (any(f'custom_call_target="{mark}"' in j.rest for j in inside) for mark in _FUSED_COLLECTIVES)
    return Transfer(collective, f"channel {collective.channel}", starts, ends) if starts or ends else None

  def _inside(self, i: Instruction) -> Iterator[Instruction]:
    """The instructions that one runs, also behind calls: sparse cores are given a call of what they do."""
    for target in called_computations(i):
      for j in self.computations[target].instructions:
        yield j
        if j.opcode == "call":
          yield from self._inside(j)


def loop_body(loop: Instruction) -> str:
  """The name of the computation that a loop repeats."""
  return _loop(loop)[1]


def called_computations(instruction: Instruction) -> list[str]:
  """The names of the computations that an instruction runs."""
  return _CALLED.findall(instruction.rest)


def _stacks(text: str) -> dict[int, tuple["Caller", ...]]:
  """Parses the tables at the start of the text, which map stack frames to source lines."""
  tables: dict[str, dict[int, str]] = {}
  rows: dict[int, str] = {}
  for line in text.splitlines():
    if line.startswith(("%", "ENTRY")):
      break
    if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
      rows = tables.setdefault(line, {})
    elif found := _TABLE_ROW.match(line):
      rows[int(found[1])] = found[2] or found[3]
  locations: dict[int, Caller] = {}
  for i, row in tables.get("FileLocations", {}).items():
    entry = dict(re.findall(r"(\w+)=(\d+)", row))
    _, package, short = tables["FileNames"][int(entry["file_name_id"])].rpartition("/maxtext/")
    function = tables["FunctionNames"].get(int(entry.get("function_name_id", 0)), "")
    locations[i] = Caller(short if package else "", function.split(".<locals>")[0], int(entry["line"]))
  frames = {i: dict(re.findall(r"(\w+)=(\d+)", row)) for i, row in tables.get("StackFrames", {}).items()}

  def stack(i: int) -> tuple[Caller, ...]:
    caller = locations[int(frames[i]["file_location_id"])]
    parent = int(frames[i].get("parent_frame_id", 1)) - 1  # stored plus one; 0 means no parent
    callers = stack(parent) if parent in frames else ()
    return (caller, *callers) if caller.file else callers

  return {i: stack(i) for i in frames}


def _instruction(line: str) -> Instruction | None:
  name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
  if not equals or not name.startswith("%"):
    return None
  kind, rest = _split_parentheses(rest) if rest.startswith("(") else rest.split(" ", 1)
  opcode, _, rest = rest.strip().partition("(")
  inner, rest = _split_parentheses("(" + rest)
  return Instruction(name[1:], kind, opcode, tuple(re.findall(r"%([^\s,)]+)", inner)) or (inner[1:-1],), rest)


def _split_parentheses(text: str) -> tuple[str, str]:
  """Splits a text after the parenthesis that closes its first one."""
  depth = 0
  for i, character in enumerate(text):
    depth += (character == "(") - (character == ")")
    if depth == 0:
      return text[: i + 1], text[i + 1 :]
  raise ValueError(f"unbalanced: {text[:80]}")


def tuple_parts(text: str) -> list[str]:
  """The types in a tuple's type, each of which may be a tuple."""
  parts, depth = [""], 0
  for character in text[1:-1]:
    depth += (character in "({[") - (character in ")}]")
    if character == "," and not depth:
      parts.append("")
    else:
      parts[-1] += character
  return parts


def _loop(instruction: Instruction) -> tuple[str, str]:
  condition = re.search(r"condition=%([^\s,]+)", instruction.rest)
  body = re.search(r"body=%([^\s,]+)", instruction.rest)
  assert condition is not None
  assert body is not None
  return condition[1], body[1]


def _constant(instruction: Instruction) -> int | None:
  if instruction.opcode != "constant" or not instruction.operands[0].lstrip("-").isdigit():
    return None
  return int(instruction.operands[0])
