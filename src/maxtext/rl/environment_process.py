"""Environments in processes of their own: one for each conversation, so that what fails or hangs ends that one alone.

A server process imports the class once and forks for each conversation, which takes milliseconds. It kills the
processes of a conversation that is over, and all of them when the other end of its pipe closes: with the run, however
that ends.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

from maxtext.configs import ConfigError
from maxtext.rl.environment import LARGEST_REWARD, EnvironmentTask, Observation
from maxtext.rl.reward_process import ENDED, LATE, START_SECONDS, describe, import_from, start_module

_LONGEST_PROBLEM = 500  # characters of an exception that the policy reads


class Reply(NamedTuple):
  """What an environment returned.

  Attributes:
    value: a prompt or an `Observation`; None if there is a problem.
    problem: what was raised, or is wrong with the value; empty if nothing is.
    is_lost: the process has ended, or was ended since it took too long.
  """

  value: Any
  problem: str = ""
  is_lost: bool = False


class EnvironmentServer:
  """Starts environments of a class. Any thread may call it.

  Args:
    name: `module:Class`.
    timeout: seconds for `reset`, and for each `step`.
    longest: characters of an observation, of which one more is kept.

  Raises:
    ConfigError: there is no such class.
  """

  def __init__(self, name: str, timeout: float, longest: int) -> None:
    self._name, self.timeout, self._longest = name, timeout, longest
    self._process: subprocess.Popen | None = None
    self._lock = threading.Lock()
    self._start()

  def open(self) -> "EnvironmentProcess":
    """An environment of its own. One that cannot be started is lost from the beginning."""
    problem = ENDED
    with self._lock:
      for _ in range(2):  # a server that has ended is started anew
        try:
          if self._process is None:
            self._start()
          return self._fork()
        except (ConfigError, EOFError, OSError) as error:
          problem = describe(error)
          self._stop()
    return EnvironmentProcess(self, None, problem)

  def end(self, pid: int) -> None:
    """Ends the processes of a conversation."""
    with self._lock, suppress(OSError):
      if self._process is not None:
        self._control.send(pid)

  def close(self) -> None:
    """Ends all processes."""
    with self._lock:
      self._stop()

  def _start(self) -> None:
    # Without a random order of sets and dictionaries, a conversation is the same in every run.
    self._process, self._control = start_module("maxtext.rl.environment_process", {"PYTHONHASHSEED": "0"})
    try:
      self._control.send((self._name, os.getcwd(), self._longest))
      problem = self._control.recv() if self._control.poll(START_SECONDS) else LATE
    except (EOFError, OSError):
      problem = ENDED
    if problem:
      self._stop()
      raise ConfigError(f"rl_environment={self._name}: {problem}.")

  def _fork(self) -> "EnvironmentProcess":
    """An environment; a lost one where there are too many processes or files, which others do not suffer from."""
    assert self._process is not None
    try:
      ours, theirs = Pipe()
    except OSError as error:
      return EnvironmentProcess(self, None, describe(error))
    with theirs:
      self._control.send(None)
      send_handle(self._control, theirs.fileno(), self._process.pid)
      if not self._control.poll(START_SECONDS):
        raise OSError(LATE)
    problem, pid = self._control.recv()
    if problem:
      ours.close()
      return EnvironmentProcess(self, None, problem)
    return EnvironmentProcess(self, ours, pid)

  def _stop(self) -> None:
    if self._process is not None:
      self._control.close()  # by which the server ends its children, and itself
      with suppress(subprocess.TimeoutExpired):
        self._process.wait(10)
      self._process.kill()
      self._process.wait()
      self._process = None


class EnvironmentProcess:
  """The environment of one conversation."""

  def __init__(self, server: EnvironmentServer, pipe: Connection | None, started: int | str) -> None:
    self._server, self._pipe, self._started = server, pipe, started

  def reset(self, task: EnvironmentTask) -> Reply:
    """See `Environment`."""
    return self._call("reset", task)

  def step(self, text: str) -> Reply:
    """See `Environment`."""
    return self._call("step", text)

  def close(self) -> None:
    """Ends its processes."""
    if self._pipe is not None:
      self._pipe.close()
      self._pipe = None
      assert isinstance(self._started, int)
      self._server.end(self._started)

  def _call(self, method: str, argument: Any) -> Reply:
    if self._pipe is None:
      return Reply(None, str(self._started), is_lost=True)
    try:
      self._pipe.send((method, argument))
      reply = Reply(*self._pipe.recv()) if self._pipe.poll(self._server.timeout) else Reply(None, LATE, is_lost=True)
    except (EOFError, OSError):
      reply = Reply(None, ENDED, is_lost=True)
    if reply.is_lost:
      self.close()
    return reply


def _serve(control: Connection) -> None:
  """Imports the class from the user's folder, then forks and kills as it is told."""
  name, folder, longest = control.recv()
  try:
    found = import_from(folder, name)
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    control.send(f"it has no method {missing[0]}" if missing else "")
  except Exception as error:
    control.send(describe(error))
    return
  children: set[int] = set()
  try:
    while True:
      pid = control.recv()
      if pid is None:
        control.send(_forked(found, longest, control, recv_handle(control), children))
      elif pid in children:
        _kill(pid)
        children.remove(pid)
  finally:
    for pid in children:
      _kill(pid)


def _forked(
  found: Callable[[], Any], longest: int, control: Connection, handle: int, children: set[int]
) -> tuple[str, int]:
  """What is wrong, if anything, and the process of a conversation."""
  try:
    pid = os.fork()
  except OSError as error:  # too many processes
    os.close(handle)
    return describe(error), 0
  if pid:
    os.close(handle)
    children.add(pid)
    return "", pid
  try:
    control.close()
    os.setsid()  # it is killed with the processes that it starts
    _converse(found, longest, Connection(handle))
  finally:
    os._exit(0)


def _kill(pid: int) -> None:
  for kill in (os.killpg, os.kill):  # before it has a group, and after
    with suppress(ProcessLookupError):
      kill(pid, signal.SIGKILL)
  os.waitpid(pid, 0)


def _converse(found: Callable[[], Any], longest: int, pipe: Connection) -> None:
  """Answers the calls of one conversation."""
  environment: Any = None
  while True:
    method, argument = pipe.recv()
    try:
      if method == "reset":
        random.seed(repr(argument))
        environment = found()
        value: Any = _prompt(environment.reset(EnvironmentTask(*argument)))
      else:
        value = _observation(environment.step(argument), longest)
      reply = Reply(value)
    except Exception as error:
      reply = Reply(None, _plain(describe(error))[:_LONGEST_PROBLEM])
    pipe.send(tuple(reply))


def _prompt(value: Any) -> Any:
  """A prompt in plain values."""
  return _plain(value) if isinstance(value, str) else json.loads(json.dumps(value))


def _observation(value: Any, longest: int) -> tuple[str, float, bool]:
  text, reward, done = Observation(*value)
  if not isinstance(text, str):
    raise TypeError(f"the text of an observation is {type(text).__name__}")
  if not abs(float(reward)) <= LARGEST_REWARD:
    raise ValueError(f"the reward {reward} is not within {LARGEST_REWARD:g}")
  return _plain(text[: longest + 1]), float(reward), bool(done)


def _plain(text: str) -> str:
  """Text that can be encoded: without halves of surrogate pairs."""
  return text.encode(errors="replace").decode()


if __name__ == "__main__":
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes the pipe
  with suppress(BrokenPipeError, ConnectionResetError, EOFError):
    _serve(Connection(int(sys.argv[1])))
