"""Short portions of the campaigns of faults, with counts of their own."""

import json
import os
import random
import subprocess
import sys
from pathlib import PurePath

import pytest

from benchmarks.campaign.network import Network, can_make_networks
from benchmarks.campaign.power_loss import Call, Disk
from tests.test_elastic_hosts import Hosts

pytestmark = pytest.mark.chaos


def portion(folder, *words):
  """The outcomes of each target, by fault, after so many seconds for each fault."""
  command = [sys.executable, "-m", "benchmarks.campaign", *words, "--results", str(folder)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
  return {file.stem: {n: c["outcomes"] for n, c in json.loads(file.read_text()).items()} for file in folder.iterdir()}


def left_by_power_losses(tmp_path, skipped):
  """What a hundred of them leave of a file that is replaced, where one of the two syncs is left out."""
  before, root, found = tmp_path / f"before {skipped}", PurePath("/run"), set()
  before.mkdir()
  (before / "a").write_bytes(b"old")

  def call(kind, name, other="", data=b""):
    return Call(kind, 7 if name == "new" else 1, 0, root / name, root / other, data)

  calls = [call("c", "new"), call("w", "new", data=b"new"), call("s", "new"), call("r", "new", "a"), call("s", "")]
  calls = (
    [one for one in calls if not (one.kind == "s" and one.path == root / skipped)] if skipped is not None else calls
  )
  for seed in range(100):
    disk = Disk(before, root)
    disk.lose_power(calls, random.Random(seed), (0.0, 0.5, 1.0)[seed % 3])
    disk.write(tmp_path / f"after {skipped} {seed}")
    found.add((tmp_path / f"after {skipped} {seed}" / "a").read_bytes())
  return found


def test_a_power_loss_keeps_what_was_synced_and_that_alone(tmp_path):
  assert left_by_power_losses(tmp_path, None) == {b"new"}
  assert left_by_power_losses(tmp_path, "") == {b"old", b"new"}
  assert left_by_power_losses(tmp_path, "new") >= {b"", b"new", b"\0\0\0"}


class CutHosts(Hosts):
  """Agents whose hosts have a network of their own."""

  def __init__(self, network, *arguments):
    self.network = network
    super().__init__(*arguments)

  def start(self, host):
    with open(self.folder / f"host-{host}.log", "w") as log:
      return self.network.start(host, self.command(host, self.network.address(host)), os.environ, log)


@pytest.mark.skipif(not can_make_networks(), reason="needs namespaces of Linux")
@pytest.mark.parametrize("cut", [2, 0])
def test_a_host_that_the_network_parts_is_left_out_and_taken_back(tmp_path, cut):
  """Though all agents meet in one folder, and their processes seem to be well."""
  rest = [host for host in range(3) if host != cut]
  with Network(3) as network:
    hosts = CutHosts(network, tmp_path, 3, 1)
    hosts.wait_for(0, 1, 2)
    network.cut(cut)
    hosts.wait_for(*rest)
    network.heal(cut)
    hosts.wait_for(0, 1, 2)
    assert hosts.finish(0, 1, 2) == [0, 0, 0]
  said = (tmp_path / f"host-{rest[0]}.log").read_text()
  parted = "host 2 to host 0" if cut else "hosts 1, 2 to host 0"
  assert f"maxtext: the network does not lead from {parted}. Going on with 2 of 3 hosts" in said


@pytest.mark.slow
def test_kills_and_power_losses_leave_no_wrong_state(tmp_path):
  targets = ["local save", "prepare"]
  found = portion(tmp_path, "kills", "power-loss", "--seconds", "2", "--targets", *targets)
  for fault in ("kills", "power-loss"):
    assert found[fault].keys() <= set(targets)
    assert all(outcomes.keys() == {"right"} for outcomes in found[fault].values())
    assert sum(outcomes["right"] for outcomes in found[fault].values()) >= 10


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_an_hour_of_faults(tmp_path):
  found = portion(tmp_path, "kills", "power-loss", "errors", "names", "hosts", "partitions", "--seconds", "600")
  assert len(found) == 6
