"""Events of a run, told to a real command: failure, stall and recovery."""

import json
import logging
import resource
import subprocess
import sys
import time

import pytest

from maxtext import ConfigError, train
from maxtext.configs.errors import RunError
from maxtext.observe.events import EventHook
from maxtext.training.callbacks.base import Callback
from tests.support import tiny


@pytest.fixture
def log(tmp_path):
  """A command that notes events, and how to read them."""
  file = tmp_path / "events"
  script = tmp_path / "note.py"
  script.write_text(f"import sys\nopen({str(file)!r}, 'a').write(sys.stdin.read() + chr(10))")

  def read(count):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
      found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
      if len(found) >= count:
        return found
      time.sleep(0.05)
    raise AssertionError(f"{count} events never came: {found}")

  return f"{sys.executable} '{script}'", read


def test_a_stall_and_its_end(log):
  command, read = log
  with EventHook(command, "mine", 0, 0.3) as hook:
    hook.finished(1)
    (stall,) = read(1)
    hook.finished(2)
    _, recovery = read(2)
    hook.finished(3)
  time.sleep(0.5)
  assert len(read(2)) == 2, "steps alone are no event, and nothing is watched after the end"
  assert (stall["event"], stall["step"], stall["run_name"]) == ("stall", 1, "mine")
  assert (recovery["event"], recovery["message"]) == ("recovery", "training goes on after a stall")


@pytest.mark.parametrize(("error", "heard"), [
  (RunError("the loss is not a number; hf_access_token=abc"), ["the loss is not a number; hf_access_token=(redacted)"]),
  (ZeroDivisionError(), ["ZeroDivisionError"]), (ConfigError("a mistake"), []), (KeyboardInterrupt(), []),
])  # fmt: skip
def test_what_is_a_failure(log, error, heard):
  command, read = log
  with pytest.raises(type(error)), EventHook(command, "mine", 0, 0):
    raise error
  assert [event["message"] for event in read(len(heard))] == heard


def test_a_run_whose_peers_are_lost_tells_before_it_ends(log):
  command, read = log
  with EventHook(command, "mine", 4, 0) as hook:
    hook.failed("nothing was heard from process 2")
  assert [(event["event"], event["message"]) for event in read(1)] == [("failure", "nothing was heard from process 2")]


@pytest.mark.parametrize("command", ["/nowhere/at-all", f"{sys.executable} -c 'import sys; sys.exit(3)'"])
def test_a_command_that_fails_does_not_hide_the_failure(command, caplog, monkeypatch):
  monkeypatch.setattr(logging.getLogger("maxtext"), "propagate", True)
  with pytest.raises(RunError, match="own"), EventHook(command, "mine", 0, 0):
    raise RunError("own")
  assert "event_command did not take a failure" in caplog.text


HANGS = (
  "import subprocess, sys, time; subprocess.Popen(['sleep', '98765']); sys.stderr.write('x' * 10**8); time.sleep(99)"
)


def test_a_command_that_hangs_ends_with_what_it_started_and_is_not_kept_in_memory(monkeypatch, caplog):
  monkeypatch.setattr(logging.getLogger("maxtext"), "propagate", True)
  monkeypatch.setattr("maxtext.observe.events._TIMEOUT_SECONDS", 3.0)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with pytest.raises(RunError, match="own"), EventHook(f'{sys.executable} -c "{HANGS}"', "mine", 0, 0):
    raise RunError("own")
  assert "it has not ended within 3 s" in caplog.text
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10
  assert subprocess.run(["pgrep", "-f", "sleep 98765"], check=False, stdout=subprocess.DEVNULL).returncode == 1


@pytest.mark.parametrize("command", ["curl 'x", "  "])
def test_what_is_no_command(command):
  with pytest.raises(ConfigError, match=r"event_command=.* is no command"):
    tiny(event_command=command)


class Broken(Callback):
  def on_step(self, step, metrics):
    if step == 3:
      raise RunError("it broke")


def test_a_run_that_fails_and_is_started_again(log, tmp_path):
  command, read = log
  config = tiny(steps=4, run_name="mine", base_output_directory=str(tmp_path), event_command=command,
                per_device_batch_size=1, enable_checkpointing=True,
                checkpoint_period=2, base_num_decoder_layers=1)  # fmt: skip
  with pytest.raises(RunError):
    train(config, callbacks=[Broken()])
  train(config)
  failure, recovery = read(2)
  assert (failure["event"], failure["message"]) == ("failure", "it broke")
  assert (recovery["event"], recovery["message"]) == ("recovery", "training goes on after step 2")
