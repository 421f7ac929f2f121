"""One run per name: whoever writes into a run's folder holds a lease there, and checks that before a save counts.

The lease is a file with a heartbeat. Clocks of hosts differ, so a reader watches whether the heartbeat goes on rather
than how old it is. Whoever takes over raises the term, and a holder that finds a higher one has lost: a run that was
only stopped for a while, or cut off, cannot commit a step any more.
"""

import errno
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
from etils import epath

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.distributed.multihost import once, problems_of_all
from maxtext.logs import ON_STDERR
from maxtext.storage.atomic import create_atomically, write_atomically

_LOG = logging.getLogger(__name__)

FILE = "lease.json"
LOST = "this run has lost its lease: "  # how a `LeaseLostError` begins, on any process
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0  # without a heartbeat, after which a lease is taken over
_FORGOTTEN_SECONDS = 86400.0  # clocks do not differ by so much: it is not watched
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ETIMEDOUT, errno.ESTALE)  # what may get better by itself
_READ_DELAYS = (0.2, 1.0)  # seconds before a lease that could not be read is read again
_ENDING_SECONDS = 3.0  # for a process that was killed to be gone


class LeaseLostError(RunError):
  """Another run has taken over: nothing more is to be written."""


@dataclass(frozen=True)
class _Claim:
  """What the file says."""

  term: int
  holder: str  # a nonce
  host: str
  pid: int
  pid_started: str  # a number may be given again to another process
  machine: str  # where the number means a process: this boot, this namespace
  since: str
  beat: int = 0
  time: float = 0.0

  @property
  def order(self) -> tuple[int, str]:
    """Of two claims the greater holds, and both sides know which that is."""
    return self.term, self.holder


class Lease:
  """A run's hold on its folder. Process 0 holds it for all; every process calls every method but `check`.

  Args:
    folder: the run's, on a disk or in a bucket.
    name: the run's.
    beat_seconds: between heartbeats.
    stale_seconds: after which a lease whose holder's host is another, and which has no heartbeat, is taken over.
  """

  def __init__(
    self,
    folder: epath.Path,
    name: str,
    beat_seconds: float = BEAT_SECONDS,
    stale_seconds: float = STALE_SECONDS,
  ) -> None:
    self._file, self._name = folder / FILE, name
    self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
    self._own: _Claim | None = None
    self._closing, self._lock = threading.Event(), threading.Lock()
    self._thread: threading.Thread | None = None

  def acquire(self) -> None:
    """Takes the lease, or ends the run on all processes with who holds it."""
    problem, mistake = "", None
    if jax.process_index() == 0:
      try:
        self._acquire()
      except RunError as error:
        problem = str(error)
      except Exception as error:  # a bucket's client has kinds of its own
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = f"base_output_directory={self._file.parent.parent} cannot be written: {why}."
        mistake = problem if isinstance(error, OSError) and error.errno not in _PASSING else None
    problems = problems_of_all(once("lease"), problem, self._stale_seconds + 120)
    if mistake:
      raise ConfigError(mistake)
    if problems:
      raise RunError(problems[0])

  def check(self) -> None:
    """Raises `LeaseLostError` if another run has taken over; called by whoever holds it before a save counts."""
    with self._lock:
      if self._own is not None:
        self._refuse_lost(self._own)

  def release(self) -> None:
    """Lets go, so that the next run need not wait or look; where storage does not answer, it has to."""
    self._closing.set()
    if self._thread is not None:
      self._thread.join()
    with self._lock, suppress(Exception):
      own, self._own = self._own, None
      found = self._read() if own else None
      if own and found and found.order == own.order:
        self._file.unlink(missing_ok=True)

  def _acquire(self) -> None:
    self._file.parent.mkdir(parents=True, exist_ok=True)
    while True:
      there, found = self._file.exists(), self._read()
      if found is not None:
        self._refuse_held(found)
      own = _Claim(
        (found.term if found else 0) + 1, uuid.uuid4().hex, socket.gethostname(), os.getpid(),
        _start_time(os.getpid()) or "", _machine(), time.strftime("%Y-%m-%d %H:%M:%S %z"), time=time.time(),
      )  # fmt: skip
      if self._write(own, exclusive=not there):
        break
    self._own = own
    self._thread = threading.Thread(target=self._go_on, name="lease", daemon=True)
    self._thread.start()

  def _refuse_held(self, found: _Claim) -> None:
    """Returns when the holder is gone. On this machine its process says so, elsewhere its heartbeat."""
    start = time.monotonic()
    if found.machine == _machine():
      while _start_time(found.pid) == found.pid_started:
        if time.monotonic() - start > _ENDING_SECONDS:
          raise RunError(self._sentence(found))
        time.sleep(0.1)
      return
    if time.time() - found.time > _FORGOTTEN_SECONDS:
      return
    now: _Claim | None = found
    _LOG.info(f"maxtext: {self._sentence(found)} Looking for {self._stale_seconds:g} s whether it is there.")
    while time.monotonic() - start < self._stale_seconds:
      time.sleep(min(0.5, self._beat_seconds))
      now, before = self._read(), now
      if now is None and before is None:  # once may be the moment in which it is replaced
        return
      if now is not None and (now.order, now.beat) != (found.order, found.beat):
        raise RunError(self._sentence(now))

  def _go_on(self) -> None:
    while not self._closing.wait(self._beat_seconds):
      with self._lock:
        if self._own is None:
          return
        own = replace(self._own, beat=self._own.beat + 1, time=time.time())
        try:
          self._refuse_lost(own)
          self._write(own)
          self._own = own
        except LeaseLostError as error:
          _LOG.error(f"maxtext: {error}", extra=ON_STDERR)
          return
        except Exception:  # a bucket's client has many: storage may be back at the next beat
          continue

  def _refuse_lost(self, own: _Claim) -> None:
    found = self._read_patiently()
    if found is not None and found.order > own.order:
      raise LeaseLostError(f"{LOST}{self._sentence(found)} What it saves from now on does not count.")

  def _sentence(self, found: _Claim) -> str:
    return (
      f"run_name={self._name} is held by the run of process {found.pid} on {found.host} since {found.since}: end that "
      f"one, or choose another run_name."
    )

  def _read_patiently(self) -> _Claim | None:
    """A save must not fail for one read of a file that is replaced every few seconds."""
    for delay in _READ_DELAYS:
      try:
        return self._read()
      except Exception:
        time.sleep(delay)
    return self._read()

  def _read(self) -> _Claim | None:
    try:
      return _Claim(**json.loads(self._file.read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # a file that cannot be a lease holds nobody up
      return None

  def _write(self, claim: _Claim, exclusive: bool = False) -> bool:
    """Writes the file whole; `exclusive` leaves one alone that has appeared. A bucket's files are always whole."""
    content = (json.dumps(asdict(claim), indent=1) + "\n").encode()
    unfinished = Path(self._file).with_name(f".{FILE}-{claim.holder}")
    if exclusive and "://" not in str(self._file):
      return create_atomically(Path(self._file), content, unfinished)
    write_atomically(self._file, content, durable=False, unfinished=unfinished)
    return True


def _start_time(pid: int) -> str | None:
  """When a process of this machine began; None where there is none, or only what is left of one."""
  if not sys.platform.startswith("linux"):
    try:
      os.kill(pid, 0)
    except ProcessLookupError:
      return None
    except PermissionError:
      pass
    return "running"
  try:
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return None
  return None if state in "ZX" else rest[18]


def _machine() -> str:
  if not sys.platform.startswith("linux"):
    return f"{socket.gethostname()}-{uuid.getnode()}"
  boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
  return f"{boot} {os.readlink('/proc/self/ns/pid')}"
