"""Steps compiled by JAX's CUDA plugin for GPUs that are not here. With cuDNN it takes 1.6 GB: not in the gate."""

import importlib.util

import pytest

import maxtext
from maxtext import ConfigError
from maxtext.planner.text import as_text
from tests.support import tiny

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
pytest.importorskip("jax_plugins.xla_cuda13", reason="extra cuda")

GPUS = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "per_device_batch_size": 8, "dtype": "bfloat16"}
CUDNN = {"attention": "autoselected", "head_dim": 64}


def plan(topology="h100-8", **keys):
  return maxtext.plan(tiny(**GPUS | {"attention": "dot_product", "compile_topology": topology} | keys))


def test_the_step_is_compiled(monkeypatch):
  found = plan()
  assert found.compiled
  assert found.estimate is not None
  assert {axes for _, axes in found.collectives()} >= {("fsdp",), ("tensor",)}
  assert found.memory.peak > found.memory.parameters + found.memory.optimizer + found.memory.temporaries / 2
  assert found.least_seconds < found.estimate.seconds
  assert "no published run of this kind (dense) was planned for h100" in as_text(found)
  monkeypatch.setattr("maxtext.mesh.topology._has_cuda_plugin", lambda: False)
  bound = plan()
  assert (found.memory.parameters, found.memory.optimizer) == (bound.memory.parameters, bound.memory.optimizer)
  assert bound.memory.peak <= found.memory.peak, "a lower bound"


@pytest.mark.parametrize("topology", ["a100-8", "h200-8", "b200-8"])
def test_other_gpus(topology):
  assert plan(topology).estimate is not None


def test_two_nodes_are_a_network():
  one, two = plan(), plan(compile_topology_num_slices=2, dcn_data_parallelism=2)
  assert two.chips == 16
  assert ("data",) in {axes for _, axes in two.collectives()}
  assert ("data",) not in {axes for _, axes in one.collectives()}


def test_eight_bits_are_multiplied_as_such():
  """Half of the time of what multiplies large matrices."""
  wide = {"base_emb_dim": 2048, "base_mlp_dim": 8192, "max_target_length": 512}
  times = [
    sum(o.seconds for o in plan(**wide, **keys).estimate.operations if o.name.startswith(("cublas", "custom-call")))
    for keys in ({}, {"quantization": "fp8"})
  ]
  assert times[1] < 0.7 * times[0]


@pytest.mark.skipif(importlib.util.find_spec("nvidia.cudnn") is None, reason="extra cuda")
def test_attention_of_cudnn():
  found = plan(**CUDNN)
  kernels = {o.name for o in found.estimate.operations if o.kind == "kernel"}
  assert kernels == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}


def test_an_option_that_the_compiler_does_not_know():
  with pytest.raises(ConfigError, match="compile_xla_flags: the compiler has no option 'xla_gpu_faster'"):
    plan(compile_xla_flags="--xla_gpu_faster=true")
