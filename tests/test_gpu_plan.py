"""What a plan says of GPUs without JAX's CUDA plugin: the least that a run takes."""

import re
from dataclasses import replace

import pytest

import maxtext
from maxtext import ConfigError
from maxtext.cli.main import main
from maxtext.planner.text import as_text
from tests.support import tiny

GPUS = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "compile_topology": "h100-8"}


@pytest.fixture(autouse=True)
def no_plugin(monkeypatch):
  monkeypatch.setattr("maxtext.mesh.topology._has_cuda_plugin", lambda: False)


def plan(**keys):
  return maxtext.plan(tiny(**GPUS | keys))


def test_state_is_counted_where_it_would_be():
  found = plan(per_device_batch_size=0.5)
  linear = 48 * 32 + 2 * 48 * 16 + 32 * 48 + 3 * 48 * 80
  weights = 2 * linear + 2 * 128 * 48
  norms = (2 * 2 + 1) * 48
  assert found.memory.parameters == weights * 4 / 8 + norms * 4, "norms are whole"
  assert found.memory.optimizer == pytest.approx(2 * found.memory.parameters, rel=0.01)
  assert found.memory.temporaries == found.memory.parameters, "gradients: a small batch keeps less"
  assert found.memory.there == 84_942_979_072
  assert found.least_seconds == found.model_flops / 989e12
  assert found.chips == 8
  assert plan(compile_topology_num_slices=2, dcn_data_parallelism=2).chips == 16


def test_kept_tensors_follow_the_policy():
  rows = 8 * 64
  token = rows * 32 * 4 / 8  # bytes a device and channel
  inputs = 2 * 48 * token
  assert plan(per_device_batch_size=64).memory.temporaries == inputs
  qkv = 2 * (32 + 2 * 16) * token
  assert plan(per_device_batch_size=64, remat_policy="save_qkv_proj").memory.temporaries == inputs + qkv
  halves = plan(per_device_batch_size=32, gradient_accumulation_steps=2)
  assert halves.memory.temporaries == inputs / 2, "of one of two parts"


def test_it_says_that_nothing_was_compiled():
  text = as_text(plan())
  assert "may fit" in text
  assert "not compiled: there is no compiler for h100-8 here" in text
  assert re.search(r"time a step  at least \d\.\d\d ms, at most", as_text(plan(per_device_batch_size=2**16)))
  large = as_text(plan(per_device_batch_size=2**23))
  assert "DOES NOT FIT" in large
  assert re.search(r"time a step  at least \d\.\d\d s, at most", large)


def test_gradients_are_counted_in_their_format():
  whole, half = (plan(per_device_batch_size=0.5, grad_dtype=dtype).memory for dtype in ("float32", "bfloat16"))
  assert half.temporaries == whole.temporaries / 2


def test_shardings_may_be_part_of_types():
  explicit, auto = plan(shard_mode="explicit").memory, plan().memory
  assert explicit.batch == 2 * auto.batch, "tokens are split over tensor by the compiler alone"
  assert replace(explicit, batch=auto.batch, peak=auto.peak) == auto


@pytest.mark.parametrize("key", ["optimizer_memory_host_offload", "parameter_memory_host_offload"])
def test_memory_of_hosts_is_not_reckoned(key):
  with pytest.raises(ConfigError, match=f"{key}=true is not supported for compile_topology=h100-8"):
    plan(**{key: True})


def test_what_needs_a_compiler_is_refused(capsys):
  with pytest.raises(ConfigError, match=r"compiled_trainstep_file=.*no compiler for compile_topology=h100-8"):
    plan(compiled_trainstep_file="step.bin")
  assert main(["plan", "compile_topology=h100-8", "--search"]) == 2
  assert "--search compiles" in capsys.readouterr().err
