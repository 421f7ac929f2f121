"""Reader processes: each makes a part of this process's rows, as it would itself.

A process writes its batches into a pipe and waits while the pipe is full. When the other end closes, because the run
has ended or was killed, writing fails and the process ends: none outlives its run.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.ahead import Ahead
from maxtext.data.share import Share
from maxtext.data.splits import Split
from maxtext.data.streams import Rows

PROCESS_MEGABYTES = 256
"""What one takes, with its libraries and some open shards."""


def choose_workers(split: Split, megabytes: int) -> int:
  """Reader processes; where the key leaves it open, one per core but the run's own, within so many megabytes."""
  if split.workers >= 0:
    return split.workers
  return max(1, min((os.cpu_count() or 1) - 1, megabytes // PROCESS_MEGABYTES))


def rows_from_processes(shares: Sequence[Share], buffer: int) -> Iterator[Rows]:
  """The rows of several shares, side by side, each made by its own process, which keeps `buffer` batches ready."""
  workers: list[_Worker] = []
  try:
    workers += [_Worker.start(share, buffer) for share in shares]
    while True:
      parts = [worker.receive() for worker in workers]
      yield Rows.join(parts)
  finally:
    for worker in workers:
      worker.stop()


@dataclass(frozen=True)
class _Worker:
  process: subprocess.Popen
  pipe: Connection

  @staticmethod
  def start(share: Share, buffer: int) -> "_Worker":
    here, there = Pipe()
    # Not `multiprocessing`, which would import the caller's main module again: no JAX, and no surprises.
    process = subprocess.Popen(
      [sys.executable, "-m", "maxtext.data.workers", str(there.fileno())],
      pass_fds=[there.fileno()],
      stdin=subprocess.DEVNULL,
    )
    there.close()
    here.send((share, buffer))
    return _Worker(process, here)

  def receive(self) -> Rows:
    try:
      made = pickle.loads(self.pipe.recv_bytes())
    except (EOFError, OSError):
      raise RunError(
        f"A reader process of the data ended with exit code {self.process.wait()}: see what it printed, or look for "
        f"a shortage of memory; grain_worker_count=0 reads in the run's own process."
      ) from None
    if isinstance(made, BaseException):
      raise made
    return made

  def stop(self) -> None:
    self.pipe.close()
    try:
      self.process.wait(timeout=5)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()


def _serve(pipe: Connection) -> None:
  share, buffer = pipe.recv()
  ahead = Ahead(_made(share), buffer)
  while True:
    pipe.send_bytes(next(ahead))


def _made(share: Share) -> Generator[bytes]:
  """Batches ready to be sent; an error is the last of them."""
  try:
    for rows in share.rows():
      yield pickle.dumps(rows, protocol=5)
  except (ConfigError, RunError) as error:
    yield pickle.dumps(error)
  except Exception:
    yield pickle.dumps(RunError(f"A reader process of the data failed.\n{traceback.format_exc()}"))


if __name__ == "__main__":
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes the pipe
  try:
    _serve(Connection(int(sys.argv[1])))
  except (BrokenPipeError, ConnectionResetError, EOFError, StopIteration):
    sys.exit(0)
