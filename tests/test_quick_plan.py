"""Quick plans: the compiler's schedule without its code, with times from FLOPs and bytes."""

import json
import subprocess
import sys

import jax
import pytest

from maxtext import ConfigError, load_config, plan
from maxtext.planner.compile import program_for
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.kept_steps import find_step
from maxtext.planner.memory_traffic import bytes_moved
from maxtext.planner.scheduled_step import scheduled_step
from maxtext.planner.tpu_cost import tpu_cost
from tests.support import TINY

SMALL = TINY | {"compile_topology": "v6e-4", "attention": "dot_product", "per_device_batch_size": 1}
WITH_KERNELS = SMALL | {
  "attention": "flash",
  "base_emb_dim": 256,
  "head_dim": 128,
  "max_target_length": 512,
  "dtype": "bfloat16",
}
# A matmul [2048,512] x [512,2,128] as TPUs have it, fused with what reads one of four layers of its weight; one of 6
# matrices by 6; and a result that stays on the chip.
PROGRAM = """\
HloModule step, is_scheduled=true

%fused (p0: bf16[2048,512,1], p1: bf16[4,512,2,128]) -> bf16[2048,2,128] {
  %p0 = bf16[2048,512,1]{1,0,2} parameter(0)
  %p1 = bf16[4,512,2,128]{3,2,1,0} parameter(1)
  %zero = s32[] constant(0)
  %layer = bf16[1,512,2,128]{3,2,1,0} dynamic-slice(%p1, %zero, %zero, %zero, %zero), dynamic_slice_sizes={1,512,2,128}
  %weight = bf16[512,2,128]{2,1,0} bitcast(%layer)
  ROOT %conv = bf16[2048,2,128]{2,0,1} convolution(%p0, %weight), window={size=2 pad=1_1}, dim_labels=bf0_i0o->b0f
}

ENTRY %main (x: bf16[2048,512,1], w: bf16[4,512,2,128], q: s8[6,32,64], k: s8[6,64,16]) -> bf16[2048,2,128] {
  %x = bf16[2048,512,1]{1,0,2} parameter(0)
  %w = bf16[4,512,2,128]{3,2,1,0} parameter(1)
  %q = s8[6,32,64]{2,1,0} parameter(2)
  %k = s8[6,64,16]{2,1,0} parameter(3)
  %many = s32[6,32,16]{2,1,0:T(8,128)S(1)} convolution(%q, %k), window={size=6}, dim_labels=0bf_0io->0bf
  ROOT %fusion = bf16[2048,2,128]{2,0,1} fusion(%x, %w), kind=kOutput, calls=%fused
}

"""
# As compilers for tpu7x have layers of a stack: behind a change of layout, and as one of two results.
OF_STACKS = """\
HloModule step, is_scheduled=true

%tiled (whole: bf16[80,512,256]) -> bf16[80,512,256] {
  %whole = bf16[80,512,256]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copy = bf16[80,512,256]{2,1,0:T(8,128)(2,1)} copy(%whole)
}

%taken (p0: bf16[80,512,256], p1: s32[]) -> bf16[512,256] {
  %p0 = bf16[80,512,256]{2,1,0:T(16,128)(2,1)} parameter(0)
  %p1 = s32[] parameter(1)
  %other = bf16[80,512,256]{2,1,0:T(8,128)(2,1)} fusion(%p0), kind=kLoop, calls=%tiled
  %layer = bf16[1,512,256]{2,1,0} dynamic-slice(%other, %p1, %p1, %p1), dynamic_slice_sizes={1,512,256}
  ROOT %flat = bf16[512,256]{1,0} bitcast(%layer)
}

%put (p0: bf16[80,512,256], p1: bf16[512,256], p2: s32[]) -> (bf16[80,512,256], bf16[512,256]) {
  %p0 = bf16[80,512,256]{2,1,0} parameter(0)
  %p1 = bf16[512,256]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %layer = bf16[1,512,256]{2,1,0} bitcast(%p1)
  %stack = bf16[80,512,256]{2,1,0} dynamic-update-slice(%p0, %layer, %p2, %p2, %p2)
  %twice = bf16[512,256]{1,0} add(%p1, %p1)
  ROOT %both = (bf16[80,512,256]{2,1,0}, bf16[512,256]{1,0}) tuple(%stack, %twice)
}

ENTRY %main (w: bf16[80,512,256], i: s32[]) -> bf16[80,512,256] {
  %w = bf16[80,512,256]{2,1,0:T(16,128)(2,1)} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %one = bf16[512,256]{1,0} fusion(%w, %i), kind=kLoop, calls=%taken
  ROOT %written = (bf16[80,512,256]{2,1,0}, bf16[512,256]{1,0:S(1)}) fusion(%w, %one, %i), kind=kLoop, calls=%put
}

"""


def test_flops_and_bytes_of_matmuls_as_tpus_have_them():
  program = CompiledProgram.parse(PROGRAM)
  entry = program.computations[program.entry]
  fused, many = (tpu_cost(program, entry, entry.by_name[name]) for name in ("fusion", "many"))
  assert fused.flops == 2 * 2048 * 512 * 256
  assert fused.dtypes == {"bf16"}
  assert fused.bytes == 2 * (2048 * 512 + 512 * 256 + 2048 * 256), "one layer of the weight"
  assert many.flops == 6 * 2 * 32 * 64 * 16
  assert many.dtypes == {"s8"}
  assert many.bytes == 6 * (32 * 64 + 64 * 16), "the result stays on the chip"


def test_of_a_stack_a_layer_is_moved():
  program = CompiledProgram.parse(OF_STACKS)
  entry, layer = program.computations[program.entry], 2 * 512 * 256
  assert bytes_moved(program, entry, entry.by_name["one"]) == 2 * layer, "read in one layout, written in another"
  assert bytes_moved(program, entry, entry.by_name["written"]) == 2 * layer, "the second result stays on the chip"


def test_quick_plans_are_of_tpus():
  with pytest.raises(ConfigError, match="--quick is for TPUs"):
    plan(load_config(**SMALL | {"compile_topology": "h100-8"}), quick=True)


@pytest.mark.aot
@pytest.mark.slow
def test_a_quick_plan_by_the_command():
  pytest.importorskip("libtpu")
  keys = [f"{key}={value}" for key, value in SMALL.items()]
  command = [sys.executable, "-m", "maxtext.cli", "plan", *keys, "--quick", "--json"]
  found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
  assert found["fits"]
  assert found["temp_bytes"] > 0
  assert found["estimated_seconds"]["compute"] > 0
  assert found["collectives"]


@pytest.mark.nightly
@pytest.mark.aot
def test_the_schedule_is_that_of_the_whole_compilation():
  """With attention kernels: every instruction, in its order; and the memory of them."""
  pytest.importorskip("libtpu")
  program, topology = program_for(load_config(**WITH_KERNELS))
  quick, whole = scheduled_step(program), find_step(program, topology)
  ours, theirs = (
    [(i.opcode, i.type, times) for i, times in CompiledProgram.parse(step.text).walk()] for step in (quick, whole)
  )
  assert ours == theirs
  assert quick.temporaries == pytest.approx(whole.temporaries, abs=4 * 2**20)  # of gigabytes where it counts


@pytest.mark.nightly
@pytest.mark.aot
def test_a_step_that_does_not_fit_has_no_schedule():
  pytest.importorskip("libtpu")
  config = load_config(**SMALL | {"vocab_size": 2**22, "base_emb_dim": 2048})
  found = plan(config, quick=True)
  assert not found.fits
  assert found.estimate is None
  assert jax.config.jax_enable_compilation_cache
