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
from pathlib import Path

import numpy as np
import pytest

import maxtext
from maxtext.cli.main import main
from maxtext.cli.platform import leave_out_absent_accelerators
from maxtext.observe.metric_writers import PrometheusWriter
from tests.flags import flags
from tests.support import History, tiny

MAXTEXT = str(Path(sys.executable).with_name("maxtext"))


def run(*words: str, **kwargs) -> subprocess.CompletedProcess:
  env = os.environ | flags()
  return subprocess.run([MAXTEXT, *words], capture_output=True, text=True, env=env, timeout=120, check=False, **kwargs)


@pytest.mark.nightly
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
  shown = [float(re.search(r"loss (\S+)", line)[1]) for line in lines[first:] if line.startswith("step")]
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
  assert '<tr><th scope="row">learning_rate</th><td>0.0001</td><td>0.001</td></tr>' in page
  data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
  for run_data in data["runs"]:
    loss = run_data["series"]["loss"]
    assert loss["x"] == [1, 2, 3, 4]
    assert loss["y"][0] > loss["y"][-1]
  wrong = run("report", "out/none", cwd=tmp_path)
  assert (wrong.returncode, wrong.stdout) == (2, "")
  assert wrong.stderr.startswith("maxtext: out/none is not a run's folder")


def test_figures_are_shown_to_this_machine_alone(monkeypatch):
  """Every address in 127.0.0.0/8 is this machine's, so who listens on all of them answers at all of them."""
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  for told, others in (("", "127.0.0.3"), ("127.0.0.3", "127.0.0.1")):
    monkeypatch.setenv("MAXTEXT_PROMETHEUS_ADDRESS", told)
    sink = PrometheusWriter(port)
    sink.write(3, {"loss": 2.0})
    page = urllib.request.urlopen(f"http://{told or '127.0.0.1'}:{port}/metrics", timeout=10).read().decode()
    assert "maxtext_step 3.0" in page
    with pytest.raises(urllib.error.URLError, match="refused"):
      urllib.request.urlopen(f"http://{others}:{port}/metrics", timeout=10)
    sink.close()


@pytest.mark.slow
def test_prometheus_and_a_terminal(tmp_path):
  """On a terminal there is a bar with the time left; a monitor reads the last figures meanwhile."""
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  words = ["steps=20", "jax_cache_dir=", f"prometheus_port={port}", f"base_output_directory={tmp_path}"]
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
  assert b"step 20/20  loss" in shown
  assert b"left" in shown
  assert re.search(r"^maxtext_loss [5-8]\.", figures, re.M)
  assert 10 <= float(re.search(r"^maxtext_step (\S+)", figures, re.M)[1]) <= 20


def test_the_layers_of_a_recipe_are_drawn(capsys):
  """Whatever data it names, and wherever it is."""
  for recipe in ("stdlib-llama", "small-llama"):
    assert main(["models", recipe]) == 0
    assert capsys.readouterr().out.startswith(f"{recipe} (llama2): ")
  assert main(["models", "stdlib-lama"]) == 2
  assert "Did you mean 'stdlib-llama'?" in capsys.readouterr().err


def test_decode_as_a_module_is_the_command():
  words = [sys.executable, "-m", "maxtext.inference.decode", "nowhere"]
  done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 2
  assert "'nowhere' is no .yml file, no recipe" in done.stderr


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
  assert "training/loop.py" in done.stderr


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_one_line():
  done = subprocess.run(f"{MAXTEXT} config show small-llama > /dev/full", shell=True, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (1, "maxtext: what is written: No space left on device.\n")


@pytest.fixture
def hears_control_c():
  """What a shell starts in the background ignores SIGINT, and so does all that it starts."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


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
@pytest.mark.aot
def test_control_c_stops_a_compilation(tmp_path, hears_control_c):
  """The compiler is at work for minutes, and nothing in Python hears of a signal."""
  pytest.importorskip("libtpu", reason="extra tpu")
  command = [MAXTEXT, "plan", "llama2-7b", "compile_topology=v5p-128", "per_device_batch_size=2"]
  env = os.environ | {"JAX_LOG_COMPILES": "1", "PYTHONUNBUFFERED": "1"}
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
    for line in process.stderr:
      if "Compiling jit(train_step)" in line:
        break
    time.sleep(2)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
  took = time.monotonic() - start
  print(f"ended after {took:.1f} seconds")
  assert (process.returncode, out) == (130, "")
  assert errors.splitlines()[-1] == "maxtext: stopped."
  assert took < 5


def test_control_c_does_not_wait_for_other_threads(hears_control_c):
  """Python would, at its end, for a compiler that works in one of them."""
  script = """if True:
    import sys, threading, time
    from maxtext.cli.interrupt import prompt_interrupt
    threading.Thread(target=time.sleep, args=(60,)).start()
    try:
      with prompt_interrupt():
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
      print("stopped", flush=True)
  """
  with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "stopped\n"
  assert process.returncode == 130


def test_control_c_in_a_finalizer_is_not_lost(hears_control_c):
  """Python ignores what a finalizer raises, also `KeyboardInterrupt`."""
  script = """if True:
    import os, signal
    from maxtext.cli.interrupt import prompt_interrupt
    class Finalized:
      def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
    try:
      with prompt_interrupt(30):
        Finalized()
        print("goes on", flush=True)
    except KeyboardInterrupt:
      print("stopped", flush=True)
  """
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
  assert (done.returncode, done.stdout) == (0, "goes on\nstopped\n"), done.stderr


def test_libtpu_is_not_asked_where_there_is_no_tpu(tmp_path):
  """It would look for one at length, and print lines of errors."""
  pytest.importorskip("libtpu", reason="extra tpu")
  found: dict[str, str] = {}
  leave_out_absent_accelerators(found, tmp_path)
  assert found == {"JAX_PLATFORMS": "cpu"}
  device = tmp_path / "sys/bus/pci/devices/0000:00:05.0"
  device.mkdir(parents=True)
  for vendor, kind, chosen in (("0x1ae0", "0x0042", True), ("0x8086", "0x0063", True), ("0x1ae0", "0x0099", False)):
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "device").write_text(f"{kind}\n")
    found = {}
    leave_out_absent_accelerators(found, tmp_path)
    assert bool(found) == chosen, (vendor, kind)
  for told in ({"TPU_WORKER_HOSTNAMES": "a,b"}, {"JAX_PLATFORMS": "tpu"}):
    found = dict(told)
    leave_out_absent_accelerators(found, tmp_path / "nothing")
    assert found == told
  env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))}
  env |= flags() | {"TPU_SKIP_MDS_QUERY": "1"}
  words = [MAXTEXT, "train", "small-llama", "hardware=tpu"]
  done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=600, check=False, cwd=tmp_path)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("maxtext: hardware=tpu, but JAX finds cpu devices")
  assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_from_python():
  history = History()
  state = maxtext.train(tiny(steps=3, ici_fsdp_parallelism=8, per_device_batch_size=1), callbacks=[history])
  again = History()
  maxtext.train(tiny(steps=3, ici_fsdp_parallelism=8, per_device_batch_size=1), callbacks=[again])
  assert int(state.step) == 3
  assert len(history.losses) == 3
  np.testing.assert_array_equal(history.losses, again.losses)
