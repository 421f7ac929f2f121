"""The command as a user meets it: real processes, real terminals' habits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import maxtext
from tests.support import History, tiny

MAXTEXT = str(Path(sys.executable).with_name("maxtext"))


def run(*words: str, **kwargs) -> subprocess.CompletedProcess:
  env = os.environ | {"XLA_FLAGS": ""}
  return subprocess.run([MAXTEXT, *words], capture_output=True, text=True, env=env, timeout=120, check=False, **kwargs)


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
  shown = [float(re.search(r"loss (\S+)", line)[1]) for line in lines[first:]]
  np.testing.assert_allclose(shown, [losses[i] for i in (*range(10), 11)], atol=1e-4)


def test_a_mistake_is_one_line_and_exit_code_two(tmp_path):
  for words, message in (
    (["small-llama", "stepps=3"], "maxtext: 'stepps' is not a key. Did you mean 'steps'?"),
    (["smal-llama"], "Did you mean 'small-llama'?"),
    (["mine.yml"], "Cannot read mine.yml: No such file or directory."),
    (["small-llama", "steps"], "'steps' is not of the form key=value."),
    (["small-llama", "hardware=tpu"], "hardware=tpu, but JAX finds cpu devices"),
  ):
    done = run("train", *words, cwd=tmp_path)
    assert done.returncode == 2, words
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_control_c_stops_quietly(tmp_path):
  command = [MAXTEXT, "train", "small-llama", "steps=100000", "jax_cache_dir="]
  env = os.environ | {"XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
    for line in process.stdout:
      if line.startswith("step      3"):
        break
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, errors = process.communicate(timeout=30)
  assert process.returncode == 130
  assert time.monotonic() - start < 20
  assert errors == "maxtext: stopped.\n"


def test_from_python():
  history = History()
  state = maxtext.train(tiny(steps=3, ici_fsdp_parallelism=8, per_device_batch_size=1), [history])
  again = History()
  maxtext.train(tiny(steps=3, ici_fsdp_parallelism=8, per_device_batch_size=1), [again])
  assert int(state.step) == 3
  assert len(history.losses) == 3
  np.testing.assert_array_equal(history.losses, again.losses)
