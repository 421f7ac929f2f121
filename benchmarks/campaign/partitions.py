"""Networks that part, links that are slow, peers that are there and answer nothing, and coordinators that are lost.

Four hosts have a network of their own (`network.py`), and train together: started by hand, or by agents of an elastic
run. What strikes them passes, or does not. A run that it does not end must step again in time; one that it ends must
end on every host in time, and say who was lost. Then it is resumed, and every step must have the tokens that it has in
an undisturbed run.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.campaign.child import WrongError
from benchmarks.campaign.network import Network, processes_below
from benchmarks.campaign.packed import MAXTEXT, STEP, PackedRuns, environment
from benchmarks.campaign.results import Count

INPUTS = False
_HOSTS = 4
_TOGETHER = 1  # runs at once: most of the time they wait
_TIMES = 2  # that each fault strikes a run that goes on
_PASSES_SECONDS = 10.0  # that a fault lasts which passes
_STARTS_SECONDS = 600.0
_STEPS_SECONDS = 120.0  # for a run that goes on to step again
_ENDS_SECONDS = 150.0  # for all processes to end: one that is silent is given up after 60
_SHRINKS_SECONDS = 240.0  # for the hosts of an elastic run that are left to step again
_GROWS_SECONDS = 240.0  # for all of them, when the others are back
_JOIN_SECONDS = 20  # for processes to find each other
_GOING_ON = re.compile(r"Going on with (\d+) of \d+ hosts")


class Hosts:
  """A run on several hosts, with a command on each, and what it prints."""

  def __init__(self, folder: Path, network: Network, commands: Mapping[int, list[str]]) -> None:
    folder.mkdir()
    self.network, self._folder, self._commands = network, folder, commands
    self.processes = dict[int, subprocess.Popen[str]]()
    for host in commands:
      self.start(host)

  def start(self, host: int) -> None:
    """Starts the command of a host, or starts it again."""
    joining = {"JAX_COORDINATOR_ADDRESS": f"{self.network.address(0)}:7777", "JAX_NUM_PROCESSES": str(_HOSTS),
               "JAX_PROCESS_ID": str(host)}  # fmt: skip
    with (self._folder / f"host-{host}.log").open("a") as log:
      self.processes[host] = self.network.start(host, self._commands[host], environment() | joining, log)

  def text(self, *hosts: int) -> str:
    """What these have printed; all if none is named."""
    return "".join((self._folder / f"host-{host}.log").read_text() for host in hosts or self.processes)

  def last_step(self) -> int:
    """The last one that any process has printed."""
    return max(map(int, STEP.findall(self.text())))

  def wait_for_steps(self, seconds: float, more: int = 3) -> None:
    """Until so many more steps have finished."""
    before = len(STEP.findall(self.text()))

    def happened() -> bool:
      if all(self.has_ended(host) for host in self.processes):
        raise WrongError(f"all have ended: {self.last_words()}")
      return len(STEP.findall(self.text())) >= before + more

    self.wait_until(happened, seconds, f"no {more} steps")

  def wait_until(self, happened: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
      if time.monotonic() > deadline:
        raise WrongError(f"{otherwise} within {seconds:g} s: {self.last_words()}")
      time.sleep(0.25)

  def wait_for_end(self, hosts: Iterable[int], seconds: float) -> None:
    """Until the commands of these have ended."""
    left = list(hosts)
    self.wait_until(lambda: all(self.has_ended(host) for host in left), seconds, f"hosts {left} did not all end")

  def has_ended(self, host: int) -> bool:
    return self.processes[host].poll() is not None

  def send(self, host: int, number: signal.Signals) -> None:
    """A signal to all processes of a host's command."""
    first, *below = processes_below(self.processes[host].pid)
    for pid in [first, *below] if number == signal.SIGCONT else below:  # `nsenter` stops as its child does
      with suppress(ProcessLookupError):
        os.kill(pid, number)

  def terminate(self) -> None:
    """Asks the commands to end, and waits for them."""
    for process in self.processes.values():
      for pid in processes_below(process.pid)[1:2]:
        os.kill(pid, signal.SIGTERM)
    self.wait_for_end(self.processes, _ENDS_SECONDS)
    codes = {host: process.returncode for host, process in self.processes.items()}
    if set(codes.values()) != {128 + signal.SIGTERM}:
      raise WrongError(f"asked to end, they ended with {codes}: {self.last_words()}")

  def last_words(self) -> str:
    found = {host: (process.poll(), self.text(host)[-2000:]) for host, process in self.processes.items()}
    return "\n".join(f"host {host} ({code}):\n{text}" for host, (code, text) in found.items())


@dataclass(frozen=True)
class Fault:
  """What strikes a run.

  Attributes:
    strike: does it.
    lost: the hosts of which one must be named.
    heal: undoes it; none where a host is gone for good.
  """

  strike: Callable[[Hosts], None]
  lost: tuple[int, ...]
  heal: Callable[[Hosts], None] | None = None


def _link(host: int, strike: Callable[[Network, int], None]) -> Fault:
  return Fault(lambda run: strike(run.network, host), (host,), lambda run: run.network.heal(host))


def _stop(host: int) -> Fault:
  """What is half open: a host that takes what is sent, and answers nothing."""
  return Fault(lambda run: run.send(host, signal.SIGSTOP), (host,), lambda run: run.send(host, signal.SIGCONT))


def _kill(host: int) -> Fault:
  return Fault(lambda run: run.send(host, signal.SIGKILL), (host,), lambda run: run.start(host))


def _cut_pair(run: Hosts) -> None:
  run.network.give_up_early(2, 3)
  run.network.cut_pair(2, 3)


FAULTS: Mapping[str, Fault] = {
  "a host is cut off": _link(2, Network.cut),
  "the coordinator is cut off": _link(0, Network.cut),
  "one way to a host is cut": _link(2, Network.cut_way_to),
  "two hosts are cut off from each other": Fault(_cut_pair, (2, 3), lambda run: run.network.heal_pair(2, 3)),
  "a host answers nothing": _stop(2),
  "the coordinator answers nothing": _stop(0),
  "the coordinator is killed": _kill(0),
  "a host is killed": _kill(2),
  "a host has no power": Fault(lambda run: run.network.lose_power(2), (2,)),
  "the coordinator has no power": Fault(lambda run: run.network.lose_power(0), (0,)),
}  # fmt: skip
PASSING: Mapping[str, Fault] = {
  "cut off for 10 s": _link(2, Network.cut),
  "coordinator cut off for 10 s": _link(0, Network.cut),
  "slow for 10 s": _link(1, Network.slow),
  "silent for 10 s": _stop(3),
}  # fmt: skip


class _Runs:
  """Runs that are struck by what passes, and then by a fault that does not; `following` is the number of the next."""

  def __init__(self, fault: Fault, folder: Path) -> None:
    self._fault, self._folder, self._runs = fault, folder, PackedRuns(folder)

  def portion(self, count: Count) -> None:
    """Some runs at once. `seconds` are those from the fault that lasts to what it leads to."""
    (number,) = count.following or [0]
    count.following = [number + _TOGETHER]
    with ThreadPoolExecutor(_TOGETHER) as together:
      done = [together.submit(self._one, f"run{n}") for n in range(number, number + _TOGETHER)]
    for one in done:
      for outcome, seconds in one.result() if one.exception() is None else ():
        count.add(outcome)
        count.seconds += [] if seconds is None else [round(seconds, 1)]
    for one in done:
      one.result()

  def _one(self, name: str) -> list[tuple[str, float | None]]:
    """What came of each strike in a run, and after how many seconds."""
    with Network(_HOSTS) as network:
      run = Hosts(self._folder / f"{name}-logs", network, {h: self._command(network, name, h) for h in network.hosts})
      run.wait_for_steps(_STARTS_SECONDS, 8)
      found = list[tuple[str, float | None]]()
      for passing, fault in _TIMES * list(PASSING.items()):
        self._pass(run, fault)
        found.append((f"{passing}, and all went on", None))
      found += self._last(run)
      if not all(run.has_ended(host) for host in run.processes):
        run.terminate()
    self._check_saved(name, run.last_step())
    return found

  def _pass(self, run: Hosts, fault: Fault) -> None:
    assert fault.heal is not None
    fault.strike(run)
    time.sleep(_PASSES_SECONDS)
    fault.heal(run)
    run.wait_for_steps(_STEPS_SECONDS)
    if ended := [host for host in run.processes if run.has_ended(host)]:
      raise WrongError(f"hosts {ended} have ended: {run.last_words()}")

  def _command(self, network: Network, name: str, host: int) -> list[str]:
    raise NotImplementedError

  def _last(self, run: Hosts) -> Iterator[tuple[str, float]]:
    """What a fault leads to that does not pass."""
    raise NotImplementedError

  def _check_saved(self, name: str, last: int) -> None:
    self._runs.expect_undisturbed(name)

  def _expect_named(self, said: str) -> None:
    lost = "|".join(map(str, self._fault.lost))
    # The leader is what the libraries below JAX call process 0, whose connections were closed.
    leader = r"|the leader \(usually slice 0 task 0\)" if 0 in self._fault.lost else ""
    if not re.search(rf"maxtext: .*(process|hosts?) ({lost})\b{leader}", said):
      raise WrongError(f"nothing names host {lost}: {said[-3000:]}")


class _ByHand(_Runs):
  """A process on each host. Where one is lost all end, and the next start goes on."""

  def _command(self, network: Network, name: str, host: int) -> list[str]:
    return [*MAXTEXT, *self._runs.train(name, _HOSTS, 100_000)]

  def _last(self, run: Hosts) -> Iterator[tuple[str, float]]:
    struck = time.monotonic()
    self._fault.strike(run)
    left = [host for host in run.processes if host not in self._fault.lost] or list(run.processes)
    run.wait_for_end(left, _ENDS_SECONDS)
    seconds = time.monotonic() - struck
    self._expect_named(run.text(*left))
    for host in self._fault.lost:
      run.send(host, signal.SIGCONT)  # it ends too, and saves nothing
    run.wait_for_end(run.processes, _ENDS_SECONDS)
    yield "all ended and named it", seconds

  def _check_saved(self, name: str, last: int) -> None:
    self._runs.alone(name, last + 5)
    super()._check_saved(name, last)


class _Elastic(_Runs):
  """An agent on each host. The others go on where one is lost, and all when it is back."""

  def _command(self, network: Network, name: str, host: int) -> list[str]:
    words = self._runs.train(name, _HOSTS, 100_000)
    elastic = ["elastic_enabled=true", "elastic_min_slice_count=2", "elastic_max_retries=100"]
    own = ["--host", str(host), "--address", network.address(host), "--membership", str(self._folder / f"{name}-met")]
    return [*MAXTEXT, "launch", "--processes", str(_HOSTS), *own, "--", *words, *elastic]

  def _last(self, run: Hosts) -> Iterator[tuple[str, float]]:
    for _ in range(_TIMES if self._fault.heal else 1):
      struck = time.monotonic()
      self._fault.strike(run)
      self._wait_for_plan(run, _SHRINKS_SECONDS, lambda hosts: hosts < _HOSTS)
      run.wait_for_steps(_SHRINKS_SECONDS)
      seconds = time.monotonic() - struck
      self._expect_named(run.text())
      if self._fault.heal is None:
        for host in self._fault.lost:
          del run.processes[host]
        yield "the others went on", seconds
      else:
        self._fault.heal(run)
        self._wait_for_plan(run, _GROWS_SECONDS, lambda hosts: hosts == _HOSTS)
        run.wait_for_steps(_STEPS_SECONDS)
        yield "the others went on, and all when it was back", seconds

  def _wait_for_plan(self, run: Hosts, seconds: float, holds: Callable[[int], bool]) -> None:
    before = {host: len(run.text(host)) for host in run.processes}

    def said() -> bool:
      new = (run.text(host)[length:] for host, length in before.items())
      return any(holds(int(found[1])) for text in new for found in _GOING_ON.finditer(text))

    run.wait_until(said, seconds, "no plan of other hosts")


_KINDS: Mapping[str, type[_Runs]] = {"by hand": _ByHand, "elastic": _Elastic}
TARGETS = {f"{fault} ({kind})": (kind, fault) for kind in _KINDS for fault in FAULTS}


def Campaign(target: tuple[str, str], folder: Path) -> _Runs:  # noqa: N802 - as the other campaigns have it
  """The runs of a target."""
  kind, fault = target
  return _KINDS[kind](FAULTS[fault], folder)
