"""Starting the processes of one run on this machine, and starting all again when one is lost or all stand still.

JAX ends the survivors of a lost process by a signal, without a Python exception, and processes that wait for each other
wait for ever, so this must watch from outside. It imports no JAX.
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
from maxtext.distributed.progress import VARIABLE, told_progress


@dataclass(frozen=True)
class Loss:
  """The first process of a run that ended badly."""

  process: int
  code: int

  def __str__(self) -> str:
    how = f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"
    return f"process {self.process} {how}"


@dataclass(frozen=True)
class Stall:
  """No process of a run has said anything for so long that it will not go on."""

  seconds: float
  code: int = 1

  def __str__(self) -> str:
    return f"no process has said anything for {self.seconds:g} s; where each of them stood is above"


def supervise(
  command: Sequence[str],
  processes: int,
  restarts: int = 0,
  stalled_seconds: float = math.inf,
  environment: Mapping[str, str] | None = None,
  grace_seconds: float = 10.0,
  out: TextIO = sys.stdout,
) -> int:
  """Runs `processes` copies of a command as one run and returns its exit code.

  When a process is lost, the others get `grace_seconds` to end before they are killed, and the whole is started again;
  so too when none has said anything for `stalled_seconds`, after each has shown its stacks. Between two starts it
  waits, twice as long each time. It gives up after `restarts` starts of which none saved a later step than any before;
  what will not get better, a user's mistake (exit code 2) say, and an end that was asked for are not tried again.

  Ctrl-C and SIGTERM are passed on, and the processes have all the time they need to save; a second Ctrl-C kills them.
  If this process is killed, they are too.
  """
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what goes to the background deaf to it
  in_vain, furthest = 0, -1
  with tempfile.TemporaryDirectory(prefix="maxtext-launch-") as folder:
    progress = Path(folder) / "step"
    own = dict(environment or {}) | {VARIABLE: str(progress)}
    while True:
      loss = _run_once(command, processes, own, stalled_seconds, grace_seconds, out)
      if loss is None:
        return 0
      _say(out, f"maxtext: {loss}.\n")
      if loss.code in _FINAL:
        return max(loss.code, 1)
      before, furthest = furthest, max(furthest, told_progress(progress))
      in_vain = 1 if furthest > before else in_vain + 1
      if in_vain > restarts:
        return 1
      seconds = backoff_seconds(in_vain)
      _say(out, f"maxtext: starting all {processes} again in {seconds:.1f} s ({in_vain} of {restarts}).\n")
      try:
        time.sleep(seconds)
      except KeyboardInterrupt as asked:
        return _code(asked)


def backoff_seconds(attempt: int) -> float:
  """How long to wait before a start, by how many were in vain; hosts that fail together do not return together."""
  return min(_FIRST_SECONDS * 2 ** (attempt - 1), _MOST_SECONDS) * random.uniform(0.5, 1.0)


_LOOK_SECONDS = 0.05
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 120.0  # between two starts
# What another start does not change: a user's mistake, a command that is not there or not a program, a program for
# another processor; and what was asked for: Ctrl-C and SIGTERM.
_FINAL = (2, 126, 127, -signal.SIGILL, 128 + signal.SIGINT, 128 + signal.SIGTERM)


class _Terminated(KeyboardInterrupt):
  """SIGTERM, as an exception."""


def _code(asked: KeyboardInterrupt) -> int:
  return 128 + (signal.SIGTERM if isinstance(asked, _Terminated) else signal.SIGINT)


def _terminated(number: int, frame: Any) -> None:
  raise _Terminated


def _run_once(
  command: Sequence[str],
  processes: int,
  environment: Mapping[str, str],
  stalled_seconds: float,
  grace_seconds: float,
  out: TextIO,
) -> Loss | Stall | None:
  address = f"127.0.0.1:{_free_port()}"
  held, ours = os.pipe()  # the processes see its end when this one ends
  try:
    workers = [_start(command, i, processes, address, environment, held) for i in range(processes)]
    return _watch(workers, stalled_seconds, grace_seconds, out)
  finally:
    os.close(held)
    os.close(ours)


def _watch(
  workers: Sequence[subprocess.Popen[str]], stalled_seconds: float, grace_seconds: float, out: TextIO
) -> Loss | Stall | None:
  voices = [_Voice(i, worker, out) for i, worker in enumerate(workers)]
  loss: Loss | Stall | None
  try:
    loss = _first_loss(workers, voices, stalled_seconds)
  except KeyboardInterrupt as asked:
    loss = _let_end(workers, _code(asked))
  if isinstance(loss, Stall):
    # Python's own handler of SIGABRT writes the stacks; whatever holds up the program does not hold up that. The memory
    # of a whole run is not to be written after them.
    if sys.platform == "linux":
      for worker in workers:
        with suppress(ProcessLookupError):
          resource.prlimit(worker.pid, resource.RLIMIT_CORE, (0, 0))
    _end(workers, signal.SIGABRT, grace_seconds)
  elif loss is not None:
    _end(workers, signal.SIGTERM, grace_seconds)
  for voice in voices:
    voice.join(timeout=5)
  return loss


def _start(
  command: Sequence[str], index: int, processes: int, address: str, environment: Mapping[str, str], pipe: int
) -> subprocess.Popen[str]:
  own = {
    "JAX_COORDINATOR_ADDRESS": address,
    "JAX_COORDINATOR_BIND_ADDRESS": address,  # JAX alone would let every machine in
    "JAX_NUM_PROCESSES": str(processes),
    "JAX_PROCESS_ID": str(index),
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
  }
  by_signal = sys.platform == "linux"
  tied = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), "-" if by_signal else str(pipe)]
  return subprocess.Popen(
    [*tied, *command],
    pass_fds=() if by_signal else (pipe,),
    env=os.environ | environment | own,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
  )


def _say(out: TextIO, text: str) -> None:
  """Nobody may read any more, or not these letters: the run goes on all the same."""
  with suppress(OSError, ValueError):
    out.write(text)
    out.flush()


class _Voice(threading.Thread):
  """Passes on what a process says, tagged, and counts the lines; while `passing_on` it waits for whoever reads them."""

  def __init__(self, index: int, worker: subprocess.Popen[str], out: TextIO) -> None:
    super().__init__(daemon=True)
    self._index, self._worker, self._out = index, worker, out
    self.lines, self.passing_on = 0, False
    self.start()

  def run(self) -> None:
    assert self._worker.stdout is not None
    for line in self._worker.stdout:
      self.passing_on = True
      _say(self._out, f"[{self._index}] {line}")  # a process that is not listened to would wait for that
      self.lines, self.passing_on = self.lines + 1, False


def _first_loss(
  workers: Sequence[subprocess.Popen[str]], voices: Sequence[_Voice], stalled_seconds: float
) -> Loss | Stall | None:
  """Waits until all have ended well, or one has not, or none says anything."""
  lines, silent = 0, 0.0
  while True:
    codes = [worker.poll() for worker in workers]
    for i, code in enumerate(codes):
      if code:
        return Loss(i, code)
    if all(code == 0 for code in codes):
      return None
    before, lines = lines, sum(voice.lines for voice in voices)
    # Looks are counted, not time: who was stopped with its processes has not waited for them.
    silent = 0.0 if lines > before or any(voice.passing_on for voice in voices) else silent + _LOOK_SECONDS
    if silent > stalled_seconds:
      return Stall(stalled_seconds)
    time.sleep(_LOOK_SECONDS)


def _let_end(workers: Sequence[subprocess.Popen[str]], code: int) -> Loss:
  """Tells the workers, some of which a terminal's Ctrl-C has told already, and waits until they have saved."""
  try:
    for worker in workers:
      worker.terminate()
    for worker in workers:
      worker.wait()
  except KeyboardInterrupt:
    for worker in workers:
      worker.kill()
  return Loss(0, code)


def _end(workers: Sequence[subprocess.Popen[str]], by: signal.Signals, grace_seconds: float) -> None:
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


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]
