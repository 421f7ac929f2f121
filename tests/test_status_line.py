"""The status line, in real pseudo-terminals: it never wraps, and nothing of it is left when the program ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxtext.observe.metric_writers import TimeLeft, fill, short_duration, status_parts
from maxtext.status_line import fit
from tests.flags import flags
from tests.support import TINY
from tests.terminal import Terminal

MAXTEXT = str(Path(sys.executable).with_name("maxtext"))

METRICS = {
  "loss": 5.9568, "grad_norm": 1.97, "learning_rate": 3e-4, "step_time_seconds": 4.5, "tokens_per_second": 12345.0,
  "mfu": 0.412,
}  # fmt: skip

PROGRAM = f"""
import sys, time
from maxtext.logs import ConsoleHandler, setup_logging
from maxtext.observe.metric_writers import ConsoleWriter
from maxtext.status_line import status_line
setup_logging()
with status_line() as status:
  status.phase("compiling a step whose name is longer than a narrow terminal is wide")
  time.sleep(0.5)
  writer = ConsoleWriter(100, range(5000), status=status, memory=lambda: (12_300_000_000, 16_000_000_000))
  for step in range(1, 121):
    writer.write(step, {METRICS})
    if step == 50:
      print("a callback", end=" ")
      time.sleep(0.5)
      print("prints")
      print("an error", file=sys.stderr)
    time.sleep(0.01)
  print("ready", flush=True)
  time.sleep(%f)
"""


def run(columns, *, sleep=0.0, keys="", **environment):
  env = {**os.environ, "TERM": "xterm", **environment}
  terminal = Terminal([sys.executable, "-c", PROGRAM % sleep], columns, env=env)
  if keys:
    terminal.wait_for("ready")
    terminal.press(keys)
  return terminal, terminal.wait()


@pytest.mark.parametrize("columns", [20, 70, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_left(columns):
  terminal, code = run(columns)
  assert code == 0, terminal.output
  drawn, rows = terminal.drawn(), terminal.screen()
  assert len(drawn) > 5
  assert max(map(len, drawn)) < columns
  lines = [row for row in rows if row.startswith("step")]
  assert [int(re.match(r"step +(\d+)/5000", line)[1]) for line in lines] == [1, 2, 5, 10, 100]
  assert rows[-1] == "", "the prompt starts on a line of its own"
  assert [row for row in rows if not row.startswith("step")] == ["a callback prints", "an error", "ready", ""]
  if columns >= 70:
    last = drawn[-1]
    assert re.search(r"step 120/5000  loss 5.957  12.3k tok/s  MFU 41%  12/16GB  \d+:\d\d left$", last), last
    assert lines[0].startswith("step    1/5000  loss 5.9568  grad norm 1.97  lr 0.0003  4.500 s")
  assert ("MFU 41.2%" in lines[0]) == (columns == 120)
  assert ("[=" in drawn[-1]) == (columns == 120)


def test_control_c_leaves_a_clean_terminal():
  terminal, code = run(70, sleep=30.0, keys="\x03")
  assert code != 0
  rows = [row.replace("^C", "") for row in terminal.screen()]  # the terminal's own echo comes whenever it likes
  assert rows[-2:] == ["KeyboardInterrupt", ""]
  assert not any("left" in row for row in rows), "the status line is erased"
  assert set(re.findall(r"\x1b\[[^A-Za-z]*[A-Za-z]", terminal.output)) == {"\x1b[K"}, "the cursor is never hidden"


def test_a_terminal_that_cannot_erase_gets_lines():
  terminal, code = run(70, TERM="dumb")
  assert code == 0
  assert "\x1b" not in terminal.output
  assert [row.split("/")[0] for row in terminal.screen() if row.startswith("step")][:3] == [
    "step    1",
    "step    2",
    "step    3",
  ]


def test_a_pipe_gets_lines():
  """As a notebook does, whose streams are no terminals."""
  done = subprocess.run([sys.executable, "-c", PROGRAM % 0], capture_output=True, text=True, check=True)
  assert "\r" not in done.stdout
  assert "\x1b" not in done.stdout
  assert len(re.findall(r"^step ", done.stdout, re.M)) == 11
  assert done.stderr == "an error\n"


FORKS = """
import os, sys, time
from maxtext.status_line import status_line
with status_line() as status:
  status.phase("waiting")
  time.sleep(0.5)
  for _ in range(20):
    child = os.fork()
    if not child:
      print("child", flush=True)
      time.sleep(0.3)
      os._exit(0)
  time.sleep(1)
  while True:
    try:
      os.wait()
    except ChildProcessError:
      break
"""


def test_a_forked_process_prints_and_draws_nothing():
  terminal = Terminal([sys.executable, "-c", FORKS], 70, env={**os.environ, "TERM": "xterm"})
  assert terminal.wait(30) == 0
  assert terminal.output.count("child") == 20
  assert terminal.screen()[-1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading JAX", "compiling the step", r"step +5/"])
def test_control_c_in_every_phase_of_a_run(moment, tmp_path):
  keys = TINY | {
    "steps": 100000, "run_name": "a", "base_output_directory": "runs", "per_device_batch_size": 1,
    "enable_checkpointing": True, "log_period": 1000,
  }  # fmt: skip
  words = [MAXTEXT, "train", *(f"{key}={value}" for key, value in keys.items())]
  terminal = Terminal(words, 70, env={**os.environ, **flags(), "TERM": "xterm"}, cwd=tmp_path)
  assert terminal.wait_for(moment), terminal.output
  terminal.press("\x03")
  assert terminal.wait() == 130, terminal.output
  rows = terminal.screen()
  assert rows[-2:] == ["maxtext: stopped.", ""]
  assert max(map(len, terminal.drawn())) < 70
  started = (tmp_path / "runs" / "a" / "metrics.jsonl").exists()
  assert moment == "compiling the step" or started == moment.startswith("step"), "a step may be compiled before a key"
  assert bool(list(tmp_path.iterdir())) == started, "a start that was stopped leaves nothing"
  assert ("maxtext: run_name=a resumes it." in rows) == started


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading JAX", "compiling the step"])
def test_termination_before_the_first_step_leaves_nothing(moment, tmp_path):
  words = [MAXTEXT, "train", *(f"{key}={value}" for key, value in (TINY | {"base_output_directory": "runs"}).items())]
  terminal = Terminal(words, 70, env={**os.environ, **flags(), "TERM": "xterm"}, cwd=tmp_path)
  assert terminal.wait_for(moment), terminal.output
  terminal.process.send_signal(signal.SIGTERM)
  start = time.monotonic()
  assert terminal.wait() == 143, terminal.output
  assert time.monotonic() - start < 5
  assert terminal.screen()[-2:] == ["maxtext: stopped.", ""]
  assert not list(tmp_path.iterdir())


EVALUATES = """
import time
from maxtext.status_line import status_line
from maxtext.training.callbacks.evaluate import Evaluate
with status_line() as status:
  status.show(lambda width: "step 19/20")
  Evaluate(lambda state: time.sleep(0.5), 10, 0.0).on_update(20, None, None, {})
"""


def test_the_line_says_when_a_run_evaluates():
  terminal = Terminal([sys.executable, "-c", EVALUATES], 70, env={**os.environ, "TERM": "xterm"})
  assert terminal.wait() == 0, terminal.output
  assert terminal.drawn() == ["step 19/20", "evaluating step 20  0 s"]


def test_parts_that_do_not_fit_are_left_out_by_importance():
  parts = [(0, "step 1/9"), (2, "rate"), (1, "left")]
  assert [fit(parts, width) for width in (30, 15, 8, 3)] == ["step 1/9  rate  left", "step 1/9  left", "step 1/9", ""]
  assert fill(parts, 0.5, 80) == f"[{'=' * 15}{' ' * 15}]  step 1/9  rate  left"
  assert fit(status_parts(1, 9, {}, None, None), 70) == "step 1/9"


def test_the_time_left_leaves_the_compilation_out():
  left = TimeLeft(101)
  left.update(1, 1000.0)
  assert left.seconds is None
  left.update(2, 1002.0)
  assert left.seconds == pytest.approx(99 * 2)
  for step in range(3, 60):
    left.update(step, 1002.0 + (step - 2) * 4.0)
  assert left.seconds == pytest.approx(42 * 4, rel=0.02)


def test_short_durations():
  assert [short_duration(seconds) for seconds in (0, 9, 61, 3599, 3780, 183600)] == [
    "0:00", "0:09", "1:01", "59:59", "1h03m", "2d03h",
  ]  # fmt: skip
  everything = status_parts(4999, 5000, METRICS, (12_000_000_000, 16_000_000_000), 3780)
  assert len(fit(everything, 999)) < 70, "a run of thousands of steps shows all in 70 columns"
