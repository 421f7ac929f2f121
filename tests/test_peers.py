"""Processes of a run that fall silent are named by the others, and none waits for ever."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from maxtext.distributed.peers import LOST_SECONDS, Silence
from tests.flags import flags

WORKER = """if True:
  import sys, threading
  from maxtext.distributed import peers
  peers.LOST_SECONDS, peers._BEAT_SECONDS, peers._POLL_SECONDS = 3.0, 0.2, 0.1
  from maxtext.distributed.multihost import join
  from tests.support import tiny
  join(tiny(jax_distributed_initialization_timeout=120))
  peers.before_end(lambda why: print("told:", why, flush=True))
  print("joined", flush=True)
  threading.Event().wait(float(sys.argv[1]) if sys.argv[1:] else None)
"""


def free_port():
  with socket.create_server(("127.0.0.1", 0)) as probe:
    return probe.getsockname()[1]


def start(index, port, *stays):
  environment = os.environ | flags() | {
    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": str(index)
  }  # fmt: skip
  return subprocess.Popen(
    [sys.executable, "-c", WORKER, *stays], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )


@pytest.mark.mesh
@pytest.mark.parametrize("silent", [2, 0])
def test_a_process_that_falls_silent_is_named_and_the_others_end(silent):
  port = free_port()
  processes = [start(index, port) for index in range(3)]
  try:
    for process in processes:
      assert process.stdout.readline() == "joined\n"
    time.sleep(1.0)  # each has been heard
    os.kill(processes[silent].pid, signal.SIGSTOP)
    others = [process for index, process in enumerate(processes) if index != silent]
    said = [process.communicate(timeout=60)[0] for process in others]
    assert [process.returncode for process in others] == [1, 1]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  named = (
    f"process 2 on {socket.gethostname()} for 3 s" if silent else f"process 0 at 127.0.0.1:{port}, which coordinates"
  )
  for text in said:
    assert f"maxtext: {'nothing was heard from ' if silent else ''}{named}" in text
    assert "told: " in text


@pytest.mark.mesh
def test_a_process_that_leaves_before_the_others_is_not_missed():
  """And none aborts as Python ends, whatever its threads are doing."""
  port = free_port()
  processes = [start(index, port, stays) for index, stays in enumerate(("5", "5", "0"))]
  try:
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
  finally:
    for process in processes:
      process.kill()
      process.wait()


def test_silence_is_counted_while_this_process_listens():
  silence = Silence()
  silence.hear({"1": "1 host-a", "2": "1 host-b"})
  silence.pass_by(LOST_SECONDS - 1)
  silence.hear({"1": "2 host-a", "2": "1 host-b"})
  silence.pass_by(2)
  assert silence.lost() == {"2": "1 host-b"}
  silence.hear({"1": "2 host-a", "2": "2 host-b"})
  assert not silence.lost()
