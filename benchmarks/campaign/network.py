"""Hosts with a network of their own: Linux namespaces, with a link each to a switch, on which links are cut and slowed.

A cut drops packets without a word, as a network does that parts: nothing is refused or reset.
"""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_SLOW = ("rate", "200kbit", "burst", "16kb", "latency", "2s")


def can_make_networks() -> bool:
  """Whether this system and its user may."""
  words = ["unshare", "--net", "--pid", "--uts", "--mount", "--fork", "ip", "link", "add", "one", "type", "veth"]
  try:
    return not subprocess.run([*words, "peer", "name", "two"], capture_output=True, check=False).returncode
  except FileNotFoundError:
    return False


class Network:
  """So many hosts, named `host-0` and so on, each with its own processes, name and address; files are common.

  A context manager, at whose end all of their processes are gone.
  """

  def __init__(self, hosts: int) -> None:
    self.hosts = range(hosts)
    self._folder = tempfile.TemporaryDirectory(prefix="network-")
    names = Path(self._folder.name) / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(h)} {self.name(h)}\n" for h in self.hosts))
    self._switch = _hold(["unshare", "--net"], "ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_forward")
    unshare = ["unshare", "--net", "--pid", "--uts", "--mount", "--fork", "--mount-proc", "--kill-child"]
    self._held = {h: _hold(unshare, f"hostname {self.name(h)}; mount --bind {names} /etc/hosts") for h in self.hosts}
    for host in self.hosts:
      inside, near, far = _first_of(self._held[host]), f"10.77.{host}.1", self.address(host)
      self._on_switch(f"ip link add {_link(host)} type veth peer name eth0 netns {inside}")
      self._on_switch(f"ip address add {near}/24 dev {_link(host)}; ip link set {_link(host)} up")
      own = f"ip link set lo up; ip address add {far}/24 dev eth0; ip link set eth0 up"
      own += f"; ip route add default via {near}"
      subprocess.run(["nsenter", "-t", inside, "-n", "sh", "-ec", own], check=True)

  def __enter__(self) -> "Network":
    return self

  def __exit__(self, *_: object) -> None:
    for held in (*self._held.values(), self._switch):
      held.kill()
      held.wait()
    self._folder.cleanup()

  def name(self, host: int) -> str:
    return f"host-{host}"

  def address(self, host: int) -> str:
    return f"10.77.{host}.2"

  def start(self, host: int, words: Sequence[str], environment: Mapping[str, str], out: IO[str]) -> "subprocess.Popen":
    """A process on a host. What ends is told by it; signals are for `pid_of`."""
    inside = _first_of(self._held[host])
    command = ["nsenter", "-t", inside, "-n", "-p", "-u", "-m", *words]
    return subprocess.Popen(command, env=dict(environment), stdout=out, stderr=subprocess.STDOUT, text=True)

  def lose_power(self, host: int) -> None:
    """Ends a host and all that runs there; nobody is told."""
    self.cut(host)
    self._held[host].kill()
    self._held[host].wait()

  def cut(self, host: int) -> None:
    """Between one host and all others."""
    self._on_switch(f"ip link set {_link(host)} down")

  def cut_way_to(self, host: int) -> None:
    """What the others send does not arrive; what it sends does."""
    self._on_switch(f"ip route add blackhole {self.address(host)}/32")

  def cut_pair(self, one: int, other: int) -> None:
    """Between two hosts, that both reach all others."""
    for here, there in ((one, other), (other, one)):
      self._on_switch(f"ip rule add iif {_link(here)} to {self.address(there)}/32 blackhole")

  def give_up_early(self, *hosts: int) -> None:
    """Connections end some 15 seconds after nothing more is confirmed, instead of 15 minutes."""
    for host in hosts:
      words = ["nsenter", "-t", _first_of(self._held[host]), "-n", "sh", "-c"]
      subprocess.run([*words, "echo 5 > /proc/sys/net/ipv4/tcp_retries2"], check=True)

  def heal_pair(self, one: int, other: int) -> None:
    """Undoes that."""
    for here, there in ((one, other), (other, one)):
      self._on_switch(f"ip rule del iif {_link(here)} to {self.address(there)}/32 blackhole")

  def slow(self, host: int) -> None:
    """A link of so few bits per second that a message takes long."""
    self._on_switch(f"tc qdisc add dev {_link(host)} root tbf {' '.join(_SLOW)}")

  def heal(self, host: int) -> None:
    """Undoes what was done to a host's link."""
    link = _link(host)
    self._on_switch(f"ip link set {link} up; tc qdisc del dev {link} root 2>/dev/null || true")
    self._on_switch(f"ip route del blackhole {self.address(host)}/32 2>/dev/null || true")

  def _on_switch(self, script: str) -> None:
    subprocess.run(["nsenter", "-t", str(self._switch.pid), "-n", "sh", "-ec", script], check=True)


def processes_below(pid: int) -> list[int]:
  """A process and all that it has started, as this process numbers them."""
  found = [pid]
  for parent in found:
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
      found += [int(word) for word in task.read_text().split()]
  return found


def _link(host: int) -> str:
  return f"to-host{host}"


def _hold(unshare: Sequence[str], script: str) -> subprocess.Popen[str]:
  """A process that has namespaces and keeps them."""
  words = [*unshare, "sh", "-ec", f"{script}; echo held; exec cat"]  # until the pipe ends, with this process
  process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  assert process.stdout is not None
  if process.stdout.readline() != "held\n":
    raise OSError(f"{unshare} makes no namespaces here")
  return process


def _first_of(held: subprocess.Popen[str]) -> str:
  """The process that is in the namespaces: of process ids the child of the one that has made them."""
  return str(processes_below(held.pid)[-1])
