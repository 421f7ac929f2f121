"""Which hosts of a run are there, and what they do together: agreed on through files in a folder that all of them see.

A host overwrites its own record in place, for which a full disk has room. Readers poll whether a record changes, and
compare no clocks. A plan is a file with the next number, created exclusively: of two hosts that both believe to lead,
one makes it and the other follows it. Imports no JAX.
"""

import json
import os
import time
import uuid
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from maxtext.distributed.local_process import machine, start_time
from maxtext.storage.atomic import create_atomically

State = Literal["ready", "running", "done", "failed", "stopped"]
Action = Literal["run", "drain", "stop"]

LOST_SECONDS = 15.0
"""Without a change of its record, after which a host is lost. One whose process ended on this machine is at once."""
_BEAT_SECONDS = 0.25
_BYTES = 4096


@dataclass(frozen=True)
class HostRecord:
  """What a host says of itself.

  Attributes:
    nonce: of this start of the host's agent.
    plan: the number of the last plan that it follows.
    state: of its process; `ready` has none.
    code: the exit code of a process that failed.
    why: of a process that failed, or of a host that is not to be used.
    address: at which its process would coordinate the others.
    step: the last finished step of the running process; -1 before its first.
    saved: the last step of the run that is safely saved; -1 is none.
    leaving: whether it is about to end.
    suspect: whether its results are not to be trusted.
    door: where others see that they reach it (`reach.py`).
    reaches: the nonce of the host that coordinates, if this one reaches it now.
    cut_from: the same, if this one has not reached it for so long that it is cut off.
  """

  nonce: str
  pid: int
  pid_started: str
  machine: str
  beat: int = 0
  plan: int = 0
  state: State = "ready"
  code: int = 0
  why: str = ""
  address: str = ""
  step: int = -1
  saved: int = -1
  leaving: bool = False
  suspect: bool = False
  door: str = ""
  reaches: str = ""
  cut_from: str = ""

  @property
  def is_usable(self) -> bool:
    """Whether a plan may count on it."""
    return not self.leaving and not self.suspect


@dataclass(frozen=True)
class HostPlan:
  """What the hosts do next.

  Attributes:
    number: from 1.
    action: start a process each (`run`), let them save and end (`drain`), or end.
    members: the nonce of each host that takes part, by its index.
    address: of the coordinator.
    why: for the log.
    retries: failures in a row without a later saved step.
    saved: the last step that was saved before.
    code: the exit code of the run, where it ends.
  """

  number: int
  action: Action
  members: Mapping[int, str] = field(default_factory=dict)
  address: str = ""
  why: str = ""
  retries: int = 0
  saved: int = -1
  code: int = 0

  @property
  def coordinator(self) -> int | None:
    """The host whose process the others join; None before the first plan."""
    return min(self.members, default=None)


class Membership:
  """The folder, as one host sees it.

  Args:
    folder: on storage that all hosts see; one for each run.
    host: the index of this one.
    lost_seconds: without a change, after which a host is lost.

  Attributes:
    own: the record of this host.
    rival: the record of another agent that is alive and has the same index; None while none was seen.
  """

  def __init__(self, folder: Path, host: int, lost_seconds: float = LOST_SECONDS) -> None:
    self._folder, self._host, self._lost_seconds = folder, host, lost_seconds
    folder.mkdir(parents=True, exist_ok=True)
    self.own = HostRecord(uuid.uuid4().hex, os.getpid(), start_time(os.getpid()) or "", machine())
    self._seen: dict[int, tuple[HostRecord, float | None]] = {}  # since when it is unchanged; None is never changed
    self._due, self._plan = 0.0, HostPlan(0, "drain")
    self._unreadable: float | None = None  # since when the next plan is there and cannot be read
    self._other: HostRecord | None = None  # what another agent has written in the place of this host's record
    self.rival: HostRecord | None = None

  def wait_for_rival(self, seconds: float) -> None:
    """Looks whether another agent has this index, before this one writes in its place: on this machine whether its
    process is there, elsewhere whether its record changes."""
    deadline, first = time.monotonic() + seconds, _read_record(self._folder / f"host-{self._host}")
    if first is not None and first.machine == self.own.machine:
      self.rival = first if start_time(first.pid) == first.pid_started else None
      return
    while first is not None and self.rival is None and time.monotonic() < deadline:
      time.sleep(_BEAT_SECONDS)
      found = _read_record(self._folder / f"host-{self._host}")
      self.rival = found if found != first else None

  def publish(self, **changes: object) -> None:
    """Writes this host's record, if it changed or is due."""
    own = replace(self.own, **changes)  # type: ignore[arg-type]
    if own == self.own and time.monotonic() < self._due:
      return
    self._due = time.monotonic() + _BEAT_SECONDS
    self.own = replace(own, beat=self.own.beat + 1)
    text = json.dumps(asdict(self.own)).encode()
    content = f"{zlib.crc32(text):08x}".encode() + text
    with suppress(OSError):  # whoever cannot be heard is lost to the others
      descriptor = os.open(self._folder / f"host-{self._host}", os.O_WRONLY | os.O_CREAT, 0o644)
      try:
        os.pwrite(descriptor, content.ljust(_BYTES), 0)
      finally:
        os.close(descriptor)

  def live(self) -> dict[int, HostRecord]:
    """The hosts that are there, by index, with this one."""
    for file in self._folder.glob("host-*"):
      if not (index := file.name.removeprefix("host-")).isdecimal() or (found := _read_record(file)) is None:
        continue
      host = int(index)
      if host == self._host and found.nonce != self.own.nonce:  # of one that is gone, unless it is written again
        self.rival, self._other = found if self._other not in (None, found) else self.rival, found
      before = self._seen.get(host)
      if before is None:
        self._seen[host] = found, None
      elif found != before[0]:
        self._seen[host] = found, time.monotonic()
    return {
      host: record for host, (record, changed) in sorted(self._seen.items()) if self._is_live(record, changed)
    } | {self._host: self.own}

  def latest_plan(self) -> HostPlan:
    """The plan with the highest number; number 0 before the first."""
    with suppress(OSError):
      while (file := self._file(self._plan.number + 1)).exists():
        if (plan := _read_plan(file)) is None:
          self._unreadable = self._unreadable or time.monotonic()
          break
        self._plan, self._unreadable = plan, None
    return self._plan

  def propose(self, plan: HostPlan) -> None:
    """Makes a plan the next one, unless another host was faster. One that was lost while it wrote, on a disk without
    hard links, has left a part of a plan, which is removed."""
    with suppress(OSError):  # a disk that is full now may not be at the next poll
      content, file = json.dumps(asdict(plan)).encode(), self._file(plan.number)
      created = create_atomically(file, content, self._folder / f".plan-{self.own.nonce}")
      if not created and self._unreadable and time.monotonic() - self._unreadable > self._lost_seconds:
        self._unreadable = None
        file.unlink()

  def _file(self, number: int) -> Path:
    return self._folder / f"plan-{number}"

  def _is_live(self, record: HostRecord, changed: float | None) -> bool:
    if record.machine == self.own.machine and start_time(record.pid) != record.pid_started:
      return False
    return changed is not None and time.monotonic() - changed < self._lost_seconds


def _read_record(file: Path) -> HostRecord | None:
  """None for one that is being written."""
  with suppress(OSError, ValueError, TypeError):
    content = file.read_bytes()
    if int(content[:8], 16) == zlib.crc32(content[8:].rstrip()):
      return HostRecord(**json.loads(content[8:]))
  return None


def _read_plan(file: Path) -> HostPlan | None:
  """None for one that is being written, or was never written as a whole."""
  with suppress(ValueError, TypeError, KeyError, AttributeError):
    content = json.loads(file.read_text())
    content["members"] = {int(host): nonce for host, nonce in content["members"].items()}
    return HostPlan(**content)
  return None
