"""Rollouts on devices of their own and in a process of their own: the same run as where they share the trainer's."""

import json
import os
import signal
import socket
import subprocess

import jax
import numpy as np
import pytest

from maxtext import ConfigError, load_config
from maxtext.rl.devices import sampler_model
from tests.test_rl import EXPERTS, MAXTEXT, keys
from tests.test_rl import folder as tasks_folder
from tests.test_rl import run as rl_run
from tests.test_weights_at_rest import loaded

folder, run = tasks_folder, rl_run
EXACT = ("step", "loss", "grad_norm", "reward", "entropy", "answer_tokens")
HALVES = {"trainer_devices_fraction": 0.5, "sampler_devices_fraction": 0.5}


def close(found, expected):
  for name in ("loss", "reward", "grad_norm", "answer_tokens"):
    ours, theirs = ([step[name] for step in figures] for figures in (found, expected))
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
  "changes",
  [
    {"reshard_chunk_size": 2},
    pytest.param({"rollout_tensor_parallelism": 2}, marks=pytest.mark.nightly),
    pytest.param({"rollout_expert_parallelism": 2, **EXPERTS}, marks=pytest.mark.nightly),
  ],
  ids=["data", "tensor", "expert"],
)
def test_devices_of_their_own_are_the_shared_ones(run, changes):
  assert jax.device_count() == 8
  model = {key: value for key, value in changes.items() if key in EXPERTS}
  shared, _ = run(run_name="shared", **model)
  apart, state = run(run_name="apart", **HALVES, **changes)
  close(apart, shared)
  assert max(step["mismatch_max"] for step in apart) < 1e-4
  assert all(step["weight_sync_bytes"] > 0 and step["weight_sync_seconds"] > 0 for step in apart)
  assert "weight_sync_bytes" not in shared[0]
  assert all(len(array.devices()) <= 4 for array in state.params.values())


def test_the_trainer_goes_on_beside_its_sampler_with_the_same_bits(run):
  changes = {"num_batches": 5, "off_policy_steps": 1, **HALVES}
  waits, expected = run(run_name="waits", **changes)
  beside, state = run(run_name="beside", use_agentic_rollout=True, max_concurrency=16, **changes)
  for name in EXACT[1:]:
    assert [step[name] for step in beside] == [step[name] for step in waits], name
  for path, array in expected.params.items():
    np.testing.assert_array_equal(np.asarray(state.params[path]), np.asarray(array), err_msg=path)


def test_axes_of_the_sampler_that_do_not_fit_are_named(folder, tmp_path):
  config = load_config(**keys(folder, tmp_path, rollout_tensor_parallelism=3))
  with pytest.raises(ConfigError, match=r"rollout_tensor_parallelism=3 .* 8 devices that generate"):
    sampler_model(config, jax.devices())


# In two processes.


class Processes:
  """Starts trainers and samplers of one device each."""

  def __init__(self, folder, output):
    self.folder, self.output, self.started = folder, output, []
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      self.address = f"127.0.0.1:{free.getsockname()[1]}"

  def start(self, *flags, **changes):
    values = keys(self.folder, self.output, jax_cache_dir=str(self.output / "compiled"), log_period=1, **changes)
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    process = subprocess.Popen(
      [MAXTEXT, "rl", *words, *flags], cwd=self.folder, env=os.environ | {"XLA_FLAGS": ""}, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    self.started.append(process)
    return process

  def finish(self, process, expected=0):
    output = process.communicate(timeout=500)[0]
    assert process.returncode == expected, output
    return output

  def metrics(self, name):
    return [json.loads(line) for line in (self.output / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def processes(folder, tmp_path):
  found = Processes(folder, tmp_path)
  yield found
  for process in found.started:
    process.kill()
    process.communicate()


def test_two_processes_are_one(processes, tmp_path):
  """Also where trainer or sampler is killed and started again."""
  shared = {"num_batches": 30, "enable_checkpointing": True, "checkpoint_period": 1, "async_checkpointing": False}
  processes.finish(processes.start(run_name="one", **shared))
  shared |= {"sampler_address": processes.address, "run_name": "two", "reshard_chunk_size": 3}
  sampler = processes.start("--sampler", **shared)
  trainer = processes.start(**shared)
  assert any(line.split()[:2] == ["step", "2/30"] for line in trainer.stdout)
  trainer.kill()
  trainer = processes.start(**shared)
  assert any(line.startswith("step ") for line in trainer.stdout)
  sampler.kill()
  said = processes.finish(trainer, expected=1)
  assert "the sampler was lost" in said, said
  assert "Traceback" not in said
  sampler, trainer = processes.start("--sampler", **shared), processes.start(**shared)
  processes.finish(trainer)
  assert "a trainer has connected" in processes.finish(sampler), "it ends with the run"
  one, two = processes.metrics("one"), processes.metrics("two")
  for name in EXACT:
    assert [row[name] for row in two] == [row[name] for row in one], name
  assert all(row["weight_sync_bytes"] > 0 for row in two)
  ours, theirs = (loaded(tmp_path / name)[0] for name in ("two", "one"))
  for path, array in theirs.items():
    np.testing.assert_array_equal(np.asarray(ours[path]), np.asarray(array), err_msg=path)


def test_evaluations_and_rollouts_ask_one_sampler_at_the_same_time(processes, folder):
  shared = {"num_batches": 6, "off_policy_steps": 1, "use_agentic_rollout": True, "eval_interval": 1,
            "grain_eval_files": str(folder / "tasks.jsonl"), "num_test_batches": 1, **EXPERTS}  # fmt: skip
  processes.finish(processes.start(run_name="one", **shared))
  shared |= {"sampler_address": processes.address, "run_name": "two"}
  sampler = processes.start("--sampler", **shared)
  processes.finish(processes.start(**shared))
  processes.finish(sampler)
  one, two = processes.metrics("one"), processes.metrics("two")
  for name in (*EXACT, "eval_pass_rate", "eval_reward"):
    assert [row[name] for row in two] == [row[name] for row in one], name


def test_a_sampler_of_another_model_is_named(processes):
  shared = {"sampler_address": processes.address, "run_name": "two"}
  sampler = processes.start("--sampler", **shared, base_mlp_dim=96)
  said = processes.finish(processes.start(**shared), expected=1)
  assert "for the trainer and" in said, said
  assert "Traceback" not in said
  with socket.create_connection(tuple(processes.address.split(":"))) as hostile:
    hostile.sendall(b'{"do": 1}\n[]\nnot json\n')
    assert b"error" in hostile.recv(1000)
  assert sampler.poll() is None, "it waits for the next trainer"
  sampler.send_signal(signal.SIGINT)
  assert "Traceback" not in processes.finish(sampler, expected=130)


def resident(process):
  with open(f"/proc/{process.pid}/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_hundred_weight_syncs(processes):
  """No hang, no leak, no compilation after the first ones."""
  shared = {"sampler_address": processes.address, "run_name": "two", "num_batches": 200, "off_policy_steps": 1,
            "use_agentic_rollout": True, "base_emb_dim": 256, "base_mlp_dim": 1024}  # fmt: skip
  sampler, trainer = processes.start("--sampler", **shared), processes.start(**shared)
  memory, compiled = {}, {}
  for line in trainer.stdout:
    for step in (40, 199):
      if line.split()[:2] == ["step", f"{step}/200"]:
        memory[step] = [resident(sampler), resident(trainer)]
        compiled[step] = len(list((processes.output / "compiled").iterdir()))
  processes.finish(trainer)
  processes.finish(sampler)
  rows = processes.metrics("two")
  assert len(rows) == 200
  seconds = sorted(row["weight_sync_seconds"] for row in rows)
  print(
    f"a sync of {rows[0]['weight_sync_bytes'] / 1e6:.1f} MB: median {seconds[100]:.4f} s, worst {seconds[-1]:.4f} s"
  )
  assert compiled[40] == compiled[199]
  for before, after in zip(memory[40], memory[199], strict=True):
    assert after < before + 60e6, memory
