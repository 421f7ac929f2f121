"""Starts the processes of one run on this machine, and restarts all of them when one fails or all stall.

When one process fails, JAX kills the others by a signal, without a Python exception, and processes that wait for each
other wait for ever. So the supervisor is a process of its own. Imports no JAX.
"""

import math
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from maxtext.distributed import die_with_parent
from maxtext.distributed.progress import VARIABLE, read_progress


@dataclass(frozen=True)
class ProcessFailure:
  """The first process of a run that failed."""

  process: int
  code: int

  def __str__(self) -> str:
    return f"process {self.process} {describe_end(self.code)}"


def describe_end(code: int) -> str:
  """What a process did that ended with this code."""
  return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@dataclass(frozen=True)
class Stall:
  """No process of a run has written anything for longer than the stall timeout."""

  seconds: float
  code: int = 1

  def __str__(self) -> str:
    return f"no process has written anything for {self.seconds:g} s; their stack traces are above"


def supervise(
  command: Sequence[str],
  processes: int,
  restarts: int = 0,
  stall_timeout: float = math.inf,
  environment: Mapping[str, str] | None = None,
  grace_seconds: float = 10.0,
  out: TextIO = sys.stdout,
) -> int:
  """Runs `processes` copies of a command as one run and returns its exit code.

  When a process fails, the others get `grace_seconds` to end before they are killed, and all are started again. The
  same happens when none has written anything for `stall_timeout` seconds; then each writes its stack traces first. The
  wait before a restart doubles each time. The supervisor gives up after `restarts` restarts in a row without a later
  saved step. Failures that a restart cannot fix, such as a user's mistake (exit code 2), and requested stops are not
  retried.

  Ctrl-C and SIGTERM are passed on, and the processes have unlimited time to save; a second Ctrl-C kills them. If the
  supervisor is killed, the processes are killed too.
  """
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
  try:
    return _run_with_restarts(command, processes, restarts, environment, stall_timeout, grace_seconds, out)
  except KeyboardInterrupt as asked:  # between two runs; `_watch` waits for the processes of a run
    return _exit_code(asked)


def backoff_seconds(attempt: int) -> float:
  """The wait before a restart. It is random, so that hosts that fail together do not restart together."""
  return min(_FIRST_SECONDS * 2 ** (attempt - 1), _MOST_SECONDS) * random.uniform(0.5, 1.0)


_POLL_SECONDS = 0.05
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 120.0  # between two starts
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of requested stops: Ctrl-C and SIGTERM."""
FINAL_CODES = (2, 126, 127)
"""Exit codes that a restart does not change, on any machine: a user's mistake, a command that is missing or not
executable."""
NOT_RETRIED = (*FINAL_CODES, -signal.SIGILL)
"""Those, and here a program for another processor."""


class _Terminated(KeyboardInterrupt):
  """SIGTERM, as an exception."""


def _exit_code(asked: KeyboardInterrupt) -> int:
  return 128 + (signal.SIGTERM if isinstance(asked, _Terminated) else signal.SIGINT)


def _terminated(number: int, frame: Any) -> None:
  raise _Terminated


def _run_with_restarts(
  command: Sequence[str],
  processes: int,
  restarts: int,
  environment: Mapping[str, str] | None,
  stall_timeout: float,
  grace_seconds: float,
  out: TextIO,
) -> int:
  failed_starts, furthest = 0, -1
  with tempfile.TemporaryDirectory(prefix="maxtext-launch-") as folder:
    progress = Path(folder) / "step"
    own = dict(environment or {}) | {VARIABLE: str(progress)}
    while True:
      failure = _run_once(command, processes, own, stall_timeout, grace_seconds, out)
      if failure is None:
        return 0
      write(out, f"maxtext: {failure}.\n")
      if failure.code in (*NOT_RETRIED, *STOPPED):
        return max(failure.code, 1)
      before, furthest = furthest, max(furthest, read_progress(progress))
      failed_starts = 1 if furthest > before else failed_starts + 1
      if failed_starts > restarts:
        return 1
      seconds = backoff_seconds(failed_starts)
      write(out, f"maxtext: starting all {processes} again in {seconds:.1f} s ({failed_starts} of {restarts}).\n")
      time.sleep(seconds)


def _run_once(
  command: Sequence[str],
  processes: int,
  environment: Mapping[str, str],
  stall_timeout: float,
  grace_seconds: float,
  out: TextIO,
) -> ProcessFailure | Stall | None:
  address = f"127.0.0.1:{free_port()}"
  held, ours = os.pipe()  # the processes see its end when the supervisor ends
  try:
    workers = [
      start_process(command, {**environment, **joining(address, processes, i)}, held) for i in range(processes)
    ]
    return _watch(workers, stall_timeout, grace_seconds, out)
  finally:
    os.close(held)
    os.close(ours)


def _watch(
  workers: Sequence[subprocess.Popen[str]], stall_timeout: float, grace_seconds: float, out: TextIO
) -> ProcessFailure | Stall | None:
  forwarders = [LogForwarder(i, worker, out) for i, worker in enumerate(workers)]
  failure: ProcessFailure | Stall | None
  try:
    failure = _wait_for_failure(workers, forwarders, stall_timeout)
  except KeyboardInterrupt as asked:
    failure = _wait_for_end(workers, _exit_code(asked))
  if isinstance(failure, Stall):
    kill_with_stacks(workers, grace_seconds)
  elif failure is not None:
    end_processes(workers, signal.SIGTERM, grace_seconds)
  for forwarder in forwarders:
    forwarder.join(timeout=5)
  return failure


def start_process(
  command: Sequence[str], environment: Mapping[str, str], pipe: int, keep: Sequence[int] = (), **options: Any
) -> subprocess.Popen[str]:
  """Starts a process that is killed when this one ends, and whose output can be read.

  Args:
    command: what it runs.
    environment: variables beside those of this process.
    pipe: the end of a pipe whose other end this process alone holds; elsewhere than on Linux it tells of the end.
    keep: descriptors that it inherits.
    options: of `subprocess.Popen`.
  """
  by_signal = sys.platform == "linux"
  wrapper = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), "-" if by_signal else str(pipe)]
  return subprocess.Popen(
    [*wrapper, *command],
    pass_fds=(*keep, *(() if by_signal else (pipe,))),
    env=os.environ | dict(environment) | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
    text=True,
    errors="replace",
    **({"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options),
  )


def joining(address: str, processes: int, index: int) -> dict[str, str]:
  """The variables by which a process finds the others of its run."""
  return {
    "JAX_COORDINATOR_ADDRESS": address,
    "JAX_COORDINATOR_BIND_ADDRESS": address,  # by default JAX listens on all interfaces
    "JAX_NUM_PROCESSES": str(processes),
    "JAX_PROCESS_ID": str(index),
  }


def kill_with_stacks(workers: Sequence[subprocess.Popen[str]], grace_seconds: float) -> None:
  """Ends processes that stall. Python's fault handler writes their stacks on SIGABRT, even while the program is
  blocked; no core dump, which would write the memory of the whole run."""
  if sys.platform == "linux":
    for worker in workers:
      with suppress(ProcessLookupError):
        resource.prlimit(worker.pid, resource.RLIMIT_CORE, (0, 0))
  end_processes(workers, signal.SIGABRT, grace_seconds)


def write(out: TextIO, text: str) -> None:
  """Writes and flushes. A closed output, or one that cannot encode these characters, does not end the run."""
  with suppress(OSError, ValueError):
    out.write(text)
    out.flush()


class LogForwarder(threading.Thread):
  """Forwards the output of a process, tagged with its index, and counts lines. `forwarding` is true during a write."""

  def __init__(self, index: int, worker: subprocess.Popen[str], out: TextIO) -> None:
    super().__init__(daemon=True)
    self._index, self._worker, self._out = index, worker, out
    self.lines, self.forwarding = 0, False
    self.start()

  def run(self) -> None:
    assert self._worker.stdout is not None
    for line in self._worker.stdout:
      self.forwarding = True
      write(self._out, f"[{self._index}] {line}")  # unread output would block the process
      self.lines, self.forwarding = self.lines + 1, False


def _wait_for_failure(
  workers: Sequence[subprocess.Popen[str]], forwarders: Sequence[LogForwarder], stall_timeout: float
) -> ProcessFailure | Stall | None:
  """Waits until all processes have succeeded, one has failed, or all have stalled."""
  lines, silent = 0, 0.0
  while True:
    codes = [worker.poll() for worker in workers]
    for i, code in enumerate(codes):
      if code:
        return ProcessFailure(i, code)
    if all(code == 0 for code in codes):
      return None
    before, lines = lines, sum(forwarder.lines for forwarder in forwarders)
    # Polls are counted, not time: a supervisor that was suspended with its processes has not waited for them.
    silent = 0.0 if lines > before or any(forwarder.forwarding for forwarder in forwarders) else silent + _POLL_SECONDS
    if silent > stall_timeout:
      return Stall(stall_timeout)
    time.sleep(_POLL_SECONDS)


def _wait_for_end(workers: Sequence[subprocess.Popen[str]], code: int) -> ProcessFailure:
  """Sends SIGTERM to the workers and waits until they have saved and ended; Ctrl-C kills them."""
  try:
    for worker in workers:
      worker.terminate()
    for worker in workers:
      worker.wait()
  except KeyboardInterrupt:
    for worker in workers:
      worker.kill()
  return ProcessFailure(0, code)


def end_processes(workers: Sequence[subprocess.Popen[str]], by: signal.Signals, grace_seconds: float) -> None:
  deadline = time.monotonic() + grace_seconds
  for worker in workers:
    if worker.poll() is None:
      worker.send_signal(by)
  for worker in workers:
    try:
      worker.wait(timeout=max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
      worker.kill()
      worker.wait()


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]
