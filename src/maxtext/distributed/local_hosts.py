"""Elastic hosts on one machine: an agent for each, which is replaced when it is lost."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from maxtext.distributed.membership import Membership
from maxtext.distributed.supervisor import backoff_seconds, end_processes, start_process

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0  # for agents to end that have read the last plan


def run_hosts(command_of: Callable[[int, str], Sequence[str]], hosts: int) -> int:
  """Runs the agents of an elastic run and returns its exit code.

  An agent that was lost is started again, a second later at first, and each time after twice as long. SIGTERM and
  Ctrl-C are passed on, and the agents have unlimited time; a second Ctrl-C kills them.

  Args:
    command_of: the command of a host's agent, from its index and the folder in which the agents meet.
    hosts: how many there are.
  """
  asked: list[int] = []
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: asked.append(number))
  # In memory where there is such a folder: a full disk does not end the agreement.
  shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
  held, ours = os.pipe()  # the agents see its end when this process ends
  with tempfile.TemporaryDirectory(prefix="maxtext-hosts-", dir=shared) as folder:

    def start(host: int) -> subprocess.Popen[str]:
      return start_process(command_of(host, folder), {}, held, stdout=None, stderr=None, start_new_session=True)

    agents = [_Host(host, start) for host in range(hosts)]
    plans = Membership(Path(folder), hosts)
    try:
      while (plan := plans.latest_plan()).action != "stop":
        if asked.count(signal.SIGINT) > 1:
          break
        for agent in agents:
          agent.look(stopping=bool(asked))
        if asked and all(agent.has_ended for agent in agents):
          break
        time.sleep(_POLL_SECONDS)
      else:
        return plan.code
      return 128 + asked[0]
    finally:
      end_processes([agent.process for agent in agents], signal.SIGTERM, _GRACE_SECONDS if not asked else 0.0)
      os.close(held)
      os.close(ours)


class _Host:
  """An agent, and how often it was lost."""

  def __init__(self, index: int, start: Callable[[int], subprocess.Popen[str]]) -> None:
    self._index, self._start = index, start
    self.process = start(index)
    self._lost, self._due, self._told = 0, 0.0, False

  @property
  def has_ended(self) -> bool:
    """Whether its process has."""
    return self.process.poll() is not None

  def look(self, stopping: bool) -> None:
    """Passes a request to stop on, or starts it again."""
    if stopping:
      if not self._told:
        self._told = True
        self.process.terminate()
    elif self.has_ended:
      if not self._due:
        self._lost += 1
        self._due = time.monotonic() + backoff_seconds(self._lost)
      elif time.monotonic() > self._due:
        self._due, self.process = 0.0, self._start(self._index)
