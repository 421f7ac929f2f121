"""Every mesh trains like one device."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.support import TINY, losses, program, tiny

pytestmark = pytest.mark.mesh

RUN = {"base_num_decoder_layers": 4, "steps": 20, "learning_rate": 1e-3, "warmup_steps_fraction": 0.1}

MESHES = {
  "data 8": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
  "fsdp 8": {"ici_fsdp_parallelism": 8},
  "fsdp 4 x tensor 2": {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
  "tensor 8": {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8},
  "fsdp 2 x fsdp_transpose 2 x tensor_sequence 2": pytest.param(
    {"ici_fsdp_parallelism": 2, "ici_fsdp_transpose_parallelism": 2, "ici_tensor_sequence_parallelism": 2},
    marks=pytest.mark.slow,
  ),
  "tensor 4 x tensor_transpose 2": pytest.param(
    {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 4, "ici_tensor_transpose_parallelism": 2},
    marks=pytest.mark.slow,
  ),
}


@pytest.fixture(scope="module")
def one_device():
  curve = losses(tiny(**RUN))
  assert curve[-1] < curve[0] - 0.3, "the run must learn, or equal curves say little"
  return curve


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES.keys())
def test_loss_curve(one_device, axes):
  curve = losses(tiny(**RUN, per_device_batch_size=1, **axes), devices=8)
  np.testing.assert_allclose(curve, one_device, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_loss_curve_with_every_head_split():
  """Eight tensor-parallel devices for eight heads; the tiny model's four are replicated there."""
  heads = {"base_num_query_heads": 8, "base_num_kv_heads": 8}
  axes = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8, "per_device_batch_size": 1}
  np.testing.assert_allclose(
    losses(tiny(**RUN, **heads, **axes), devices=8), losses(tiny(**RUN, **heads)), atol=1e-5, rtol=0
  )


def test_two_processes_of_four_devices(one_device, tmp_path):
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  values = TINY | RUN | {"per_device_batch_size": 1, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
  values["metrics_file"] = str(tmp_path / "metrics.jsonl")
  command = [sys.executable, "-m", "maxtext.train", *(f"{k}={v}" for k, v in values.items())]

  def start(index: int) -> subprocess.Popen:
    env = os.environ | {
      "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": "2",
      "JAX_PROCESS_ID": str(index),
    }
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

  workers = [start(i) for i in range(2)]
  outputs = [w.communicate(timeout=180)[0] for w in workers]
  assert [w.returncode for w in workers] == [0, 0], "\n".join(outputs)
  curve = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  np.testing.assert_allclose(curve, one_device, atol=1e-5, rtol=0)


def test_parameters_and_optimizer_are_split():
  p = program(tiny(ici_fsdp_parallelism=4, ici_tensor_parallelism=2, per_device_batch_size=1), devices=8)
  state = p.init()
  query = "groups/0/layers/0/mixer/query/weight"
  moments = [x for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state) if query in str(path)]
  for array in (state.params[query], *moments):
    assert array.addressable_shards[0].data.size == array.size // 8
  assert len(moments) == 2


def test_initial_weights_do_not_depend_on_mesh_or_scan():
  one = program(tiny()).init().params
  for config, devices in (
    (tiny(scan_layers=False), 1),
    (tiny(ici_fsdp_parallelism=4, ici_tensor_parallelism=2, per_device_batch_size=1), 8),
    (tiny(ici_tensor_parallelism=8, ici_fsdp_parallelism=1, per_device_batch_size=1), 8),
  ):
    other = program(config, devices).init().params
    assert other.keys() == one.keys()
    for name in one:
      np.testing.assert_array_equal(one[name], other[name], err_msg=name)
