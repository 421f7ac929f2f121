"""Programs as answers: one that passes its tests gets 1, and all others 0, in bounded time and without a trace."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxtext import load_config
from maxtext.rl.code_answers import CodeRunner, find_code
from maxtext.rl.rewards import Rewards
from tests.test_rl import keys

SECONDS = 2.0

# Programs that would harm the machine of a developer whose sandbox is broken end themselves there.
GUARD = """
import os, resource
assert os.getpid() < 10 and len([n for n in os.listdir("/proc") if n.isdecimal()]) < 10
assert resource.getrlimit(resource.RLIMIT_NPROC)[1] <= 8
"""

PASSES = {
  "right": ("def f(x):\n  return x + 1", "assert f(1) == 2"),
  "own folder": ("open('a', 'w').write('x')", "assert open('a').read() == 'x'"),
  "a library": ("import numpy as np", "assert np.ones(3).sum() == 3"),
  "a thread": ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", ""),
}
LIMITED = {
  "wrong": ("def f(x):\n  return x", "assert f(1) == 2"),
  "no Python": ("def f(x:", ""),
  "raises": ("1 / 0", ""),
  "exit": ("import sys\ndef f(x): sys.exit(0)", "assert f(1) == 2"),
  "hard exit": ("import os\ndef f(x): os._exit(0)", "assert f(1) == 2"),
  "endless loop": ("while True: pass", ""),
  "sleep": ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)", ""),
  "memory": ("x = bytearray(2 << 30)", ""),
  "memory in steps": ("x = []\nwhile True: x.append(bytearray(1 << 20))", ""),
  "processes": ("import os, time\nfor _ in range(20):\n  if not os.fork():\n    time.sleep(9)\n    os._exit(0)", ""),
  "threads": ("import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=[9]).start()", ""),
  "huge output": ("while True: print('x' * 1000000)", ""),
  "huge file": ("file = open('a', 'wb')\nfor _ in range(1000): file.write(bytes(1 << 20))", ""),
}
ISOLATED = {
  "fork bomb": (f"{GUARD}\nwhile True:\n  try: os.fork()\n  except OSError: pass", ""),
  "kills everyone": (f"{GUARD}\nos.kill(-1, 9)", ""),
  "many files": ("for n in range(100): open(f'{n}', 'wb').write(bytes(1 << 20))", ""),
}


def namespaces():
  """Whether this machine permits them."""
  try:
    return subprocess.run(["unshare", "-Urnpf", "--mount", "true"], capture_output=True, check=False).returncode == 0
  except FileNotFoundError:
    return False


pytestmark = pytest.mark.skipif(not namespaces(), reason="no namespaces here")


@pytest.fixture(scope="module")
def runner():
  """With time enough on a busy machine."""
  return CodeRunner(60.0, 1 << 30, lambda completion: None)


@pytest.mark.parametrize("name", PASSES)
def test_what_passes(runner, name):
  assert runner.passes(*PASSES[name])


def test_the_guard_of_these_tests_passes(runner):
  assert runner.passes(GUARD, "")


@pytest.mark.parametrize("name", [*LIMITED, *ISOLATED])
def test_what_does_not_pass(name):
  began, runner = time.monotonic(), CodeRunner(SECONDS, 1 << 30, lambda completion: None)
  assert not runner.passes(*(LIMITED | ISOLATED)[name])
  assert time.monotonic() - began < SECONDS + 30
  assert not left(), "nothing of it is left"


def left():
  """Whether a process of a sandbox stays. Those of tests beside this one end by themselves."""
  for _ in range(100):
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    if "code_sandbox.py" not in found:
      return False
    time.sleep(0.1)
  return True


def test_there_is_no_network(runner):
  with socket.create_server(("127.0.0.1", 0)) as server:
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, "without the sandbox there is"
    assert not runner.passes(code, "")


def test_files_of_others_cannot_be_written(runner, tmp_path):
  own, code = tmp_path / "own", "import pathlib\npathlib.Path({!r}).write_text('x')"
  home = Path.home() / f"maxtext-{os.getpid()}"
  for path in (own, home):
    assert not runner.passes(code.format(str(path)), "")
    assert not path.exists()
  assert runner.passes(code.format("own"), ""), "its folder can"
  read_write = "import ctypes\nlibc = ctypes.CDLL(None)\na = (ctypes.c_uint64 * 4)(0, 1, 0, 0)\n"
  assert not runner.passes(f"{read_write}assert libc.syscall(442, -100, b'/', 0x8000, a, 32) == 0", "")


def test_what_is_left_running_ends_with_the_tests(runner):
  assert runner.passes("import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(1000)\n  os._exit(0)", "")
  assert not left()


def test_variables_of_the_run_are_out_of_sight(runner, monkeypatch):
  monkeypatch.setenv("SOME_TOKEN", "secret")
  assert runner.passes("import os", "assert 'SOME_TOKEN' not in os.environ")
  assert runner.passes("import os", f"assert not os.path.exists('/proc/{os.getpid()}/environ')")


WITHOUT = """
import os, subprocess, sys
assert os.getpid() < 100, "in a namespace of processes"
from maxtext.rl.code_answers import CodeRunner
if os.path.exists("/usr/bin/python3"):  # which other users may read
  sys.executable = "/usr/bin/python3"
runner = CodeRunner(4.0, 1 << 30, lambda completion: None)
from tests.test_code_rewards import LIMITED, PASSES, left
for name in ("right", "own folder"):
  assert runner.passes(*PASSES[name]), name
for name, program in LIMITED.items():
  assert not runner.passes(*program), name
assert runner.passes("import os, time\\nif not os.fork():\\n  os.setsid()\\n  time.sleep(1000)\\n  os._exit(0)", "")
assert not left()
assert not runner.passes(f"import os\\nos.kill({os.getpid()}, 0)", ""), "processes of others are not its own"
assert not runner.passes("import pathlib\\npathlib.Path(%r).write_text('x')" % sys.argv[1], "")
"""


OUTER = """
import ctypes, os, sys
libc, users, command = ctypes.CDLL(None), sys.argv[1], sys.argv[2:]
ready, go = os.pipe(), os.pipe()
child = os.fork()
if not child:
  assert libc.unshare(0x10000000 | 0x20000000 | 0x00020000) == 0  # users, processes, mounts
  os.write(ready[1], b".")
  os.read(go[0], 1)
  if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
  assert os.getpid() == 1
  assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0
  open("/proc/sys/user/max_user_namespaces", "w").write("0")
  if not os.fork():  # the first process of a namespace ignores signals
    os.execv(command[0], command)
  os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os.close(ready[1])
os.read(ready[0], 1)
for name in ("uid_map", "gid_map"):
  open(f"/proc/{child}/{name}", "w").write(f"0 0 {users}")
os.write(go[1], b".")
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def in_a_namespace(users, tmp_path):
  """Runs `WITHOUT` as root of a namespace of processes and so many users that permits no further one."""
  code, other = tmp_path / "code.py", tmp_path / "other"
  code.write_text(WITHOUT)
  command = [sys.executable, "-c", OUTER, str(users), sys.executable, str(code), str(other)]
  environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
  done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
  assert not other.exists()
  return done


@pytest.mark.skipif(os.geteuid() != 0, reason="for root")
def test_root_without_namespaces_runs_programs_by_another_user(tmp_path):
  done = in_a_namespace(2_000_000_000, tmp_path)
  assert done.returncode == 0, done.stderr
  assert (done.stdout + done.stderr).count("permits no namespaces") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="for root")
def test_nobody_runs_programs_as_the_user_of_the_run(tmp_path):
  done = in_a_namespace(1, tmp_path)
  assert done.returncode
  assert "ConfigError: reward_functions=[code] runs programs in namespaces" in done.stderr


@pytest.mark.parametrize(
  ("text", "code"),
  [
    ("```python\na\n``` and ```python\nb\n```", "b\n"), ("```py\na\n```\n```\nb\n```", "a\n"), ("```python\na", None),
    ("a", None), ("", None), ("```\na\n```", None), ("``````", None), ("```Python \na```", "a"),
  ],
)  # fmt: skip
def test_the_code_of_an_answer_is_its_last_block(text, code):
  assert find_code(text) == code


def test_rewards_of_programs(tmp_path):
  config = load_config(**keys(tmp_path, tmp_path, reward_functions=["code"]))
  rewards, test = Rewards.of(config), "assert f(1) == 2"
  texts = ["```python\nf = lambda x: x + 1\n```", "<answer>f = lambda x: x + 1</answer>", "f = lambda x: x + 1",
           "```python\nf = lambda x: x\n```", "```python\n" * 3000, "\udcff```python\n\udcff\n```"]  # fmt: skip
  [found] = rewards(["what?"] * 6, texts, [test] * 6).values()
  assert found.tolist() == [1, 1, 0, 0, 0, 0]
  rewards.close()
