"""Power losses: the calls of one undisturbed operation are recorded, and replayed up to each of them with what was not
synced dropped, wholly or in part.

What counts as synced is what POSIX promises: the content of a file after an `fsync` of it, and the names in a folder
after an `fsync` of that folder. Names in one folder reach the disk in order, and those of different folders in any
order; content that was not synced may be there, missing, zeros, or cut.
"""

import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from benchmarks.campaign.child import imported_by, in_child, library
from benchmarks.campaign.kills import digest
from benchmarks.campaign.results import Count
from benchmarks.campaign.targets import WRITERS, Target

TARGETS, INPUTS = WRITERS, True
_TOGETHER = 64
_KEPT = (0.0, 0.5, 0.9, 0.2, 1.0)  # how likely something reaches the disk that was not synced
_HEADER = struct.Struct("<cqqqii")
_NAMES = "crlum"  # kinds of calls that change names: create, rename, link, remove, make a folder


@dataclass(frozen=True)
class Call:
  """A call that succeeded: its kind, as faults.c notes it, the file's inode, and what it did."""

  kind: str
  inode: int
  offset: int
  path: PurePath
  other: PurePath
  data: bytes

  @property
  def folder(self) -> PurePath:
    """Where a name changes, at last."""
    return (self.other if self.kind in "rl" else self.path).parent


def read_calls(record: bytes) -> Iterator[Call]:
  """The calls of a record, in order."""
  place = 0
  while place < len(record):
    kind, inode, offset, size, one, two = _HEADER.unpack_from(record, place)
    place += _HEADER.size
    texts = []
    for length in (one, two):
      texts.append(PurePath(record[place : place + length].decode()))
      place += length
    data = record[place : place + size]
    place += size
    yield Call(kind.decode(), inode, offset, texts[0], texts[1], data)


@dataclass
class _File:
  """Content as the process saw it, and calls of which it is not certain that they reached the disk."""

  content: bytearray
  unsynced: list[Call] = field(default_factory=list)


class Disk:
  """What a disk holds after a power loss."""

  def __init__(self, template: Path, root: Path) -> None:
    self._root = PurePath(root)
    self._names: dict[PurePath, _File | None] = {}  # None is a folder
    self._inodes: dict[int, _File] = {}
    self._nameless: dict[PurePath, _File | None] = {}  # made, and the name was lost; another may lead there later
    for path in sorted(template.rglob("*")):
      place = self._root / path.relative_to(template)
      self._names[place] = _File(bytearray(path.read_bytes())) if path.is_file() else None

  def lose_power(self, calls: list[Call], rng: random.Random, kept: float) -> None:
    """Does what reached the disk. `kept` is how likely something does that was not synced; 0 and 1 are the extremes."""
    synced = self._synced_names(calls)
    lost = set[PurePath]()  # folders of which a change was lost, and so all that came later
    for number, call in enumerate(calls):
      if call.kind in _NAMES:
        if number not in synced and (call.folder in lost or rng.random() >= kept):
          lost.add(call.folder)
          if call.kind == "c":
            self._inodes[call.inode] = self._nameless[call.path] = _File(bytearray())
          elif call.kind == "m":
            self._nameless[call.path] = None
          continue
        self._rename(call)
      elif call.kind == "s":
        self._sync(call)
      elif call.kind in "wt" and (file := self._file(call)) is not None:
        file.unsynced.append(call)
    for file in {id(f): f for f in (*self._inodes.values(), *self._names.values()) if f is not None}.values():
      for call in file.unsynced:
        if rng.random() < kept:
          _apply(file, call)
        elif call.kind == "w" and rng.random() < kept:  # the size is there, and the content is zeros or cut
          half = call.data[: len(call.data) // 2] if rng.random() < 0.5 else b""
          _apply(file, Call("w", 0, call.offset, call.path, call.other, half.ljust(len(call.data), b"\0")))

  def write(self, target: Path) -> None:
    """Makes the files."""
    target.mkdir()
    for path, file in sorted(self._names.items()):
      place = target / path.relative_to(self._root)
      if not place.parent.is_dir():
        continue  # its folder's name was lost
      place.mkdir() if file is None else place.write_bytes(file.content)

  def _synced_names(self, calls: list[Call]) -> set[int]:
    """The changes of names that a later sync of their folder has made certain."""
    found, waiting = set[int](), dict[PurePath, list[int]]()
    for number, call in enumerate(calls):
      if call.kind in _NAMES:
        waiting.setdefault(call.folder, []).append(number)
        if call.kind == "r":  # what was synced in a folder stays so under its new name
          for folder in [f for f in waiting if f == call.path or call.path in f.parents]:
            waiting[call.other / folder.relative_to(call.path)] = waiting.pop(folder)
      elif call.kind == "s":
        found.update(waiting.pop(call.path, ()))
    return found

  def _file(self, call: Call) -> _File | None:
    file = self._inodes.get(call.inode) or self._names.get(call.path)
    if file is not None:
      self._inodes[call.inode] = file
    return file

  def _sync(self, call: Call) -> None:
    if (file := self._file(call)) is not None:
      for write in file.unsynced:
        _apply(file, write)
      file.unsynced.clear()

  def _rename(self, call: Call) -> None:
    if call.kind == "m":
      self._names[call.path] = None
    elif call.kind == "c":
      self._inodes[call.inode] = self._names[call.path] = _File(bytearray())
    elif call.kind == "u":
      for path in [p for p in self._names if p == call.path or call.path in p.parents]:
        del self._names[path]
    else:
      if call.path in self._nameless:
        self._names[call.path] = self._nameless.pop(call.path)
      moved = {p: f for p, f in self._names.items() if p == call.path or call.path in p.parents}
      for path, file in moved.items():
        self._names[call.other / path.relative_to(call.path)] = file
        if call.kind == "r":
          del self._names[path]


def _apply(file: _File, call: Call) -> None:
  if call.kind == "t":
    file.content[:] = file.content[: call.offset].ljust(call.offset, b"\0")
    return
  if len(file.content) < call.offset:
    file.content.extend(bytes(call.offset - len(file.content)))
  file.content[call.offset : call.offset + len(call.data)] = call.data


class Campaign:
  """Power losses during one operation of a target: `following` is the number of the next."""

  def __init__(self, target: Target, folder: Path) -> None:
    self._target, self._before, self._folder = target, folder / "before", folder
    imported_by(lambda: target.before(self._before))
    self._work = folder / "work"
    shutil.copytree(self._before, self._work)
    record = folder / "record"
    in_child(lambda: self._record(record)).expect_success("the operation that is recorded")
    self._calls = list(read_calls(record.read_bytes()))
    self._good = set[str]()

  def portion(self, count: Count) -> None:
    """Some power losses: at every call in turn, with nothing, all or some of what was not synced."""
    (number,) = count.following or [0]
    states: dict[str, Path] = {}
    for n in range(number, number + _TOGETHER):
      disk, rng = Disk(self._before, self._work), random.Random(n)
      sweep, at = divmod(n, len(self._calls) + 1)
      disk.lose_power(self._calls[:at], rng, _KEPT[(sweep + at) % len(_KEPT)])
      place = self._folder / f"loss {n} after call {at}"
      disk.write(place)
      if (state := digest(place)) in self._good or state in states:
        shutil.rmtree(place)
      else:
        states[state] = place
    in_child(lambda: self._recover(list(states.values())), 600).expect_success("the next start")
    self._good |= states.keys()
    for place in states.values():
      shutil.rmtree(place)
    for _ in range(_TOGETHER):
      count.add("right")
    count.following = [number + _TOGETHER]

  def _record(self, record: Path) -> int:
    with open(record, "wb") as file:
      library().campaign_record(str(self._work).encode(), file.fileno())
      return self._target.run(self._work)

  def _recover(self, places: list[Path]) -> None:
    for place in places:
      print(place, flush=True)
      self._target.recover(place)
