"""Weights & Biases and MLflow get what the run's own file has; nothing that happens to them ends or delays a run."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import pytest

import maxtext
from maxtext import ConfigError
from maxtext.observe.experiment_trackers import TrackerWriter, WandbTracker, check_trackers
from maxtext.observe.metric_writers import FaultTolerantWriter
from tests.support import tiny


def lines_of(folder):
  return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def records_of(data):
  """The records of a file of W&B: a header of 7 bytes, then LevelDB's log, in blocks of 32 kB."""
  at, record = 7, b""
  while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:
      at += left
      continue
    length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
    record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
    if kind in (1, 4):  # whole, or the last part
      yield record
      record = b""


class Recorder:
  """A tracker that fails its first calls."""

  place = "here"

  def __init__(self, failures=0):
    self.failures, self.steps, self.closed = failures, [], 0

  def log(self, steps):
    if self.failures:
      self.failures -= 1
      raise ConnectionError("the server is away")
    self.steps += [step.step for step in steps]

  def close(self):
    self.closed += 1


def test_steps_reach_a_tracker_in_order_and_once_though_it_fails_at_first(monkeypatch):
  monkeypatch.setattr("maxtext.observe.experiment_trackers._RETRY_SECONDS", 0.01)
  there = Recorder(failures=2)
  writer = FaultTolerantWriter(TrackerWriter("there", "json", lambda: there), "there")
  for step in range(1, 200):
    writer.write(step, {"loss": 1.0})
  writer.close()
  assert there.steps == list(range(1, 200))
  assert there.closed == 1


def test_a_tracker_that_never_answers_delays_neither_steps_nor_much_of_the_end(caplog):
  writer = FaultTolerantWriter(TrackerWriter("there", "json", lambda: time.sleep(60), patience=0.5), "there")
  start = time.monotonic()
  for step in range(1, 100):
    writer.write(step, {"loss": 1.0})
  assert time.monotonic() - start < 0.3
  writer.close()
  assert time.monotonic() - start < 5
  assert "there misses the last metrics: no answer for 0.5 seconds" in caplog.text


def test_a_library_that_cannot_connect_is_said_once(caplog, monkeypatch):
  monkeypatch.setattr("maxtext.observe.experiment_trackers._RETRY_SECONDS", 0.01)

  def connect():
    raise ConnectionError("refused")

  writer = FaultTolerantWriter(TrackerWriter("there", "no_such_library", connect, patience=0.5), "there")
  for step in range(1, 20):
    writer.write(step, {"loss": 1.0})
    time.sleep(0.01)
  writer.close()
  assert caplog.text.count("there cannot be written: refused") == 1
  assert "there misses the last metrics: refused" in caplog.text


@pytest.mark.parametrize(
  ("keys", "environment", "message"),
  [
    (("mine", ""), {}, "wandb_project=mine, but there is no API key.*wandb login.*WANDB_MODE=offline"),
    (("mine", ""), {"WANDB_MODE": "offline"}, None),
    (("mine", ""), {"WANDB_API_KEY": "a" * 40}, None),
    (("mine", ""), {"NETRC": "netrc"}, None),
    (("mine", ""), {"NETRC": "netrc", "WANDB_BASE_URL": "https://wandb.example.org"}, "there is no API key"),
    (("", "mine"), {}, "mlflow_experiment=mine, but MLFLOW_TRACKING_URI is not set.*http://127.0.0.1:5000"),
    (("", "mine"), {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}, None),
    (("", ""), {}, None),
  ],
)
def test_what_a_tracker_needs_is_asked_for_before_the_run(keys, environment, message, tmp_path, monkeypatch):
  for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.chdir(tmp_path)
  Path("netrc").write_text("machine api.wandb.ai login user password " + "a" * 40)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  if message is None:
    check_trackers(*keys)
  else:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
      check_trackers(*keys)


def test_two_starts_are_one_run_of_wandb_with_every_metric_of_the_file(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  from wandb.proto.wandb_internal_pb2 import Record

  monkeypatch.setenv("WANDB_MODE", "offline")
  keys = dict(
    base_output_directory=str(tmp_path),
    run_name="mine",
    enable_checkpointing=True,
    wandb_project="ours",
    learning_rate=0.01,
  )
  maxtext.train(tiny(steps=2, **keys))
  maxtext.train(tiny(steps=3, **keys))
  folder = tmp_path / "mine"
  found, runs, config = [], set(), {}
  for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
    for data in records_of(file.read_bytes()):
      record = Record.FromString(data)
      if record.HasField("run"):
        runs.add((record.run.project, record.run.display_name, record.run.run_id))
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
      if record.HasField("history"):
        found.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
  assert runs == {("ours", "mine", (folder / "wandb_run_id").read_text())}
  assert config["learning_rate"] == 0.01
  assert "base_emb_dim" in config
  written = lines_of(folder)
  assert [row["step"] for row in found] == [row["step"] for row in written] == [1, 2, 3]
  for row, line in zip(found, written, strict=True):
    assert {name: row[name] for name in line if name != "started"} == {n: v for n, v in line.items() if n != "started"}


def test_the_id_of_a_run_is_kept_in_its_folder(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  first = WandbTracker("ours", "mine", tmp_path, {})
  first.close()
  kept = (tmp_path / "wandb_run_id").read_text()
  again = WandbTracker("ours", "mine", tmp_path, {})
  again.close()
  assert (tmp_path / "wandb_run_id").read_text() == kept
  assert f"-{kept}" in again.place


@pytest.mark.nightly
def test_two_starts_are_one_run_of_an_mlflow_server(tmp_path, monkeypatch):
  """The server's package is large, so it has an environment of its own: MLFLOW names its command."""
  pytest.importorskip("mlflow")
  command = os.environ.get("MLFLOW") or shutil.which("mlflow") or pytest.skip("MLFLOW=.../bin/mlflow runs the server")
  with closing(socket.socket()) as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  address = f"http://127.0.0.1:{port}"
  server = subprocess.Popen(
    [command, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--backend-store-uri",
     f"sqlite:///{tmp_path}/runs.db", "--artifacts-destination", str(tmp_path / "artifacts")],
    start_new_session=True, cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  try:
    answered = False
    for _ in range(600):
      with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=1):
        answered = True
        break
      time.sleep(0.5)
    assert answered
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    keys = dict(
      base_output_directory=str(tmp_path), run_name="mine", enable_checkpointing=True, mlflow_experiment="ours"
    )
    maxtext.train(tiny(steps=2, **keys))
    maxtext.train(tiny(steps=3, **keys))
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["base_emb_dim"] == str(tiny().base_emb_dim)
    written = lines_of(tmp_path / "mine")
    for name in written[0].keys() - {"step", "started"}:
      history = sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))
      assert history == [(line["step"], line[name]) for line in written], name
  finally:
    os.killpg(server.pid, 9)
    server.wait()


@pytest.mark.nightly
def test_a_run_ends_though_the_server_of_wandb_is_away(tmp_path):
  pytest.importorskip("wandb")
  environment = os.environ | {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40, "WANDB_MODE": "online"}
  keys = "small-llama dataset_type=synthetic steps=3 base_num_decoder_layers=1 max_target_length=32 run_name=mine"
  start = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-m", "maxtext", "train", *keys.split(), "per_device_batch_size=1", "wandb_project=ours"],
    cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "wandb_project=ours misses the last metrics" in done.stdout + done.stderr
  assert "Traceback" not in done.stderr
  assert time.monotonic() - start < 150
