"""Schedules in a few kilobytes: what `estimate` needs to simulate a step, so that compiled runs can be kept as text.

Operations of the chip between two transfers or kernels are one, and nothing knows its source line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from maxtext.planner.schedule import Kind, Resource, Schedule, Work

_DIGITS = 5
_KINDS: dict[Resource, Kind] = {
  "compute": "compute",
  "matmul": "compute",
  "matmul_8bit": "compute",
  "host": "host",
  "link": "collective",
  "between_slices": "collective",
}


def short(schedule: Schedule) -> Schedule:
  """The schedule with neighbouring operations joined."""
  return replace(schedule, parts=list(_joined(schedule.parts)))


def to_json(schedule: Schedule) -> list[Any]:
  """A short schedule as [times, part, ...], where a part is one of

  - a schedule,
  - [resource, seconds, seconds of memory, name] of what runs on the chip,
  - [resource, number, seconds, name, bytes, axes, whether it also ends here] where a transfer starts,
  - [resource, number] where it ends.
  """
  numbers: dict[str, int] = {}

  def part(part: Work | Schedule) -> list[Any]:
    if isinstance(part, Schedule):
      return to_json(part)
    if not part.transfer:
      return [part.resource, _rounded(part.seconds), _rounded(part.memory_seconds), part.name]
    number = numbers.setdefault(part.transfer, len(numbers))
    about = [_rounded(part.seconds), part.name, part.bytes, list(part.axes), part.ends] if part.starts else []
    return [part.resource, number, *about]

  return [schedule.times, *map(part, schedule.parts)]


def from_json(values: Sequence[Any]) -> Schedule:
  """The schedule of `to_json`."""
  times, *parts = values
  begun: dict[int, Work] = {}

  def part(part: Sequence[Any]) -> Work | Schedule:
    match part:
      case [int(), *_]:
        return from_json(part)
      case [resource, seconds, memory_seconds, name]:
        return Work(name, "", _KINDS.get(resource, "kernel"), "", resource, seconds, memory_seconds)
      case [resource, number, seconds, name, size, axes, ends]:
        kind = _KINDS[resource]
        begun[number] = Work(name, "", kind, "", resource, seconds, 0.0, str(number), True, ends, size, tuple(axes))
        return begun[number]
      case [resource, number]:
        return replace(begun[number], seconds=0.0, starts=False, ends=True)
    raise ValueError(part)

  return Schedule(times, [part(one) for one in parts])


def _joined(parts: Sequence[Work | Schedule]) -> Iterator[Work | Schedule]:
  waiting: Work | None = None
  for part in parts:
    if isinstance(part, Work) and part.resource == "compute" and not part.memory_seconds:
      seconds = part.seconds + (waiting.seconds if waiting else 0.0)
      waiting = Work("compute", "", "compute", "", "compute", seconds)
      continue
    if waiting:
      yield waiting
      waiting = None
    if isinstance(part, Schedule):
      yield short(part)
    elif not part.transfer or part.starts or part.ends:
      yield part
  if waiting:
    yield waiting


def _rounded(seconds: float) -> float:
  return float(f"{seconds:.{_DIGITS}g}")
