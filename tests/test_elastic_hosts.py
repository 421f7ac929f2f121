"""Hosts of an elastic run that are killed, stopped and mistaken: what they agree on, with real agents and processes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from maxtext.cli.main import main
from maxtext.distributed import reach
from maxtext.distributed.agent import Agent
from maxtext.distributed.leader import ElasticPolicy, Leader
from maxtext.distributed.membership import HostPlan, HostRecord, Membership

# A process that trains nothing: it notes its start, beats, and ends as files in the folder say.
WORKER = """if True:
  import json, os, signal, sys, time
  from pathlib import Path
  from maxtext.distributed.heartbeat import finished_step, start_heartbeat
  start_heartbeat()
  signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
  line = sys.stdin.readline()
  if not line:
    sys.exit()
  request = json.loads(line)
  os.environ |= request["environment"]
  folder, host = Path(request["arguments"][0]), os.environ["MAXTEXT_HOST"]
  if (folder / "unhandled").exists():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
  start = [int(host), int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"]), os.getpid()]
  with open(folder / "starts", "a") as file:
    file.write(json.dumps(start) + "\\n")
  for step in range(6000):
    finished_step(step)
    if start[2] == 0:
      Path(os.environ["MAXTEXT_PROGRESS_FILE"]).write_text("7")
    if (folder / "end").exists():
      sys.exit()
    if (code := folder / f"code-{host}").exists():
      sys.exit(int(code.read_text()))
    time.sleep(0.02)
"""

AGENT = """if True:
  import sys
  from pathlib import Path
  from maxtext.distributed import agent, heartbeat, leader, membership, reach, warm_process
  folder, host, hosts, least, timeout = sys.argv[1], *map(int, sys.argv[2:6])
  heartbeat.BEAT_SECONDS, warm_process.SILENT_SECONDS, agent.SILENT_SECONDS = 0.1, 5.0, 5.0
  membership._BEAT_SECONDS, leader._SETTLE_SECONDS, leader._ANSWER_SECONDS = 0.1, 0.5, 3.0
  agent._LISTEN_SECONDS = 0.5
  reach.CUT_SECONDS, reach._EVERY_SECONDS, reach._CONNECT_SECONDS = 10.0, 0.2, 2.0
  policy = leader.ElasticPolicy(hosts, least, timeout, 3)
  standby = [sys.executable, "-c", sys.argv[6]]
  sys.exit(agent.Agent(standby, [folder], host, policy, Path(folder) / "members", sys.argv[7]).run())
"""


PATIENCE = 240


class Hosts:
  """Agents as processes of their own."""

  def __init__(self, folder, hosts, least, timeout=200):
    self.folder, self.hosts, self.least, self.timeout = folder, hosts, least, timeout
    self.agents = {host: self.start(host) for host in range(hosts)}

  def start(self, host):
    return subprocess.Popen(self.command(host), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

  def command(self, host, address="127.0.0.1"):
    words = [str(self.folder), *map(str, (host, self.hosts, self.least, self.timeout))]
    return [sys.executable, "-c", AGENT, *words, WORKER, address]

  def starts(self):
    """Host, processes, index and process id of every process that was started."""
    with suppress(OSError):
      return [json.loads(line) for line in (self.folder / "starts").read_text().splitlines()]
    return []

  def wait_for(self, *wanted):
    """Until the last starts are those of these hosts; returns their process ids by host."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
      last = self.starts()[-len(wanted) :]
      if sorted(last)[: len(wanted)] and {tuple(start[:3]) for start in last} == {
        (host, len(wanted), index) for index, host in enumerate(wanted)
      }:
        return {start[0]: start[3] for start in last}
      time.sleep(0.05)
    raise AssertionError(f"{wanted} never ran together: {self.starts()}")

  def finish(self, *hosts):
    (self.folder / "end").touch()
    return [self.agents[host].wait(timeout=PATIENCE) for host in hosts]

  def lose(self, *hosts, by=signal.SIGKILL):
    for host in hosts:
      self.agents[host].send_signal(by)


@contextmanager
def agents(folder, hosts, least, **options):
  found = Hosts(folder, hosts, least, **options)
  try:
    yield found
  finally:
    for agent in found.agents.values():
      agent.kill()
      agent.wait()
      agent.stdout.close()


def wait_until(happened):
  deadline = time.monotonic() + PATIENCE
  while not happened():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_a_lost_leader_is_left_out_and_the_run_grows_when_it_is_back(tmp_path):
  with agents(tmp_path, 3, 1) as hosts:
    hosts.wait_for(0, 1, 2)
    others = Membership(tmp_path / "members", 9)
    wait_until(lambda: others.live().get(2, RECORD).saved == 7)  # which host 0 alone has seen
    hosts.lose(0)
    hosts.wait_for(1, 2)
    hosts.agents[0] = hosts.start(0)
    hosts.wait_for(0, 1, 2)
    assert hosts.finish(0, 1, 2) == [0, 0, 0]


def test_two_that_are_lost_at_once(tmp_path):
  with agents(tmp_path, 3, 1) as hosts:
    hosts.wait_for(0, 1, 2)
    hosts.lose(0, 2)
    hosts.wait_for(1)
    assert hosts.finish(1) == [0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_is_replaced_on_its_host(tmp_path, how):
  with agents(tmp_path, 2, 1) as hosts:
    before = hosts.wait_for(0, 1)
    os.kill(before[1], how)
    wait_until(lambda: len(hosts.starts()) >= 4)
    after = hosts.wait_for(0, 1)
    assert not set(after.values()) & set(before.values()), "the others are started again too"
    assert hosts.finish(0, 1) == [0, 0]
    assert not os.path.exists(f"/proc/{before[1]}"), "nothing is left of it"


def test_too_few_hosts_end_the_run_in_words(tmp_path):
  with agents(tmp_path, 2, 2, timeout=3) as hosts:
    hosts.wait_for(0, 1)
    hosts.lose(0)
    assert hosts.agents[1].wait(timeout=PATIENCE) == 1
    said = hosts.agents[1].stdout.read()
  assert "host 0 is lost; 1 of the 2 hosts that elastic_min_slice_count asks for are there after" in said


@pytest.mark.parametrize(("code", "ends"), [("2", 2), ("1", 1)])
def test_a_mistake_ends_it_at_once_and_failures_after_so_many(tmp_path, code, ends):
  (tmp_path / "code-1").write_text(code)
  with agents(tmp_path, 2, 1) as hosts:
    assert [hosts.agents[host].wait(timeout=PATIENCE) for host in range(2)] == [ends, ends]
  failed = [start for start in hosts.starts() if start[0] == 1]  # the other may be ended before it notes its start
  assert len(failed) == 1 if ends == 2 else 1 < len(failed) <= 4


def test_sigterm_of_one_host_leaves_the_others_running_and_of_all_ends_the_run(tmp_path):
  with agents(tmp_path, 2, 1) as hosts:
    os.kill(hosts.wait_for(0, 1)[0], signal.SIGTERM)  # JAX tells the other processes of a run; here the test does
    hosts.lose(1, by=signal.SIGTERM)
    assert hosts.agents[1].wait(timeout=PATIENCE) == 143
    hosts.wait_for(0)
    hosts.lose(0, by=signal.SIGTERM)
    assert hosts.agents[0].wait(timeout=PATIENCE) == 143


def test_a_process_that_no_longer_handles_sigterm_has_stopped_and_not_failed(tmp_path):
  """It has saved with the others and is about to end when its own agent asks it to."""
  (tmp_path / "unhandled").touch()
  with agents(tmp_path, 2, 1) as hosts:
    hosts.wait_for(0, 1)
    hosts.lose(0, 1, by=signal.SIGTERM)
    assert [hosts.agents[host].wait(timeout=60) for host in (0, 1)] == [143, 143]


def test_a_host_that_leaves_ends_at_once_though_the_others_wait_for_another(tmp_path):
  with agents(tmp_path, 2, 2) as hosts:
    processes = hosts.wait_for(0, 1)
    hosts.lose(1, by=signal.SIGTERM)
    os.kill(processes[0], signal.SIGTERM)  # as above: all processes of a run end together
    assert hosts.agents[1].wait(timeout=60) == 143
    assert hosts.agents[0].poll() is None
    hosts.agents[1] = hosts.start(1)
    hosts.wait_for(0, 1)
    assert hosts.finish(0, 1) == [0, 0]


def test_two_agents_of_one_host_and_an_address_that_others_do_not_reach(tmp_path):
  """The second of them ends, and the run does not notice."""
  with agents(tmp_path, 2, 1) as hosts:
    hosts.wait_for(0, 1)
    hosts.agents[2] = hosts.start(1)
    assert hosts.agents[2].wait(timeout=PATIENCE) == 1
    assert "ConfigError: --host 1: another agent of this host takes part" in hosts.agents[2].stdout.read()
    assert (len(hosts.starts()), Membership(tmp_path / "members", 9).latest_plan().number) == (2, 1)
    other = Membership(tmp_path / "members", 5)
    other.own = replace(other.own, machine="another boot")

    def ended():
      other.publish()
      return hosts.agents[0].poll()

    wait_until(lambda: ended() is not None)
    assert "ConfigError: --address 127.0.0.1: host 5 is another machine" in hosts.agents[0].stdout.read()


def test_a_host_that_leaves_is_not_kept_by_a_plan_that_was_made_before(tmp_path):
  first = Membership(tmp_path / "members", 0)
  with agents(tmp_path, 2, 1) as hosts:
    hosts.agents.pop(0).kill()

    def found():
      first.publish()
      return first.live().get(1, RECORD)

    wait_until(lambda: found() is not RECORD)
    plan = HostPlan(1, "run", {0: first.own.nonce, 1: found().nonce}, found().address)
    (tmp_path / "code-1").write_text("1")
    first.propose(plan)
    wait_until(lambda: found().state == "failed")
    hosts.lose(1, by=signal.SIGTERM)
    wait_until(lambda: found().leaving)
    (tmp_path / "code-1").unlink()
    first.propose(replace(plan, number=2))
    wait_until(lambda: found().plan == 2 and found().state in ("failed", "stopped"))


def test_a_warm_process_that_ends_leaves_nothing(tmp_path):
  policy = ElasticPolicy(1, 1, 60.0, 0)
  agent = Agent([sys.executable, "-c", ""], [], 0, policy, tmp_path)
  before = len(os.listdir("/proc/self/fd"))
  agent._warm = agent._start_warm()
  wait_until(lambda: agent._watch() or agent._warm is None)
  assert len(os.listdir("/proc/self/fd")) <= before


RECORD = HostRecord("n", 1, "", "", address="a:1", state="running", plan=1, step=3)


def decide(plan, records, *seconds):
  """The leader's plan at the last of these times, when every host beats on."""
  leader = Leader(ElasticPolicy(3, 1, 60.0, 2))
  for beat, now in enumerate((0.0, *(seconds or (5.0,)))):
    made = leader.next_plan(plan, {host: replace(r, beat=r.beat + beat) for host, r in records.items()}, now)
  return made


def test_what_the_leader_decides():
  plan = HostPlan(1, "run", {host: "n" for host in range(3)}, saved=10)
  running = dict.fromkeys(range(3), RECORD)
  assert decide(plan, running) is None
  assert decide(plan, running | {1: replace(RECORD, state="done")}) is None, "the others still save"
  done = decide(plan, dict.fromkeys(range(3), replace(RECORD, state="done")))
  assert (done.action, done.code) == ("stop", 0)
  failed = decide(plan, running | {1: replace(RECORD, state="failed", code=1, why="ended with code 1")})
  assert (failed.action, set(failed.members), failed.retries) == ("run", {0, 1, 2}, 1)
  assert decide(plan, running | {1: replace(RECORD, nonce="new", plan=0)}).action == "run", "it was started again"
  assert set(decide(plan, running | {1: replace(RECORD, suspect=True, why="x")}).members) == {0, 2}
  tired = replace(plan, retries=2)
  again = running | {2: replace(RECORD, state="failed", code=1)}
  assert decide(tired, again).action == "stop"
  further = {host: replace(record, saved=11) for host, record in again.items()}
  assert decide(tired, further).retries == 1, "a step was saved between"
  grow = decide(replace(plan, members={0: "n", 1: "n"}), running, 60.0)
  assert (grow.action, set(grow.members)) == ("drain", {0, 1})


def test_hosts_that_the_network_parts_are_left_out():
  """Of two sides the smaller one, though all of them meet in the folder."""
  plan = HostPlan(1, "run", {host: f"n{host}" for host in range(4)}, saved=10)
  running = {host: replace(RECORD, nonce=f"n{host}", door="a:2", reaches="n0") for host in range(4)}
  cut = replace(RECORD, door="a:2", cut_from="n0")
  one = decide(plan, running | {2: replace(cut, nonce="n2")})
  assert (one.action, set(one.members)) == ("run", {0, 1, 3})
  assert one.why == "the network does not lead from host 2 to host 0"
  unsure = {2: replace(cut, nonce="n2"), 1: replace(running[1], reaches="")}
  assert decide(plan, running | unsure) is None, "host 1 may find the same"
  three = decide(plan, running | {host: replace(cut, nonce=f"n{host}") for host in (1, 2, 3)})
  assert (three.action, set(three.members)) == ("run", {1, 2, 3})
  rest = replace(plan, members={0: "n0", 1: "n1"})
  assert decide(rest, running | {2: replace(cut, nonce="n2"), 3: replace(cut, nonce="n3")}, 60.0) is None
  back = decide(rest, running | {3: replace(cut, nonce="n3")}, 60.0)
  assert back.action == "drain", "host 2 reaches the others again"
  gone = {host: record for host, record in running.items() if host} | {2: replace(cut, nonce="n2")}
  assert decide(plan, gone).why == "host 0 is lost"


def test_a_host_is_cut_off_when_it_has_reached_nothing_for_so_long(monkeypatch):
  monkeypatch.setattr(reach, "_EVERY_SECONDS", 0.05)
  monkeypatch.setattr(reach, "CUT_SECONDS", 0.3)
  door, there = reach.Door("127.0.0.1"), reach.Reach()
  assert there.reached == there.cut_from == ""
  there.look_at("n", door.address)
  wait_until(lambda: there.reached == "n")
  door.answer()
  door.close()
  wait_until(lambda: there.cut_from == "n")
  assert not there.reached
  there.look_at("m", door.address)
  assert not there.cut_from, "of another host nothing is known yet"
  assert reach.Door("203.0.113.1").address == "", "an address that this machine does not have"


def test_a_host_that_is_silent_is_not_waited_for():
  plan, leader = HostPlan(1, "run", {host: "n" for host in range(3)}), Leader(ElasticPolicy(3, 1, 60.0, 2))
  records = dict.fromkeys(range(3), RECORD) | {2: replace(RECORD, state="failed", code=1, why="ended")}
  assert leader.next_plan(plan, records, 0.0) is None
  beating = {host: replace(record, beat=1) for host, record in records.items() if host != 1} | {1: records[1]}
  assert leader.next_plan(plan, beating, 4.0) is None, "it may answer yet"
  assert set(leader.next_plan(plan, beating, 6.0).members) == {0, 2}


def test_of_two_leaders_one_makes_the_plan(tmp_path):
  one, other = Membership(tmp_path, 0), Membership(tmp_path, 1)
  one.propose(HostPlan(1, "run", {0: "a"}))
  other.propose(HostPlan(1, "run", {1: "b"}))
  assert one.latest_plan() == other.latest_plan() == HostPlan(1, "run", {0: "a"})
  (tmp_path / "host-7").write_bytes(b"\0 not a record")
  (tmp_path / "host-1.swp").touch()
  assert set(one.live()) == {0}


def test_a_plan_that_was_never_written_as_a_whole_keeps_nobody(tmp_path, monkeypatch):
  """On a disk without hard links, of a host that was lost at the wrong moment."""
  monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError))
  one = Membership(tmp_path, 0, lost_seconds=0.2)
  (tmp_path / "plan-1").write_text('{"number": 1, "act')
  plan = HostPlan(1, "run", {0: "a"})
  assert one.latest_plan().number == 0
  one.propose(plan)
  assert (tmp_path / "plan-1").read_text().endswith('"act'), "it may be written yet"
  time.sleep(0.3)
  one.propose(plan)
  one.propose(plan)
  assert one.latest_plan() == plan


def test_liveness_is_what_changes_and_not_what_a_clock_says(tmp_path, monkeypatch):
  one, other = Membership(tmp_path, 0, lost_seconds=2.0), Membership(tmp_path, 1)
  monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that is far off
  other.publish(step=1)
  assert set(one.live()) == {0}, "what was there before may be of another day"
  other.publish(step=2)
  assert set(one.live()) == {0, 1}
  os.utime(tmp_path / "host-1", (0, 0))
  assert one.live()[1].step == 2
  time.sleep(2.1)
  assert set(one.live()) == {0}


ELASTIC = ("--", "train", "small-llama", "run_name=a", "elastic_enabled=true", "enable_checkpointing=true")


@pytest.mark.parametrize(
  ("flags", "keys", "said"),
  [
    (["--restarts", "3"], [], "--restarts 3: an elastic run counts them by elastic_max_retries"),
    (["--membership", "m"], [], "--membership m needs --host"),
    (["--host", "2", "--membership", "m"], [], "--host 2 is one of 0 to 1"),
    (["--host", "0"], [], "needs --membership FOLDER"),
    (["--host", "0", "--membership", "m"], ["elastic_enabled=false"], "write elastic_enabled=true"),
    (["--host", "0", "--membership", "m"], [], "--membership m is of a run that has ended: remove it"),
    (["--host", "0", "--membership", "m/plan-1"], [], "--membership m/plan-1 cannot be used: File exists"),
    ([], ["elastic_min_slice_count=3"], "elastic_min_slice_count=3 is more than the --processes 2"),
    ([], ["run_name="], "needs run_name"),
  ],
)
def test_mistakes_are_named(flags, keys, said, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  Membership(tmp_path / "m", 0).propose(HostPlan(1, "stop"))
  assert main(["launch", "--processes", "2", *flags, *ELASTIC, *keys]) == 2
  assert said in capsys.readouterr().err
