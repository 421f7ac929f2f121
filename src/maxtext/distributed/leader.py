"""What the leader of an elastic run decides: the live host with the lowest index. Pure: it sees records and a clock."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from maxtext.distributed.membership import HostPlan, HostRecord, State
from maxtext.distributed.supervisor import NOT_RETRIED

_ANSWER_SECONDS = 5.0  # in which a host that is there beats again
_SETTLE_SECONDS = 10.0  # from a start to the next growth: hosts that return together are taken together


@dataclass(frozen=True)
class ElasticPolicy:
  """How a run may shrink.

  Attributes:
    hosts: of the whole run.
    min_hosts: with fewer it waits.
    timeout: seconds that it waits for them.
    max_retries: failures in a row, without a later saved step, before it ends.
  """

  hosts: int
  min_hosts: int
  timeout: float
  max_retries: int


class Leader:
  """Decides on the next plan. Every host has one and asks it only while it leads."""

  def __init__(self, policy: ElasticPolicy) -> None:
    self._policy = policy
    self._plan, self._since = -1, 0.0  # the last plan that was seen, and since when
    self._waiting: float | None = None  # since when hosts are wanted
    self._beats: dict[int, int] = {}  # of every host, when they began to be wanted

  def next_plan(self, plan: HostPlan, live: Mapping[int, HostRecord], now: float) -> HostPlan | None:
    """The plan after this one; None while nothing is to be changed."""
    if plan.number != self._plan:
      self._plan, self._since, self._waiting = plan.number, now, None
    if plan.action == "stop":
      return None
    members = {host: live[host] for host, nonce in plan.members.items() if host in live and live[host].nonce == nonce}
    following = {host: record for host, record in members.items() if record.plan == plan.number}
    if mistakes := [(host, r) for host, r in following.items() if r.state == "failed" and r.code in NOT_RETRIED]:
      host, record = mistakes[0]
      return self._stop(plan, f"the process of host {host} {record.why}", max(record.code, 1))
    apart, why = _cut_off(plan, live)
    problems = [f"host {host} is lost" for host in plan.members if host not in members]
    problems += [why] if apart & plan.members.keys() else []
    problems += [f"host {host} is suspected: {r.why}" for host, r in members.items() if r.suspect]
    problems += [f"the process of host {host} {r.why}" for host, r in following.items() if r.state == "failed"]
    saved = max((record.saved for record in live.values()), default=-1)
    live = {host: record for host, record in live.items() if host not in apart}
    if problems:
      retries = 1 if saved > plan.saved else plan.retries + 1
      if retries > self._policy.max_retries:
        return self._stop(plan, f"{problems[0]}; that was failure {retries} without a later saved step", 1)
      return self._form(replace(plan, why="; ".join(problems), retries=retries, saved=saved), live, now)
    states: set[State] = set()
    if len(following) == len(plan.members):
      states = {record.state for record in following.values()}
    if states == {"done"}:
      return self._stop(plan, "", 0)
    if not plan.number or (states and states <= {"stopped", "done", "ready"}):
      if all(record.leaving for record in live.values()):
        return self._stop(plan, "", 128 + signal.SIGTERM)
      staying = {host: record.nonce for host, record in members.items() if not record.leaving}
      usable = sum(record.is_usable for record in live.values())
      if staying and len(staying) < len(members) and usable < self._policy.min_hosts:
        # A plan without those that leave lets them end.
        why = f"host {min(members.keys() - staying.keys())} leaves, and the others wait for enough hosts"
        return replace(plan, number=plan.number + 1, action="drain", members=staying, why=why, saved=saved)
      why = "hosts come or go" if plan.number else ""
      return self._form(replace(plan, why=why, saved=saved), live, now)
    if plan.action == "run" and self._may_grow(plan, live, states, now):
      return replace(plan, number=plan.number + 1, action="drain", why="a host is back: every process saves and ends")
    return None

  def _may_grow(self, plan: HostPlan, live: Mapping[int, HostRecord], states: set[State], now: float) -> bool:
    new = [
      host
      for host, record in live.items()
      if host not in plan.members and record.is_usable and _reaches_coordinator(record, plan, live)
    ]
    stepping = states == {"running"} and all(live[host].step >= 0 for host in plan.members)
    return bool(new) and stepping and now - self._since > _SETTLE_SECONDS

  def _form(self, plan: HostPlan, live: Mapping[int, HostRecord], now: float) -> HostPlan | None:
    """A run of the hosts that have answered; None while more may."""
    if self._waiting is None:
      self._waiting, self._beats = now, {host: record.beat for host, record in live.items()}
    usable = {host: r for host, r in live.items() if r.is_usable and r.beat != self._beats.get(host) and r.address}
    lacking = len(usable) < min(self._policy.min_hosts, self._policy.hosts)
    expected = sum(record.is_usable for record in live.values()) if plan.number else self._policy.hosts
    patience = _ANSWER_SECONDS if plan.number and not lacking else self._policy.timeout
    if (lacking or len(usable) < expected) and now - self._waiting < patience:
      return None
    if lacking:
      there = f"{len(usable)} of the {self._policy.min_hosts} hosts that elastic_min_slice_count asks for are there"
      return self._stop(plan, f"{plan.why}; {there} after elastic_timeout_seconds={self._policy.timeout:g}", 1)
    members = {host: record.nonce for host, record in usable.items()}
    return replace(plan, number=plan.number + 1, action="run", members=members, address=usable[min(usable)].address)

  def _stop(self, plan: HostPlan, why: str, code: int) -> HostPlan:
    return replace(plan, number=plan.number + 1, action="stop", why=why.removeprefix("; "), code=code)


def _cut_off(plan: HostPlan, live: Mapping[int, HostRecord]) -> tuple[set[int], str]:
  """The hosts that the network parts from the others, and how: of two sides the one with fewer members of the plan, or
  the one that does not coordinate."""
  first = plan.coordinator
  if first is None or first not in live or live[first].nonce != plan.members[first]:
    return set(), ""
  apart = {host for host, record in live.items() if record.cut_from == plan.members[first]}
  others = [live[host] for host in plan.members if host in live and host != first]
  if not apart or not all(record.cut_from or record.reaches for record in others):
    return set(), ""  # some of one side may not know it yet
  members, named = plan.members.keys() & apart, ", ".join(map(str, sorted(apart)))
  why = f"the network does not lead from host{'s' if len(apart) > 1 else ''} {named} to host {first}"
  if 2 * len(members) > len(plan.members):
    return set(plan.members.keys() - apart), why
  return apart, why


def _reaches_coordinator(record: HostRecord, plan: HostPlan, live: Mapping[int, HostRecord]) -> bool:
  """Whether a host that is back would find the others; one that cannot tell does."""
  first = plan.coordinator
  return first is None or first not in live or not live[first].door or record.reaches == plan.members[first]
