"""Reading a compiled program: what the TPU compiler itself expects each operation to cost.

The scheduled HLO text is parsed into computations; `CompiledProgram` walks them from the entry, counting loop bodies as
often as they run. Pallas calls carry no estimate, and neither does the time a collective waits for the network.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%([^\s,]+)")
_ARRAY = re.compile(r"(?<![\w])([a-z]\w*)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}


@dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  rest: str  # attributes, metadata, backend configuration

  @property
  def cycles(self) -> int:
    """The compiler's estimate, 0 where it gives none."""
    found = _CYCLES.search(self.rest)
    return int(found[1]) if found else 0

  @property
  def op_name(self) -> str | None:
    """Where in the traced program it comes from; None for what the compiler invented."""
    found = _OP_NAME.search(self.rest)
    return found[1] if found else None

  @property
  def collective(self) -> str | None:
    """The kind of collective that starts here, if any."""
    kind = self.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None

  @property
  def bytes(self) -> int:
    """Size of the largest array in the result."""
    sizes = [_BYTES.get(t, 4) * prod(map(int, filter(None, dims.split(",")))) for t, dims in _ARRAY.findall(self.type)]
    return max(sizes, default=0)


@dataclass(frozen=True)
class Computation:
  """A named list of instructions; the last is the root."""

  name: str
  instructions: list[Instruction] = field(default_factory=list)

  @cached_property
  def by_name(self) -> dict[str, Instruction]:
    """Instructions by name."""
    return {i.name: i for i in self.instructions}


@dataclass(frozen=True)
class CompiledProgram:
  """All computations of a compiled program."""

  computations: dict[str, Computation]
  entry: str

  @staticmethod
  def parse(text: str) -> "CompiledProgram":
    """Reads `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    # A Pallas call's settings may hold line breaks; an instruction starts with two spaces.
    for line in re.sub(r"\n(?=[\"}]\S)", "", text).splitlines():
      if current is None:
        if found := _COMPUTATION.match(line):
          current = computations[found[2]] = Computation(found[2])
          entry = found[2] if found[1] else entry
      elif line == "}":
        current = None
      elif instruction := _instruction(line):
        current.instructions.append(instruction)
    return CompiledProgram(computations, entry)

  def walk(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Every instruction that is scheduled, with how often it runs; fusions are one instruction."""
    for instruction in self.computations[name or self.entry].instructions:
      yield instruction, times
      if instruction.opcode == "while":
        yield from self.walk(_loop(instruction)[1], times * self.trips(instruction))
      elif instruction.opcode in ("call", "conditional", "async-start"):
        for target in _CALLED.findall(instruction.rest):
          yield from self.walk(target, times)

  def trips(self, loop: Instruction) -> int:
    """How often a loop runs: the bound from its condition, the increment from its body."""
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
    """Estimated cycles of one run, Pallas calls and waiting for the network not included."""
    return sum(instruction.cycles * times for instruction, times in self.walk())

  def collectives(self) -> list[tuple[Instruction, int]]:
    """The collectives, with how often each runs."""
    return [(instruction, times) for instruction, times in self.walk() if instruction.collective]


def _instruction(line: str) -> Instruction | None:
  name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
  if not equals or not name.startswith("%"):
    return None
  kind, rest = _balanced(rest) if rest.startswith("(") else rest.split(" ", 1)
  opcode, _, rest = rest.strip().partition("(")
  inner, rest = _balanced("(" + rest)
  return Instruction(name[1:], kind, opcode, tuple(re.findall(r"%([^\s,)]+)", inner)) or (inner[1:-1],), rest)


def _balanced(text: str) -> tuple[str, str]:
  """Splits after the bracket that closes the first one."""
  depth = 0
  for i, letter in enumerate(text):
    depth += (letter == "(") - (letter == ")")
    if depth == 0:
      return text[: i + 1], text[i + 1 :]
  raise ValueError(f"unbalanced: {text[:80]}")


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
