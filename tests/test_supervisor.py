"""Starting again: how often, how soon, and what not; and processes that end with whoever supervises them."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from maxtext.distributed import die_with_parent, supervisor
from maxtext.distributed.progress import VARIABLE
from maxtext.distributed.supervisor import backoff_seconds, supervise


def supervised(script: str, *words: str, processes: int = 1, restarts: int = 0) -> tuple[int, str]:
  said, command = io.StringIO(), [sys.executable, "-c", script, *words]
  with ThreadPoolExecutor(1) as thread:  # the supervisor would take SIGTERM from the main one
    return thread.submit(supervise, command, processes, restarts, out=said).result(), said.getvalue()


def test_each_start_in_vain_is_waited_for_twice_as_long():
  for attempt in range(1, 8):
    found = [backoff_seconds(attempt) for _ in range(50)]
    assert all(2 ** (attempt - 2) <= seconds <= 2 ** (attempt - 1) for seconds in found)
    assert len(set(found)) > 1, "hosts that fail together do not return together"
  assert backoff_seconds(50) <= 120
  assert sum(min(backoff_seconds(attempt) for _ in range(20)) for attempt in range(1, 21)) > 600, "no storm of restarts"


# It saves as many steps as there are starts up to some number, and always fails.
SAVES = f"""if True:
  import os, pathlib, sys
  starts = pathlib.Path(sys.argv[1])
  starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
  pathlib.Path(os.environ["{VARIABLE}"]).write_text(str(min(len(starts.read_text()), int(sys.argv[2]))))
  sys.exit(1)
"""


def test_starts_are_counted_anew_after_progress(tmp_path, monkeypatch):
  monkeypatch.setattr(supervisor, "_FIRST_SECONDS", 0.02)
  code, said = supervised(SAVES, str(tmp_path / "starts"), "4", restarts=2)
  assert code == 1
  # Starts 1 to 4 each came further than the one before, so 5 and 6 are the two in vain.
  assert re.findall(r"again in [\d.]+ s \((\d) of 2\)", said) == ["1", "1", "1", "1", "2"]
  assert (tmp_path / "starts").read_text() == "x" * 6


@pytest.mark.parametrize(
  "end", ["sys.exit(2)", "sys.exit(126)", "sys.exit(127)", "os.kill(os.getpid(), signal.SIGILL)"]
)
def test_what_will_not_get_better_is_not_tried_again(end):
  code, said = supervised(f"import os, signal, sys; {end}", restarts=5)
  assert code
  assert "again" not in said


def test_a_command_that_is_not_there_is_not_tried_again():
  said = io.StringIO()
  with ThreadPoolExecutor(1) as thread:
    assert thread.submit(supervise, ["/no/such/command"], 1, 3, out=said).result() == 127
  assert said.getvalue() == "[0] /no/such/command: No such file or directory\nmaxtext: process 0 ended with code 127.\n"


def test_sigterm_while_waiting_to_start_again_ends_it():
  script = "import sys; from maxtext.distributed.supervisor import supervise; sys.exit(supervise(['false'], 1, 30))"
  with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
    while "(3 of 30)" not in process.stdout.readline():
      pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143


# The fallback of systems without the signal is the same command with a pipe, so it can be tried here.
SUPERVISOR = """if True:
  import sys
  from maxtext.distributed import supervisor
  if sys.argv[1] == "pipe":
    supervisor.sys = type("Other", (), dict(vars(sys), platform="darwin"))
  worker = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
  supervisor.supervise([sys.executable, "-c", worker], 2)
"""


def gone(pid: int) -> bool:
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
  except OSError:
    return True


@pytest.mark.chaos
@pytest.mark.parametrize("by", ["signal", "pipe"])
def test_processes_die_with_a_supervisor_that_is_killed(by):
  with subprocess.Popen([sys.executable, "-c", SUPERVISOR, by], stdout=subprocess.PIPE, text=True) as process:
    workers = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    assert not any(map(gone, workers))
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not all(map(gone, workers)):
      assert time.monotonic() < deadline, "a process outlived its supervisor"
      time.sleep(0.05)


def test_a_process_whose_supervisor_was_gone_before_it_began_does_not_begin():
  command = [sys.executable, "-I", "-S", die_with_parent.__file__, "1", "-", "echo", "began"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("moment", ["starting all", "ended with code"])
def test_a_signal_while_it_writes_a_message_ends_it(moment):
  """Not only while it sleeps between two starts: the output here sends the signal in the middle of a message."""
  script = f"""if True:
    import os, signal, sys
    from maxtext.distributed.supervisor import supervise
    class Out:
      def write(self, text):
        if {moment!r} in text:
          os.kill(os.getpid(), signal.SIGTERM)
      def flush(self):
        pass
    sys.exit(supervise(["false"], 1, 30, out=Out()))"""
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
  assert (done.returncode, done.stderr) == (143, "")
