"""The journal of a run: where the time of all its starts went, also of those that were killed.

Every start has a file of its own, `journal/<number>.json`, which is replaced atomically as steps finish. So a file is
small however long the run is. What a killed start had not written yet counts as time between starts. Reading imports no
JAX.
"""

import json
import logging
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from etils import epath

from maxtext.observe.phases import PHASES, Phase, PhaseClock
from maxtext.storage.atomic import write_atomically

_LOG = logging.getLogger(__name__)

Kind = Phase | Literal["lost_steps", "between_starts"]
"""A phase, or what shows only when a run is started again: steps that were repeated, and time when nothing ran."""

_FOLDER = "journal"
_MAX_MARKS = 256
_SHARE = 1 / 400  # of the time that writing may take


class GoodputJournal:
  """Writes the file of this start: every second or less often, and every minute to the object store.

  Writing takes at most a 400th of the time, however slow the disk is. A file that cannot be written ends the journal,
  not the run.

  Args:
    folder: the run's, on a disk.
    store: the run's folder in an object store; None if there is none.
    clock: of this process.
    step: the one that this start resumes after; 0 is none.
    resumes: whether the run has checkpoints. One without begins anew, and forgets earlier starts.
  """

  def __init__(self, folder: Path, store: epath.Path | None, clock: PhaseClock, step: int, resumes: bool) -> None:
    self._clock, self._step = clock, step
    self._marks: list[tuple[int, float]] = [(step, 0.0)]
    self._targets: list[_Copy] = []
    age = sum(clock.seconds().values())
    began: dict[str, float] = {"began": _system_clock() - age, "began_wall": time.time() - age}
    self._facts = {"host": socket.gethostname(), "boot": _boot(), **began}
    folders = _folders(folder, store)
    try:
      if not resumes:
        shutil.rmtree(folder / _FOLDER, ignore_errors=True)
      folders[0].mkdir(parents=True, exist_ok=True)
      name = f"{max(map(_number, _files(folders)), default=0) + 1}.json"
    except OSError as error:
      _warn(error)
    else:
      self._targets = [_Copy(path / name, every) for path, every in zip(folders, (1.0, 60.0), strict=False)]

  def finished(self, step: int) -> None:
    """A step has finished."""
    self._step = step
    self._write([target for target in self._targets if time.monotonic() >= target.due])

  def close(self) -> None:
    """The process ends."""
    if self._step > self._marks[0][0]:
      self._write(self._targets)

  def _write(self, targets: "Sequence[_Copy]") -> None:
    if not targets:
      return
    seconds = self._clock.seconds()
    self._marks.append((self._step, seconds["step"]))
    if len(self._marks) > _MAX_MARKS:
      del self._marks[1:-1:2]
    content = json.dumps(self._facts | {"seconds": seconds, "marks": self._marks}).encode()
    for target in targets:
      start = time.monotonic()
      try:
        write_atomically(target.file, content, durable=False)
      except OSError as error:
        self._targets = [other for other in self._targets if other is not target]
        _warn(error)
      target.due = start + max(target.every, (time.monotonic() - start) / _SHARE)


@dataclass
class _Copy:
  file: epath.Path
  every: float
  due: float = 0.0


def _warn(error: OSError) -> None:
  _LOG.warning(f"maxtext: the journal of this run cannot be written: {error.strerror or error}.")


@dataclass(frozen=True)
class GoodputSummary:
  """Where the time of a run went.

  Attributes:
    seconds: of each kind; all of them are the time from the beginning of the first start to the last finished step.
    starts: how many there were.
  """

  seconds: dict[Kind, float]
  starts: int

  @property
  def total(self) -> float:
    """All seconds."""
    return sum(self.seconds.values())

  @property
  def goodput(self) -> float:
    """The share of the time that went into steps which did not have to be repeated."""
    return self.seconds["step"] / self.total if self.total > 0 else 0.0


def read_goodput(folder: Path, store: epath.Path | None = None) -> GoodputSummary | None:
  """The goodput of a run; None where it has no journal that can be read."""
  starts = _read_starts(_folders(folder, store))
  if not starts:
    return None
  seconds: dict[Kind, float] = dict.fromkeys((*PHASES, "lost_steps", "between_starts"), 0.0)
  for start in starts:
    for phase in PHASES:
      seconds[phase] += start.seconds[phase]
  kept = starts[-1].marks[-1][0]
  for start in reversed(starts):
    lost = start.productive_after(kept)
    seconds["step"] -= lost
    seconds["lost_steps"] += lost
    kept = min(kept, start.marks[0][0])
  seconds["between_starts"] = sum(_gap(before, after) for before, after in pairwise(starts))
  return GoodputSummary(seconds, len(starts))


@dataclass(frozen=True)
class _Start:
  boot: str
  began: float
  began_wall: float
  seconds: dict[Phase, float]
  marks: Sequence[tuple[int, float]]

  @staticmethod
  def of(content: dict[str, Any]) -> "_Start":
    """Raises `ValueError`, `KeyError` or `TypeError` for what is no start."""
    seconds = {phase: float(content["seconds"].get(phase, 0.0)) for phase in PHASES}
    marks = [(int(step), float(spent)) for step, spent in content["marks"]]
    if not marks or not all(0 <= value < 1e12 for value in (*seconds.values(), *(spent for _, spent in marks))):
      raise ValueError
    return _Start(str(content["boot"]), float(content["began"]), float(content["began_wall"]), seconds, marks)

  def productive_after(self, step: int) -> float:
    """The seconds in steps after this one, between two marks in proportion."""
    if step >= self.marks[-1][0]:
      return 0.0
    spent = 0.0
    for (first, began), (last, ended) in pairwise(self.marks):
      if first <= step < last:
        spent = began + (ended - began) * (step - first) / (last - first)
    return max(0.0, self.seconds["step"] - spent)


def _gap(before: _Start, after: _Start) -> float:
  """The seconds between two starts: by a clock that nobody sets if both ran since the same boot."""
  age = sum(before.seconds.values())
  if before.boot and before.boot == after.boot:
    return max(0.0, after.began - before.began - age)
  return max(0.0, after.began_wall - before.began_wall - age)


def _read_starts(folders: Sequence[epath.Path]) -> list[_Start]:
  """In their order, each from the first folder that has it; files that cannot be read are passed over."""
  found: dict[int, _Start] = {}
  with suppress(OSError):
    for file in _files(folders):
      if (number := _number(file)) not in found:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
          found[number] = _Start.of(json.loads(file.read_text()))
  return [found[number] for number in sorted(found)]


def _folders(folder: Path, store: epath.Path | None) -> list[epath.Path]:
  return [epath.Path(path) / _FOLDER for path in (folder, store) if path]


def _files(folders: Sequence[epath.Path]) -> list[epath.Path]:
  return [file for folder in folders if folder.exists() for file in folder.iterdir() if _number(file)]


def _number(file: epath.Path) -> int:
  """Of a start's file; 0 for another file."""
  return int(file.stem) if file.suffix == ".json" and file.stem.isascii() and file.stem.isdecimal() else 0


def _system_clock() -> float:
  """Seconds since the machine was booted; 0 where there is no such clock."""
  clock = getattr(time, "CLOCK_BOOTTIME", None)
  return 0.0 if clock is None else time.clock_gettime(clock)


def _boot() -> str:
  """Which boot of which machine this is; empty where the system does not say."""
  with suppress(OSError):
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
  return ""
