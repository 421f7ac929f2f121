"""One run per name: a run holds a lease on its folder, and checks it before a save is committed.

The lease is a file with a heartbeat. Clocks of hosts differ, so a reader polls whether the heartbeat changes and does
not compare its age. A run that takes over raises the term, and a holder that finds a higher term has lost the lease: a
run that was suspended or disconnected for a while cannot commit a step any more. On a disk each term has a file that
one start alone can create, so of several that find the same lease abandoned one takes it.
"""

import json
import logging
import os
import socket
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
from maxtext.distributed.local_process import machine, start_time
from maxtext.distributed.multihost import gather_problems, unique_name
from maxtext.logs import ON_STDERR
from maxtext.storage.atomic import create_atomically, write_atomically
from maxtext.storage.errors import OF_STORAGE

_LOG = logging.getLogger(__name__)

FILE = "lease.json"
_TERM = ".term-"
LOST = "this run has lost its lease: "  # prefix of a `LeaseLostError`, on any process
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0  # without a heartbeat, after which a lease is taken over
_FORGOTTEN_SECONDS = 86400.0  # older than any difference of clocks: taken over without polling
_READ_DELAYS = (0.2, 1.0)  # seconds before a lease that could not be read is read again
_ENDING_SECONDS = 3.0  # for a killed process to end


class LeaseLostError(RunError):
  """Another run has taken over the lease: this run must not write any more."""


@dataclass(frozen=True)
class _Claim:
  """The content of the lease file."""

  term: int
  holder: str  # a nonce
  host: str
  pid: int
  pid_started: str  # process ids are reused
  machine: str  # boot and namespace in which the process id is valid
  since: str
  beat: int = 0
  time: float = 0.0

  @property
  def order(self) -> tuple[int, str]:
    """Of two claims the greater one holds the lease."""
    return self.term, self.holder


class Lease:
  """A run's lease on its folder. Process 0 holds it for all; every process calls every method but `check`.

  Args:
    folder: the run's, on a disk or in a bucket.
    name: the run's.
    beat_seconds: between heartbeats.
    stale_seconds: without a heartbeat, after which a lease of another host is taken over.
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
    """Takes the lease. If another run holds it, raises `RunError` on all processes, naming the holder."""
    problem, mistake = "", None
    if jax.process_index() == 0:
      try:
        self._acquire()
      except RunError as error:
        problem = str(error)
      except Exception as error:  # a bucket's client has kinds of its own
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = f"base_output_directory={self._file.parent.parent} cannot be written: {why}."
        mistake = problem if isinstance(error, OSError) and error.errno not in OF_STORAGE else None
    problems = gather_problems(unique_name("lease"), problem, self._stale_seconds + 120)
    if mistake:
      raise ConfigError(mistake)
    if problems:
      raise RunError(problems[0])

  def check(self) -> None:
    """Raises `LeaseLostError` if another run has taken over; process 0 calls it before a save is committed."""
    with self._lock:
      if self._own is not None:
        self._check_not_lost(self._own)

  def release(self) -> None:
    """Removes the lease, so that the next run need not poll it. Storage errors are ignored."""
    self._closing.set()
    if self._thread is not None:
      self._thread.join()
    with self._lock, suppress(Exception):
      own, self._own = self._own, None
      found = self._read() if own else None
      if own and found and found.order == own.order:
        self._file.unlink(missing_ok=True)
        self._remove_terms(own.term)

  def _acquire(self) -> None:
    self._file.parent.mkdir(parents=True, exist_ok=True)
    while True:
      found, last = self._latest()
      if found is not None:
        self._wait_for_holder(found)
      own = _Claim(
        last + 1, uuid.uuid4().hex, socket.gethostname(), os.getpid(),
        start_time(os.getpid()) or "", machine(), time.strftime("%Y-%m-%d %H:%M:%S %z"), time=time.time(),
      )  # fmt: skip
      if self._take_term(own):
        break
    self._write(own)
    self._own = own
    self._thread = threading.Thread(target=self._heartbeat, name="lease", daemon=True)
    self._thread.start()

  def _latest(self) -> tuple[_Claim | None, int]:
    """The greatest claim, and the last term: of the lease, or of a start that has not written the lease yet."""
    found = self._read(self._file)
    terms = self._terms()
    claims = filter(None, [found, *map(self._read, terms.values())])
    return max(claims, key=lambda claim: claim.order, default=None), max(0, found.term if found else 0, *terms)

  def _terms(self) -> dict[int, Path]:
    """The files of terms, which a bucket does not have."""
    if "://" in str(self._file):
      return {}
    return {int(file.suffix.removeprefix(_TERM)): file for file in Path(self._file.parent).glob(f".{FILE}{_TERM}*")}

  def _take_term(self, own: _Claim) -> bool:
    """Creates the file of a term, which one start alone can, and removes those of earlier terms."""
    if "://" in str(self._file):
      return True
    folder = Path(self._file.parent)
    if not create_atomically(folder / f".{FILE}{_TERM}{own.term}", _content(own), folder / f".{FILE}-{own.holder}"):
      return False
    self._remove_terms(own.term - 1)
    return max(self._terms()) == own.term  # a later one has gone on where this start was suspended meanwhile

  def _remove_terms(self, last: int) -> None:
    for term, file in self._terms().items():
      if term <= last:
        file.unlink(missing_ok=True)

  def _wait_for_holder(self, found: _Claim) -> None:
    """Returns when the holder is gone: on this machine its process has ended, elsewhere its heartbeat has stopped."""
    start = time.monotonic()
    if found.machine == machine():
      while start_time(found.pid) == found.pid_started:
        if time.monotonic() - start > _ENDING_SECONDS:
          raise RunError(self._describe(found))
        time.sleep(0.1)
      return
    if time.time() - found.time > _FORGOTTEN_SECONDS:
      return
    now: _Claim | None = found
    _LOG.info(f"maxtext: {self._describe(found)} Polling its heartbeat for {self._stale_seconds:g} s.")
    while time.monotonic() - start < self._stale_seconds:
      time.sleep(min(0.5, self._beat_seconds))
      now, before = self._latest()[0], now
      if now is None and before is None:  # a single miss may be the moment in which the file is replaced
        return
      if now is not None and (now.order, now.beat) != (found.order, found.beat):
        raise RunError(self._describe(now))

  def _heartbeat(self) -> None:
    while not self._closing.wait(self._beat_seconds):
      with self._lock:
        if self._own is None:
          return
        own = replace(self._own, beat=self._own.beat + 1, time=time.time())
        try:
          self._check_not_lost(own)
          self._write(own)
          self._own = own
        except LeaseLostError as error:
          _LOG.error(f"maxtext: {error}", extra=ON_STDERR)
          return
        except Exception:  # a bucket's client has many: storage may be back at the next beat
          continue

  def _check_not_lost(self, own: _Claim) -> None:
    found = self._read_with_retries()
    if found is not None and found.order > own.order:
      raise LeaseLostError(f"{LOST}{self._describe(found)} Nothing more is saved.")

  def _describe(self, found: _Claim) -> str:
    return (
      f"run_name={self._name} is held by the run of process {found.pid} on {found.host} since {found.since}: end that "
      f"one, or choose another run_name."
    )

  def _read_with_retries(self) -> _Claim | None:
    """Retries: a save must not fail because of one failed read of a file that is often replaced."""
    for delay in _READ_DELAYS:
      try:
        return self._read()
      except Exception:
        time.sleep(delay)
    return self._read()

  def _read(self, file: epath.Path | Path | None = None) -> _Claim | None:
    try:
      return _Claim(**json.loads((file or self._file).read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # an unreadable lease blocks nobody
      return None

  def _write(self, claim: _Claim) -> None:
    """Writes the file atomically."""
    unfinished = Path(self._file).with_name(f".{FILE}-{claim.holder}")
    write_atomically(self._file, _content(claim), durable=False, unfinished=unfinished)


def _content(claim: _Claim) -> bytes:
  return (json.dumps(asdict(claim), indent=1) + "\n").encode()
