"""The agent of one host of an elastic run: it follows the plans that the hosts agree on, and makes them while it leads.

It starts the host's process for a plan, and keeps a second one warm, so that a restart costs no imports. It ends its
process when the plan changes: JAX cannot change the processes of a runtime that has begun.
"""

import math
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from maxtext.configs import ConfigError
from maxtext.distributed.hosts import ALL_HOSTS, THIS_HOST
from maxtext.distributed.leader import ElasticPolicy, Leader
from maxtext.distributed.membership import HostPlan, HostRecord, Membership
from maxtext.distributed.progress import VARIABLE, read_progress
from maxtext.distributed.reach import Door, Reach
from maxtext.distributed.supervisor import STOPPED, describe_end, free_port, joining, write
from maxtext.distributed.warm_process import SILENT_SECONDS, WarmProcess

_POLL_SECONDS = 0.05
_LOOPBACK = ("127.", "localhost", "::1", "[::1]")
_WARM_AFTER_SECONDS = 20.0  # of a run whose steps have not begun: until then the processor has other work
_GRACE_SECONDS = 10.0
_LISTEN_SECONDS = 2.0  # before a host leads


class Agent:
  """One host.

  Args:
    standby: the command of a process that waits to be told what to run.
    command: the arguments that it is told.
    host: the index of this host.
    policy: of the run.
    folder: on storage that all hosts see.
    address: of this host, as the others reach it.
    stall_timeout: seconds without a step or a line of output, after which the process has stalled.
    out: where its output goes.
  """

  def __init__(
    self,
    standby: Sequence[str],
    command: Sequence[str],
    host: int,
    policy: ElasticPolicy,
    folder: Path,
    address: str = "127.0.0.1",
    stall_timeout: float = math.inf,
    out: TextIO = sys.stdout,
  ) -> None:
    self._standby, self._command, self._host, self._policy, self._out = standby, command, host, policy, out
    self._address, self._stall_timeout = address, stall_timeout
    self._membership, self._leader = Membership(folder, host), Leader(policy)
    self._door, self._reach = Door(address), Reach()
    self._process: WarmProcess | None = None
    self._warm: WarmProcess | None = None
    self._began = self._moved = 0.0
    self._sign: tuple[int, int] = (-1, 0)
    self._started, self._leaving = time.monotonic(), False

  def run(self) -> int:
    """Takes part until the run ends, and returns its exit code. SIGTERM makes this host leave after a saved step."""
    signal.signal(signal.SIGTERM, self._leave)
    self._membership.wait_for_rival(_LISTEN_SECONDS)
    if (rival := self._membership.rival) is not None:
      raise self._mistaken(rival)
    self._warm = self._start_warm()
    self._membership.publish(address=self._new_address(), door=self._door.address)
    with tempfile.TemporaryDirectory(prefix="maxtext-agent-") as own:
      self._progress = Path(own) / "step"
      try:
        while (code := self._turn()) is None:
          time.sleep(_POLL_SECONDS)
      finally:
        for process in (self._process, self._warm):
          if process is not None:
            process.kill()
        self._door.close()
    return code

  def _turn(self) -> int | None:
    """One look at everything; the exit code of a run that has ended."""
    membership = self._membership
    plan = membership.latest_plan()
    if plan.number > membership.own.plan:
      self._follow(plan)
      if plan.action == "stop":
        return plan.code
    if self._leaving and not membership.own.leaving:
      membership.publish(leaving=True)
      if self._process is not None:
        self._process.terminate()
    self._watch()
    live = membership.live()
    if (rival := membership.rival) is not None and self._yields_to(rival, plan):
      raise self._mistaken(rival)
    self._check_address(live)
    self._look_at_coordinator(plan, live)
    membership.publish(saved=max(record.saved for record in live.values()))  # known if that one is lost
    if self._leaving and self._process is None and (plan.number == 0 or self._host not in plan.members):
      return 128 + signal.SIGTERM
    first = time.monotonic() - self._started < _LISTEN_SECONDS  # it may not have heard of the others yet
    if not first and self._host == min(live) and (following := self._leader.next_plan(plan, live, time.monotonic())):
      membership.propose(following)
    return None

  def _yields_to(self, rival: HostRecord, plan: HostPlan) -> bool:
    """Whether it is this one of two agents with the same index that ends: not the one that the plan counts on."""
    own, counts_on = self._membership.own.nonce, plan.members.get(self._host)
    return counts_on != own and (counts_on == rival.nonce or own > rival.nonce)

  def _mistaken(self, rival: HostRecord) -> ConfigError:
    return ConfigError(
      f"--host {self._host}: another agent of this host takes part, process {rival.pid} at {rival.address}: give each "
      "host an index of its own, or end that agent."
    )

  def _check_address(self, live: Mapping[int, HostRecord]) -> None:
    """Raises `ConfigError` if this host's address leads other machines to themselves."""
    boot = self._membership.own.machine.partition(" ")[0]
    elsewhere = [host for host, record in live.items() if record.machine.partition(" ")[0] != boot]
    if elsewhere and self._address.startswith(_LOOPBACK):
      raise ConfigError(
        f"--address {self._address}: host {elsewhere[0]} is another machine, which does not reach this one there: "
        "write the address or the name that it has in their network."
      )

  def _look_at_coordinator(self, plan: HostPlan, live: Mapping[int, HostRecord]) -> None:
    """Whether the network between this host and that one is there; the folder in which they meet may be elsewhere."""
    self._door.answer()
    host = plan.coordinator
    if host is not None and host != self._host and host in live and live[host].nonce == plan.members[host]:
      self._reach.look_at(plan.members[host], live[host].door)
    else:
      self._reach.look_at("", "")
    self._membership.publish(reaches=self._reach.reached, cut_from=self._reach.cut_from)

  def _follow(self, plan: HostPlan) -> None:
    own = self._membership.own
    # Where the network parts the host that leads from the run, both say so.
    if plan.why and own.plan and self._host in (min(self._membership.live()), plan.coordinator):
      write(self._out, f"maxtext: {plan.why}.{self._describe(plan)}\n")
    if plan.action == "drain" and self._process is not None:
      self._process.terminate()
      self._membership.publish(plan=plan.number)
    elif plan.action == "run" and plan.members.get(self._host) == own.nonce:
      self._end_process()
      self._begin(plan)
      self._membership.publish(plan=plan.number, state="running", step=-1, code=0, why="", address=self._new_address())
    else:
      if self._process is not None and plan.action == "stop":
        self._process.end(_GRACE_SECONDS)
      self._end_process()
      self._membership.publish(plan=plan.number, state="ready", step=-1)

  def _describe(self, plan: HostPlan) -> str:
    if plan.action != "run":
      return ""
    return f" Going on with {len(plan.members)} of {self._policy.hosts} hosts: {', '.join(map(str, plan.members))}"

  def _begin(self, plan: HostPlan) -> None:
    members = sorted(plan.members)
    environment = joining(plan.address, len(members), members.index(self._host)) | {
      ALL_HOSTS: str(self._policy.hosts), THIS_HOST: str(self._host), VARIABLE: str(self._progress),
    }  # fmt: skip
    self._process, self._warm = self._warm or self._start_warm(), None
    self._process.begin(self._command, environment)
    self._began = self._moved = time.monotonic()
    if self._leaving:  # the plan was made before this was heard
      self._process.terminate()

  def _watch(self) -> None:
    """The process: whether it has ended, hangs or stalls. One that steps gets another one to take its place."""
    if self._warm is not None and self._warm.poll() is not None:
      self._warm.kill()
      self._warm = None
    if (process := self._process) is None:
      return
    code, now = process.poll(), time.monotonic()
    if process.is_suspect:
      self._membership.publish(suspect=True, why="its devices are wrong")
    step, saved = process.step, max(self._membership.own.saved, read_progress(self._progress))
    if (step, process.output.lines) != self._sign or process.output.forwarding:
      self._sign, self._moved = (step, process.output.lines), now
    if code is None and process.is_silent:
      code, why = 1, f"has given no sign of life for {SILENT_SECONDS:g} s"
    elif code is None and now - self._moved > self._stall_timeout:
      code, why = 1, f"has neither finished a step nor written anything for {self._stall_timeout:g} s"
      process.kill_with_stacks()
    elif code is not None:
      why = describe_end(code)
    else:
      if self._warm is None and (step >= 0 or now - self._began > _WARM_AFTER_SECONDS):
        self._warm = self._start_warm()
      if (step, saved) != (self._membership.own.step, self._membership.own.saved):
        self._membership.publish(step=step, saved=saved)
      return
    self._end_process()
    # SIGTERM may come after the process has saved with the others and no longer handles it.
    stopped = code in STOPPED or (code == -signal.SIGTERM and process.asked)
    state = "done" if code == 0 else "stopped" if stopped else "failed"
    if self._membership.own.suspect:
      why = self._membership.own.why
    self._membership.publish(state=state, code=code, why=why, step=step, saved=saved)

  def _end_process(self) -> None:
    if self._process is not None:
      self._process.kill()
      self._process = None

  def _start_warm(self) -> WarmProcess:
    return WarmProcess(self._standby, self._host, self._out)

  def _new_address(self) -> str:
    return f"{self._address}:{free_port()}"

  def _leave(self, number: int, frame: Any) -> None:
    self._leaving = True
