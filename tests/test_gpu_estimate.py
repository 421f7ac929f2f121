"""What a program for GPUs costs, read from text that JAX's CUDA compiler wrote (shortened), and reckoned by hand."""

import sys

import numpy as np
import pytest
from jax.sharding import Mesh

from maxtext import ConfigError
from maxtext.cli.platform import leave_out_absent_accelerators
from maxtext.mesh.topology import Topology
from maxtext.planner.estimate import Calibration, estimate
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.schedule import schedule

# Of Llama 3.1 8B on eight H100s: two layers, whose loop gathers weights in one collective beside a matmul of cuBLAS,
# attends with cuDNN, multiplies in eight bits, and sums two gradients in one collective.
PROGRAM = """
%gemm_fusion_dot.4_computation (parameter_0: bf16[8192,4096], parameter_1: bf16[4096,1024]) -> bf16[8192,1024] {
  %parameter_0 = bf16[8192,4096]{1,0} parameter(0), metadata={scheduling_name="parameter_0"}
  %parameter_1 = bf16[4096,1024]{1,0} parameter(1), metadata={scheduling_name="parameter_1"}
  ROOT %dot.6 = bf16[8192,1024]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/jvp()/while/body/closed_call/dot_general"}
}

%body (param: (s32[], bf16[8192,4096], bf16[512,1024], bf16[1,8192,32,128], bf16[1,8192,8,128], \
/*index=5*/f8e4m3fn[8192,4096], f8e4m3fn[4096,14336])) -> (s32[]) {
  %param = (s32[], bf16[8192,4096]{1,0}, bf16[512,1024]{1,0}) parameter(0)
  %x = bf16[8192,4096]{1,0} get-tuple-element(%param), index=1
  %w = bf16[512,1024]{1,0} get-tuple-element(%param), index=2
  %q = bf16[1,8192,32,128]{3,2,1,0} get-tuple-element(%param), index=3
  %k = bf16[1,8192,8,128]{3,2,1,0} get-tuple-element(%param), index=4
  %x8 = f8e4m3fn[8192,4096]{1,0} get-tuple-element(%param), index=5
  %w8 = f8e4m3fn[4096,14336]{0,1} get-tuple-element(%param), index=6
  %all-gather-start.11 = ((bf16[512,8,128]{2,1,0}, bf16[512,8,128]{2,1,0}), (bf16[4096,8,128]{2,1,0}, \
bf16[4096,8,128]{2,1,0})) all-gather-start(%w, %w), channel_id=2, \
replica_groups=mesh['axis_0'=CHIPS,'axis_1'=1,'axis_2'=1] {'axis_0'}, dimensions={0}, use_global_device_ids=true, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %gemm_fusion_dot.4 = bf16[8192,1024]{1,0} fusion(%x, %all), kind=kCustom, calls=%gemm_fusion_dot.4_computation
  %all-gather-done.11 = (bf16[4096,8,128]{2,1,0}, bf16[4096,8,128]{2,1,0}) all-gather-done(%all-gather-start.11)
  %custom-call.8 = (bf16[8192,1024]{1,0}, s8[4194304]{0}) custom-call(%x, %gemm_fusion_dot.4), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}
  %cublas-gemm.11 = (f32[8192,14336]{1,0}, s8[4194304]{0}) custom-call(%x8, %w8), \
custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}
  %dot_product_attention_fwd.5 = (bf16[1,32,8192,128]{3,1,2,0}, f32[1,32,8192]{2,1,0}, u8[0]{0}) \
custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "32", "8192", "8192"], "layout": {}}, \
"mask_type": "CAUSAL", "sliding_window_length": 0}}
  %copy.36 = bf16[8192,4096]{0,1} copy(%x)
  %reduce-scatter-start.1 = ((bf16[4096,14336]{1,0}, bf16[4096,128,8]{1,2,0}), (bf16[512,14336]{1,0}, \
bf16[512,128,8]{1,2,0})) reduce-scatter-start(%x, %w), channel_id=44, \
replica_groups=mesh['axis_0'=CHIPS,'axis_1'=1] {'axis_0'}, use_global_device_ids=true, dimensions={0}, to_apply=%add
  %reduce-scatter-done.1 = (bf16[512,14336]{1,0}, bf16[512,128,8]{1,2,0}) reduce-scatter-done(%reduce-scatter-start.1)
  ROOT %tuple.1 = (s32[]) tuple(%reduce-scatter-done.1)
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  %tuple.57 = (s32[]) parameter(0)
  ROOT %while.36 = (s32[]) while(%tuple.57), condition=%region_4, body=%body, \
backend_config={"known_trip_count":{"n":"2"},"known_init_step":{"init":"0","step":"1"}}
}
"""
PEAK, MEMORY, NVLINK = 989e12, 3.352e12, 450e9


def planned(name, slices=1):
  topology = Topology.named(name, slices)
  mesh = Mesh(np.array(topology.devices()), ("fsdp",))
  program = CompiledProgram.parse(PROGRAM.replace("CHIPS", str(topology.chips)))
  calibration = Calibration(kernel=0.5, link=0.8, between_slices=50e9, matmul=0.7, memory=0.9)
  return estimate(schedule(program, topology, mesh), calibration)


@pytest.fixture
def no_plugin(monkeypatch):
  """Descriptions of GPUs of our own, as where JAX's CUDA plugin is not installed."""
  monkeypatch.setattr("maxtext.mesh.topology._has_cuda_plugin", lambda: False)


@pytest.mark.usefixtures("no_plugin")
def test_operations_of_a_gpu_cost_their_flops_and_bytes():
  found = planned("h100-8")
  assert [loop.times for loop in found.loops] == [2]
  seconds = {o.name: o.seconds / 2 for o in found.operations}
  matmul = 2 * 8192 * 4096 * 1024 / (0.7 * PEAK)
  assert seconds["gemm_fusion_dot.4"] == pytest.approx(matmul), "a matmul within a fusion"
  assert seconds["custom-call.8"] == pytest.approx(2 * 8192 * 1024 * 4096 / (0.7 * PEAK)), "one of cuBLAS"
  eight_bits = 2 * 8192 * 4096 * 14336 / (0.7 * 1979e12)
  assert seconds["cublas-gemm.11"] == pytest.approx(eight_bits)
  assert seconds["copy.36"] == pytest.approx(2 * 8192 * 4096 * 2 / (0.9 * MEMORY))
  causal = 2 * 2 * 32 * 8192 * 8192 / 2 * 128 / (0.5 * PEAK)
  assert seconds["__cudnn$fmhaSoftmax"] == pytest.approx(causal)
  assert found.seconds_by_kind()["kernel"] == pytest.approx(2 * causal)
  gathered, scattered = 2 * 4096 * 8 * 128 * 2, 512 * (14336 + 128 * 8) * 2
  moved = {o.name: (o.bytes / 2, o.axes) for o in found.operations if o.kind == "collective"}
  assert moved == {"all-gather": (gathered, ("fsdp",)), "reduce-scatter": (scattered, ("fsdp",))}
  link = 0.8 * NVLINK
  assert seconds["all-gather"] == pytest.approx(max(gathered * 7 / 8 / link - matmul, 0))
  assert seconds["reduce-scatter"] == pytest.approx(scattered * 7 / link), "nothing runs beside it"


@pytest.mark.usefixtures("no_plugin")
@pytest.mark.parametrize(("name", "slices"), [("h100-16", 1), ("h100-8", 2)])
def test_nodes_share_the_network(name, slices):
  """Eight cards of 50 GB/s serve the eight GPUs of a node, which is less than NVLink."""
  scattered = 512 * (14336 + 128 * 8) * 2
  found = {o.name: o.seconds / 2 for o in planned(name, slices).operations}
  assert found["reduce-scatter"] == pytest.approx(scattered * 15 / (0.8 * 8 * 50e9))


def test_gpus_come_in_nodes():
  with pytest.raises(ConfigError, match="compile_topology=h100-12: a node has 8 GPUs, so write a multiple of 8"):
    Topology.named("h100-12")


def test_the_plugin_changes_nothing_where_there_is_no_gpu(tmp_path, monkeypatch):
  """With it JAX would log a traceback in every command."""
  plugin = tmp_path / "installed/jax_plugins/xla_cuda13"
  plugin.mkdir(parents=True)
  (plugin / "__init__.py").write_text("raise RuntimeError('loaded')")
  monkeypatch.syspath_prepend(plugin.parents[1])
  for name in {"jax_plugins", *(name for name in sys.modules if name.startswith("jax_plugins."))}:
    monkeypatch.setitem(sys.modules, name, None)  # so that what is imported here is not there after the test
    del sys.modules[name]

  def chosen():
    environment: dict[str, str] = {}
    leave_out_absent_accelerators(environment, tmp_path)
    return environment

  assert chosen() == {"JAX_PLATFORMS": "cpu"}
  assert Topology.named("h100-8").compiles, "the plugin is found without being loaded"
  (tmp_path / "dev").mkdir()
  (tmp_path / "dev/nvidia0").touch()
  assert chosen() == {}, "a GPU is there"
  (tmp_path / "dev/nvidia0").unlink()
  (plugin.parent / "another_accelerator").mkdir()
  (plugin.parent / "another_accelerator/__init__.py").touch()
  assert chosen() == {}, "JAX asks the other plugin"
