"""Worker processes of the dataloader. Each makes a part of this process's rows.

A worker writes its batches into a pipe and waits while the pipe is full. When the run ends or is killed, the other end
closes, writing fails and the worker ends.
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
from maxtext.data.prefetch import Prefetcher
from maxtext.data.splits import Split
from maxtext.data.streams import Rows
from maxtext.data.worker_shard import WorkerShard

PROCESS_MEGABYTES = 256
"""Memory of one worker, with its libraries and some open shards."""


def choose_workers(split: Split, megabytes: int) -> int:
  """The number of workers; if the key is -1, one per core but one, within `megabytes` of memory."""
  if split.workers >= 0:
    return split.workers
  return max(1, min((os.cpu_count() or 1) - 1, megabytes // PROCESS_MEGABYTES))


def rows_from_processes(shards: Sequence[WorkerShard], buffer: int) -> Iterator[Rows]:
  """The rows of several shards, concatenated. Each shard has its own process, which prefetches `buffer` batches."""
  workers: list[_Worker] = []
  try:
    workers += [_Worker.start(shard, buffer) for shard in shards]
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
  def start(shard: WorkerShard, buffer: int) -> "_Worker":
    here, there = Pipe()
    # Not `multiprocessing`, which would import the caller's main module again, and with it JAX.
    process = subprocess.Popen(
      [sys.executable, "-m", "maxtext.data.workers", str(there.fileno())],
      pass_fds=[there.fileno()],
      stdin=subprocess.DEVNULL,
    )
    there.close()
    here.send((shard, buffer))
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
  shard, buffer = pipe.recv()
  prefetcher = Prefetcher(_batches(shard), buffer)
  while True:
    pipe.send_bytes(next(prefetcher))


def _batches(shard: WorkerShard) -> Generator[bytes]:
  """Pickled batches; an error is the last one."""
  try:
    for rows in shard.rows():
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
