"""A reward function in processes of its own, so that it may fail or hang without the run.

The process ends when the other end of its pipe closes: with the run, however that ends, and whatever the function does.
"""

import importlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

from maxtext.configs import ConfigError
from maxtext.rl.environment import LARGEST_REWARD

_LOG = logging.getLogger(__name__)
MOST_PROCESSES = 16  # that check answers, unless told otherwise; one for mathematics has 75 MB
START_SECONDS = 120.0  # to import a module, which may bring a large library
ENDED, LATE = "its process ended", "it took too long"


class RewardProcesses:
  """A function in several processes, each with a part of every batch.

  Args:
    name: `module:function`.
    timeout: seconds for a part.
    count: processes, at most.
    taken: what the function is given of a completion.

  Raises:
    ConfigError: there is no such module or function.
  """

  def __init__(
    self, name: str, timeout: float, count: int = 1, taken: Callable[[str], str] = lambda completion: completion
  ) -> None:
    self._taken, self._processes = taken, [RewardProcess(name, timeout)]  # the first says what is wrong
    with ThreadPoolExecutor(count) as pool:
      self._processes += pool.map(lambda _: RewardProcess(name, timeout), range(count - 1))

  def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The rewards."""
    texts, count = list(map(self._taken, completions)), len(self._processes)
    with ThreadPoolExecutor(count) as pool:
      parts = [
        pool.submit(process, prompts[i::count], texts[i::count], answers[i::count])
        for i, process in enumerate(self._processes)
        if i < len(texts)
      ]
      rewards = [0.0] * len(texts)
      for i, part in enumerate(parts):
        rewards[i::count] = part.result()
    return rewards

  @property
  def failures(self) -> int:
    """How often the function failed, and its answers got 0."""
    return sum(process.failures for process in self._processes)

  def close(self) -> None:
    """Ends the processes."""
    for process in self._processes:
      process.close()


class RewardProcess:
  """Calls `module:function` with prompts, completions and answers, and takes one number for each. Threads take turns.

  A call that fails or takes longer than the limit rewards its answers with 0, which is logged and counted. A process
  that has ended, or has not answered, is started anew.

  Raises:
    ConfigError: there is no such module or function.
  """

  def __init__(self, name: str, timeout: float) -> None:
    self._name, self._timeout, self.failures = name, timeout, 0
    self._process: subprocess.Popen | None = None
    self._lock = threading.Lock()
    self._start()

  def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The rewards."""
    with self._lock:
      problem, rewards = self._call(prompts, completions, answers)
      if problem == ENDED:  # for a reason of its own, such as a shortage of memory
        problem, rewards = self._call(prompts, completions, answers)
      if problem is None:
        return rewards
      self.failures += 1
      _LOG.warning(f"maxtext: reward_functions: {self._name} failed, and its answers get 0: {problem}")
      return [0.0] * len(completions)

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()
      self._pipe.close()
      self._process = None

  def _call(self, *texts: Sequence[str]) -> tuple[str | None, list[float]]:
    """What is wrong, if anything, and rewards."""
    if self._process is None:
      self._start()
    problem, rewards = self._exchange([list(part) for part in texts], self._timeout)
    if problem in (ENDED, LATE):
      self.close()
    if problem is None and (
      len(rewards) != len(texts[1]) or not all(abs(reward) <= LARGEST_REWARD for reward in rewards)
    ):
      return f"{len(rewards)} numbers for {len(texts[1])} answers, or one that is not within {LARGEST_REWARD:g}", []
    return problem, rewards

  def _start(self) -> None:
    self._process, self._pipe = start_module("maxtext.rl.reward_process")
    problem, _ = self._exchange([self._name, os.getcwd()], START_SECONDS)
    if problem is not None:
      self.close()
      raise ConfigError(f"reward_functions: {self._name}: {problem}.")

  def _exchange(self, message: object, timeout: float) -> tuple[str | None, list[float]]:
    try:
      self._pipe.send(message)
      return self._pipe.recv() if self._pipe.poll(timeout) else (LATE, [])
    except (EOFError, OSError):
      return ENDED, []


def start_module(module: str, variables: Mapping[str, str] | None = None) -> tuple[subprocess.Popen, Connection]:
  """A process that runs a module with the number of its end of a pipe, and our end.

  Not by `multiprocessing`, which would import the caller's main module again, and with it JAX.
  """
  ours, theirs = Pipe()
  with theirs:
    command = [sys.executable, "-m", module, str(theirs.fileno())]
    environment = {**os.environ, **(variables or {})}
    return subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment), ours


def import_from(folder: str, name: str) -> Any:
  """What `module:name` is, with the module sought in a folder first."""
  sys.path.insert(0, folder)
  module, _, attribute = name.partition(":")
  return getattr(importlib.import_module(module), attribute)


def describe(error: BaseException) -> str:
  """An exception in one line."""
  return f"{type(error).__name__}: {error}"


def _end_with(pipe: Connection) -> None:
  """Ends the process with the other end of its pipe, also within a function that does not return."""
  closing = select.poll()
  closing.register(pipe.fileno(), 0)  # nothing but its end
  closing.poll()
  os._exit(0)


def _serve(pipe: Connection) -> None:
  """Imports the function from the user's folder, then answers calls."""
  name, folder = pipe.recv()
  try:
    found = import_from(folder, name)
    pipe.send((None if callable(found) else "it is no function", []))
  except Exception as error:
    pipe.send((describe(error), []))
    return
  while True:
    call = pipe.recv()
    try:
      problem, rewards = "", [float(value) for value in found(*call)]
    except Exception as error:
      problem, rewards = describe(error), []
    pipe.send((problem or None, rewards))


if __name__ == "__main__":
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes the pipe
  ours = Connection(int(sys.argv[1]))
  threading.Thread(target=_end_with, args=(ours,), daemon=True).start()
  try:
    _serve(ours)
  except (BrokenPipeError, ConnectionResetError, EOFError):
    sys.exit(0)
