"""Reinforcement learning in several processes: the run of one process, whatever each of them answers, and one end."""

import json
import os
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.mesh.devices import make_mesh
from maxtext.rl.devices import check_room
from maxtext.rl.engines import process_part
from maxtext.rl.outcomes import share_of
from maxtext.rl.train_policy import policy_updates
from maxtext.training.program import Program
from tests.flags import flags
from tests.test_agreement import ended, free_port
from tests.test_rl import EXPERTS, MAXTEXT, keys
from tests.test_rl import folder as tasks_folder
from tests.test_rl import run as rl_run
from tests.test_rl_images import folder as pictures_folder
from tests.test_rl_images import keys as image_keys
from tests.test_weights_at_rest import loaded

pytestmark = pytest.mark.mesh
folder, run, pictures = tasks_folder, rl_run, pictures_folder
SAVED = {"enable_checkpointing": True, "async_checkpointing": False, "checkpoint_period": 1}
MEASURED = ("loss", "grad_norm", "reward", "reward_deviation", "entropy", "answer_tokens", "groups")

# Half of the tasks teach nothing; on a process that is slow, one batch takes its time.
PICKY = """
import os, time

def picky(prompts, completions, answers):
  time.sleep(float(os.environ.get("SLOW", 0)))
  return [1.0 if int(a) % 2 else text.count(a) / max(len(text), 1) for text, a in zip(completions, answers)]
"""

# Its process ends with the first call, and cannot be started again, on process 1 alone.
GONE = """
import os, pathlib

called = pathlib.Path("called-" + os.environ["JAX_PROCESS_ID"])
if os.environ["JAX_PROCESS_ID"] == "1" and called.exists():
  raise RuntimeError("the judge has gone")

def judge(prompts, completions, answers):
  called.touch()
  if os.environ["JAX_PROCESS_ID"] == "1":
    os._exit(3)
  return [float(len(text)) for text in completions]
"""


@pytest.fixture(autouse=True)
def own_rewards(folder):
  (folder / "picky.py").write_text(PICKY)
  (folder / "gone.py").write_text(GONE)


@pytest.fixture
def processes(folder, tmp_path):
  """Starts runs of two processes."""
  started = []

  def start(devices=4, variables=({}, {}), values=None, **changes):
    values = values or keys(folder, tmp_path, **changes)
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    joining = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    pair = [
      subprocess.Popen(
        [MAXTEXT, "rl", *words], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | flags(devices) | joining | {"JAX_PROCESS_ID": str(index)} | own,
      )
      for index, own in enumerate(variables)
    ]  # fmt: skip
    started.extend(pair)
    return pair

  yield start
  for process in started:
    process.kill()
    process.communicate()


def finish(pair):
  codes, said = ended(pair, 400)
  assert codes == [0, 0], said
  return said


def metrics(folder):
  return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same_run(two, one, exact):
  """Figures of every update, answers with their advantages, and the last parameters."""
  ours, theirs = metrics(two), metrics(one)
  assert [row["step"] for row in ours] == [row["step"] for row in theirs]
  for name in (*MEASURED, *(name for name in theirs[-1] if name.startswith("eval_") and name != "eval_seconds")):
    found, expected = ([row.get(name, 0.0) for row in rows] for rows in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if exact else 1e-5, err_msg=name)
  assert max(row.get("mismatch_max", 0.0) for row in ours) < 1e-4
  found, expected = (loaded(folder)[0] for folder in (two, one))
  for path, array in expected.items():
    np.testing.assert_allclose(found[path], array, rtol=0, atol=0 if exact else 1e-6, err_msg=path)
  assert (two / "rollouts.jsonl").read_text() == (one / "rollouts.jsonl").read_text()


TALKS = """
class Talks:
  def reset(self, task):
    self.answer = task.answer

  def step(self, text):
    return "ab", float(text.count(self.answer)), False
"""


@pytest.mark.nightly
def test_conversations_of_two_processes_are_those_of_one(run, processes, folder, tmp_path):
  (folder / "talks.py").write_text(TALKS)
  changes = {"rl_environment": "talks:Talks", "max_turns": 3, "max_target_length": 16, "num_batches": 2, **SAVED}
  figures, _ = run(**changes, run_name="one")
  assert figures[0]["turns"] > 1
  finish(processes(**changes, run_name="two"))
  same_run(tmp_path / "two", tmp_path / "one", exact=False)


@pytest.mark.nightly
def test_pictures_of_two_processes_are_those_of_one(processes, pictures, tmp_path):
  values = image_keys(pictures, tmp_path, run_name="one", **SAVED)
  maxtext.train(load_config(**values))
  finish(processes(values=values | {"run_name": "two"}))
  same_run(tmp_path / "two", tmp_path / "one", exact=False)


DYNAMIC = {
  "batch_size": 5, "dynamic_sampling": 2, "reward_functions": ["picky:picky"], "num_batches": 3, "num_iterations": 2,
  "num_test_batches": 1, "eval_interval": 3, **SAVED,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
  "more",
  [
    pytest.param({}, id="fsdp 8"),
    pytest.param(
      {"num_slices": 2, "dcn_tensor_parallelism": 2, "dcn_data_parallelism": 1}, id="fsdp, tensor between processes",
      marks=pytest.mark.nightly,
    ),
    pytest.param(
      EXPERTS | {"off_policy_steps": 1, "use_agentic_rollout": True, "max_num_seqs": 3, "rollout_micro_batch_size": 2},
      id="experts, in a thread", marks=pytest.mark.nightly,
    ),
  ],
)  # fmt: skip
def test_two_processes_are_one(run, processes, folder, tmp_path, more):
  """Five tasks, of which the processes ask two and three, again where all answers of some have the same reward."""
  changes = DYNAMIC | {"grain_eval_files": str(folder / "tasks.jsonl")} | more
  run(**changes, run_name="one")
  said = finish(processes(**changes, run_name="two"))
  assert sum("before the first update" in text for text in said) == 1, "process 0 says it"
  same_run(tmp_path / "two", tmp_path / "one", exact=False)
  rows = metrics(tmp_path / "two")
  assert max(row["groups"] for row in rows) > 5, "further tasks were asked"
  assert all(row["weight_sync_bytes"] > 0 for row in rows[::2])


LAGS = {
  "num_batches": 4, "off_policy_steps": 1, "use_agentic_rollout": True, "learning_rate_schedule_steps": 4,
  "batch_size": 3, "num_generations": 4, "reward_functions": ["picky:picky"], **SAVED,
}  # fmt: skip


@pytest.mark.nightly
def test_stopped_and_resumed_in_a_thread_the_bits_are_the_same(processes, tmp_path):
  """With a batch that was made ahead in the checkpoint; and process 1 takes longer to answer."""
  changes = LAGS | {"max_num_checkpoints_to_keep": 9}
  finish(processes(1, **changes, run_name="whole"))
  assert [row["rollout_version"] for row in metrics(tmp_path / "whole")] == [0, 0, 1, 2]
  shutil.copytree(tmp_path / "whole", tmp_path / "parts")
  for step in (3, 4):  # as where it is killed before they are saved
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / str(step))
  (said, _) = finish(processes(1, **changes, run_name="parts", variables=({}, {"SLOW": "0.5"})))
  assert "resuming from" in said
  same_run(tmp_path / "parts", tmp_path / "whole", exact=True)


@pytest.mark.nightly
@pytest.mark.chaos
def test_a_run_that_is_told_to_end_goes_on_in_one_process(run, processes, tmp_path):
  """Both processes save, with the batches that were made ahead, which are those of one process."""
  changes = LAGS | {"num_batches": 20, "learning_rate_schedule_steps": 20, "batch_size": 4}
  pair = processes(4, **changes, run_name="parts")
  assert any(line.split()[:2] == ["step", "2/20"] for line in pair[0].stdout)
  pair[1].send_signal(signal.SIGTERM)
  codes, said = ended(pair, 400)
  assert codes == [143, 143], said
  assert 2 <= len(metrics(tmp_path / "parts")) < 20
  run(**changes, run_name="parts")
  run(**changes, run_name="one")
  same_run(tmp_path / "parts", tmp_path / "one", exact=False)


@pytest.mark.nightly
@pytest.mark.chaos
def test_a_process_that_is_killed_while_it_answers_is_noticed(processes):
  """By the coordinator, which ends the other; a launcher on one machine sees it at once."""
  pair = processes(1, **LAGS | {"use_agentic_rollout": False}, run_name="two", variables=({}, {"SLOW": "20"}))
  assert any(line.split()[:2] == ["step", "1/4"] for line in pair[0].stdout)
  pair[1].kill()
  began = time.monotonic()
  codes, said = ended(pair, 300)
  assert codes[0] not in (0, None), said
  assert time.monotonic() - began < 200


@pytest.mark.slow
def test_rewards_that_end_on_one_process_end_both(processes, tmp_path):
  """With one message, and before anybody looks for a process that is lost; in a thread."""
  lags = {"off_policy_steps": 1, "use_agentic_rollout": True}
  codes, said = ended(processes(1, reward_functions=["gone:judge"], run_name="two", **lags), 200)
  assert codes == [2, 2], said
  message = "reward_functions: gone:judge: RuntimeError: the judge has gone."
  assert f"maxtext: process 1: {message}" in said[0], said
  assert f"maxtext: {message}" in said[1], said
  assert not any("Traceback" in text or "heartbeat" in text for text in said)
  assert not (tmp_path / "two").exists(), "nothing was written"


def test_each_process_asks_a_share_of_the_tasks(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  for count in (0, 1, 3, 7, 12):
    shares = [share_of(count, process) for process in range(3)]
    assert [task for share in shares for task in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_process_generates_on_its_part_of_the_mesh():
  def mesh(*processes):
    names = ("data", "fsdp", "tensor")
    devices = np.array([SimpleNamespace(process_index=process) for process in processes]).reshape(1, 4, 2)
    return SimpleNamespace(devices=devices, shape=dict(zip(names, devices.shape, strict=True)))

  parts = {"fsdp": mesh(0, 0, 0, 0, 1, 1, 1, 1), "tensor": mesh(0, 1, 0, 1, 0, 1, 0, 1)}
  assert {name: process_part(one, 1).shape for name, one in parts.items()} == {"fsdp": (1, 2, 2), "tensor": (1, 4, 1)}
  with pytest.raises(ConfigError, match=r"process 1 are no part of {'fsdp': 4, 'tensor': 2} along its axes"):
    process_part(mesh(0, 0, 0, 1, 1, 0, 1, 1), 1)


def test_a_model_that_a_process_cannot_hold_is_named(folder, tmp_path, monkeypatch):
  updates = policy_updates(load_config(**keys(folder, tmp_path)), jax.devices()[:1])
  config, mesh = updates.config, make_mesh(updates.config, updates.devices)
  small = Program.of(config, mesh, updates.objective, data=[])
  check_room(config, small, small.model)
  monkeypatch.setattr("maxtext.rl.devices.host_memory", lambda: 500_000)
  with pytest.raises(ConfigError, match=r"on its 1 device\. They take .* of the trainer's, and this host has 5"):
    check_room(config, small, small.model)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"sampler_address": "here:80"}, "sampler_address=here:80 .* this run has 2: leave it out"),
    ({"trainer_devices_fraction": 0.5, "sampler_devices_fraction": 0.5}, "sampler_devices_fraction=0.5 .* write 1.0"),
    ({"num_trainer_slices": 1, "num_samplers_slices": 1}, "num_trainer_slices=1 .* leave num_trainer_slices"),
  ],
)
def test_devices_of_their_own_are_for_one_process(run, monkeypatch, changes, says):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  for name in ("check_joined", "agree_on_start"):
    monkeypatch.setattr(f"maxtext.rl.train_policy.{name}", lambda config: None)
  with pytest.raises(ConfigError, match=says):
    run(**changes)
