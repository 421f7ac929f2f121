"""The command as a user meets it: real processes, real terminals' habits."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

import maxtext
from tests.flags import flags
from tests.support import History, tiny

MAXTEXT = str(Path(sys.executable).with_name("maxtext"))


def run(*words: str, **kwargs) -> subprocess.CompletedProcess:
  env = os.environ | flags()
  return subprocess.run([MAXTEXT, *words], capture_output=True, text=True, env=env, timeout=120, check=False, **kwargs)


@pytest.mark.slow
def test_quick_start_learns(tmp_path):
  file = tmp_path / "out" / "metrics.jsonl"
  done = run("train", "small-llama", "steps=12", "jax_cache_dir=", f"metrics_file={file}", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  first = next(i for i, line in enumerate(lines) if line.startswith("step"))
  assert first <= 25
  assert lines[first].startswith("step  1/12  loss ")
  losses = [json.loads(line)["loss"] for line in file.read_text().splitlines()]
  assert len(losses) == 12
  assert losses[-1] < losses[0] - 1
  shown = [float(re.search(r"loss (\S+)", line)[1]) for line in lines[first:-1]]
  np.testing.assert_allclose(shown, [losses[i] for i in (*range(10), 11)], atol=1e-4)


def test_a_mistake_is_one_line_and_exit_code_two(tmp_path):
  for words, message in (
    (["small-llama", "stepps=3"], "maxtext: 'stepps' is not a key. Did you mean 'steps'?"),
    (["smal-llama"], "Did you mean 'small-llama'?"),
    (["mine.yml"], "Cannot read mine.yml: No such file or directory."),
    (["small-llama", "steps"], "'steps' is not of the form key=value."),
    (["small-llama", "hardware=tpu"], "hardware=tpu, but JAX finds cpu devices"),
    (["small-llama", "ici_fsdp_parallelism=3"], "ici_fsdp_parallelism=3 does not multiply to the 1 devices"),
    (["small-llama", "base_output_directory=/proc/nothing"], "base_output_directory=/proc/nothing cannot be written"),
  ):
    done = run("train", *words, cwd=tmp_path)
    assert done.returncode == 2, words
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"


@pytest.mark.slow
def test_every_run_explains_itself(tmp_path):
  for name, rate in (("slow", 1e-4), ("fast", 1e-3)):
    words = ["steps=4", f"run_name={name}", f"learning_rate={rate}", "jax_cache_dir=", "base_output_directory=out"]
    done = run("train", "small-llama", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"report: out/{name}/report.html"
  folder = tmp_path / "out" / "fast"
  config = json.loads((folder / "config.json").read_text())
  assert config["learning_rate"] == {"value": 0.001, "from": "command line"}
  assert config["base_emb_dim"] == {"value": 192, "from": "small-llama"}
  assert config["adam_b1"] == {"value": 0.9, "from": "default"}
  facts = json.loads((folder / "run.json").read_text())
  assert facts["command"][1:3] == ["train", "small-llama"]
  assert facts["versions"]["jax"]
  assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
  done = run("report", "out/slow", "out/fast", "--out", "both.html", cwd=tmp_path)
  assert (done.returncode, done.stdout) == (0, "both.html\n")
  page = (tmp_path / "both.html").read_text()
  pictures = xml.etree.ElementTree.fromstring(re.search(r'<div class="grid">.*</div>', page)[0])
  lines = pictures.findall(".//polyline")
  assert len(lines) == 2 * 5, "five pictures with a line per run"
  loss = lines[0].attrib["points"].split()
  assert len(loss) == 4
  assert float(loss[0].split(",")[1]) < float(loss[-1].split(",")[1]), "a falling loss falls on the page"
  wrong = run("report", "out/none", cwd=tmp_path)
  assert (wrong.returncode, wrong.stdout) == (2, "")
  assert wrong.stderr.startswith("maxtext: out/none is not a run's folder")


@pytest.mark.slow
def test_prometheus_and_a_terminal(tmp_path):
  """On a terminal there is a bar with the time left; a monitor reads the last figures meanwhile."""
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  words = ["steps=40", "jax_cache_dir=", f"prometheus_port={port}", f"base_output_directory={tmp_path}"]
  leader, follower = pty.openpty()
  env = os.environ | {"XLA_FLAGS": "", "TERM": "xterm", "COLUMNS": "120"}
  with subprocess.Popen(
    [MAXTEXT, "train", "small-llama", *words], stdout=follower, stderr=follower, env=env
  ) as process:
    os.close(follower)
    shown, figures = b"", ""
    with contextlib.suppress(OSError):  # the terminal is gone when the process is
      while piece := os.read(leader, 65536):
        shown += piece
        if b"step 10" in shown and not figures:
          figures = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    os.close(leader)
  assert process.returncode == 0, shown
  assert b"step 40/40  loss" in shown
  assert b"left" in shown
  assert re.search(r"^maxtext_loss [5-8]\.", figures, re.M)
  assert 10 <= float(re.search(r"^maxtext_step (\S+)", figures, re.M)[1]) <= 40


@pytest.mark.slow
def test_a_trace_and_the_stacks_of_a_run(tmp_path):
  words = ["steps=12", "profiler=xplane", "skip_first_n_steps_for_profiler=3", "profiler_steps=2", "run_name=traced",
           "collect_stack_trace=true", "stack_trace_interval_seconds=1", "jax_cache_dir="]  # fmt: skip
  done = run("train", "small-llama", *words, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  traces = list((tmp_path / "runs" / "traced" / "profile").rglob("*.xplane.pb"))
  assert len(traces) == 1
  assert b"train_step" in traces[0].read_bytes()
  assert "Thread MainThread:" in done.stderr
  assert "train/loop.py" in done.stderr


def test_keys_may_follow_flags():
  done = run("config", "show", "small-llama", "steps=3", "--changed", "log_period=7")
  assert re.search(r"^steps +3 +\(command line\)$", done.stdout, re.M)
  assert re.search(r"^log_period +7 +\(command line\)$", done.stdout, re.M)
  wrong = run("config", "show", "small-llama", "--changd", "steps=3")
  assert (wrong.returncode, wrong.stdout) == (2, "")
  assert "unrecognized arguments: --changd" in wrong.stderr


def test_a_reader_that_has_enough():
  done = subprocess.run(f"{MAXTEXT} config show small-llama | head -1", shell=True, capture_output=True, text=True)
  assert (len(done.stdout.splitlines()), done.stderr) == (1, "")


@pytest.mark.slow
def test_control_c_stops_quietly(tmp_path):
  command = [MAXTEXT, "train", "small-llama", "steps=100000", "jax_cache_dir=", f"base_output_directory={tmp_path}"]
  env = os.environ | flags() | {"PYTHONUNBUFFERED": "1"}
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
    for line in process.stdout:
      if line.startswith("step      3"):
        break
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, errors = process.communicate(timeout=30)
  assert process.returncode == 130
  assert time.monotonic() - start < 20
  assert errors.splitlines() == [
    "maxtext: ending after this step, with a checkpoint; once more ends at once.",
    "maxtext: stopped.",
  ]


@pytest.mark.slow
def test_from_python():
  history = History()
  state = maxtext.train(tiny(steps=3, ici_fsdp_parallelism=8, per_device_batch_size=1), [history])
  again = History()
  maxtext.train(tiny(steps=3, ici_fsdp_parallelism=8, per_device_batch_size=1), [again])
  assert int(state.step) == 3
  assert len(history.losses) == 3
  np.testing.assert_array_equal(history.losses, again.losses)
