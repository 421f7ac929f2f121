"""Several starts of one run name at once: exactly one goes on, and each of the others ends and names it."""

import json
import os
import random
import signal
import time
from pathlib import Path

import jax
from etils import epath

from benchmarks.campaign.child import WrongError, imported_by
from benchmarks.campaign.results import Count
from maxtext.configs.errors import RunError
from maxtext.distributed.lease import FILE, Lease

TARGETS = {"at once": 0.0, "within 50 ms": 0.05, "within 2 s": 2.0}
INPUTS = False
_MOST = 6  # starts at once
_READY_SECONDS = 1.5  # for the processes to get ready


class Campaign:
  """One folder of a run, in which runs begin, and are killed or end. `following` is the number of the next."""

  def __init__(self, within: float, folder: Path) -> None:
    self._within, self._folder = within, folder / "run"
    imported_by(lambda: Lease(epath.Path(folder / "warm"), "run").acquire())

  def portion(self, count: Count) -> None:
    """Some processes that start; the run before them was killed, or has ended."""
    (number,) = count.following or [0]
    rng = random.Random(number)
    begin = time.monotonic() + _READY_SECONDS
    starts = [self._start(begin + rng.uniform(0, self._within)) for _ in range(rng.randint(2, _MOST))]
    told = [json.loads(os.read(reader, 10_000)) for _, reader in starts]
    holders = [pid for (pid, _), problem in zip(starts, told, strict=True) if problem is None]
    for pid, reader in starts:
      os.close(reader)
      if pid in holders:
        os.kill(pid, signal.SIGKILL if rng.random() < 0.5 else signal.SIGTERM)
      os.waitpid(pid, 0)
    if len(holders) != 1:
      raise WrongError(f"{len(starts)} starts, number {number}: {len(holders)} hold the lease; {told}")
    if unnamed := [text for text in told if text is not None and f"process {holders[0]} on" not in text]:
      raise WrongError(f"number {number}: process {holders[0]} holds the lease, and another start says: {unnamed}")
    for problem in told:
      count.add("went on alone" if problem is None else "ended and named the other")
    if left := [name for name in os.listdir(self._folder) if name != FILE and not name.startswith(f".{FILE}")]:
      raise WrongError(f"it leaves {left}")
    count.following = [number + 1]

  def _start(self, begin: float) -> tuple[int, int]:
    """A process that tries to hold the run's name, and what to read from it: why it does not, or null."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
      os.close(writer)
      return pid, reader
    problem, lease = None, Lease(epath.Path(self._folder), "run")
    signal.signal(signal.SIGTERM, lambda *_: (lease.release(), os._exit(0)))
    try:
      jax.process_index()  # starts the backend, before the race
      time.sleep(max(0.0, begin - time.monotonic()))
      lease.acquire()
    except RunError as error:
      problem = str(error)
    os.write(writer, json.dumps(problem).encode())
    while problem is None:
      time.sleep(1)
    os._exit(0)
