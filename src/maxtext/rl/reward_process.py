"""A user's reward function in a process of its own, so that it may fail or hang without the run."""

import importlib
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from maxtext.configs import ConfigError

_LOG = logging.getLogger(__name__)
_START_SECONDS = 120.0  # to import the module, which may bring a large library


class RewardProcess:
  """Calls `module:function` with prompts, completions and answers, and takes one number for each.

  A call that fails or takes longer than the limit rewards its answers with 0, which is logged and counted; the process
  is then started anew.

  Raises:
    ConfigError: there is no such module or function.
  """

  def __init__(self, name: str, timeout: float) -> None:
    self._name, self._timeout, self.failures = name, timeout, 0
    self._process: Any = None
    self._start()

  def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The rewards."""
    if self._process is None:
      self._start()
    self._connection.send((list(prompts), list(completions), list(answers)))
    problem, rewards = self._receive(self._timeout) or (f"no answer in {self._timeout:g} s", [])
    if problem is None and (len(rewards) != len(completions) or not all(map(math.isfinite, rewards))):
      problem = f"{len(rewards)} numbers for {len(completions)} answers, or one that is not finite"
    if problem is None:
      return rewards
    self.failures += 1
    _LOG.warning(f"maxtext: reward_functions: {self._name} failed, and its answers get 0: {problem}")
    self.close()
    return [0.0] * len(completions)

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.kill()
      self._process.join()
      self._connection.close()
      self._process = None

  def _start(self) -> None:
    context = multiprocessing.get_context("spawn")
    self._connection, theirs = context.Pipe()
    self._process = context.Process(target=_serve, args=(self._name, os.getcwd(), theirs), daemon=True)
    self._process.start()
    theirs.close()
    problem, _ = self._receive(_START_SECONDS) or (f"it was not imported in {_START_SECONDS:g} s", [])
    if problem is not None:
      self.close()
      raise ConfigError(f"reward_functions: {self._name}: {problem}.")

  def _receive(self, timeout: float) -> tuple[str | None, list[float]] | None:
    """What is wrong, if anything, and rewards; None if nothing came in time."""
    try:
      return self._connection.recv() if self._connection.poll(timeout) else None
    except (EOFError, OSError):
      return "its process ended", []


def _serve(name: str, folder: str, connection: Connection) -> None:
  """The loop of the process: imports the function from the user's folder, then answers calls."""
  sys.path.insert(0, folder)
  module, _, function = name.partition(":")
  try:
    found = getattr(importlib.import_module(module), function)
  except Exception as error:
    connection.send((f"{type(error).__name__}: {error}", []))
    return
  connection.send((None, []))
  while True:
    try:
      call = connection.recv()
    except EOFError:
      return
    try:
      connection.send((None, [float(value) for value in found(*call)]))
    except Exception as error:
      connection.send((f"{type(error).__name__}: {error}", []))
