"""Blocks of attention's kernels: which of them a mask leaves, and what the compiler's schedules say of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext import load_config
from maxtext.configs.types import SplashAttention
from maxtext.kernels.attention import AttentionKernel
from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.splash_attention import SplashBlocks, seen_blocks
from maxtext.mesh.topology import Topology
from maxtext.planner import kernel_blocks
from maxtext.planner.compile import program_for
from maxtext.planner.estimate import Calibration, estimate
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.schedule import schedule as schedule_of

LENGTH = 2048
SCORING = {
  "causal": ScoreSpec(1.0),
  "window": ScoreSpec(1.0, window=300),
  "chunks": ScoreSpec(1.0, window=512, chunked=True),
  "chunks across blocks": ScoreSpec(1.0, window=384, chunked=True),
}


@pytest.mark.parametrize("case", SCORING)
@pytest.mark.parametrize(("q", "kv"), [(256, 256), (512, 256), (256, 1024)])
def test_blocks_of_which_something_is_seen(case, q, kv):
  positions = jnp.arange(LENGTH)
  seen = np.asarray(SCORING[case].sees(positions[:, None], positions[None]))
  blockwise = seen.reshape(LENGTH // q, q, LENGTH // kv, kv).any((1, 3))
  np.testing.assert_array_equal(seen_blocks(SCORING[case], LENGTH, q, kv), blockwise)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_a_plan_counts_the_blocks_that_a_kernel_multiplies(fused):
  """Of other heights than widths; queries and keys meet in 2 products forward, 7 backward, or 5 where it is fused."""
  topology, heads, width = Topology.named("v5p-8"), 2, 128
  mesh, spec = Mesh(np.array(topology.devices()[:1]), ("one",)), PartitionSpec(None, None, None, None)
  attend = AttentionKernel("splash", blocks=SplashBlocks(512, 256, 256, 512, 256, 256, 512, 256, fused))

  def total(q, k, v, positions):
    inputs = AttentionInputs(q, k, v, Tokens(positions))
    out = attend(inputs, SCORING["causal"], AttentionSharding(mesh, spec, spec))
    return out.astype(jnp.float32).sum()

  everywhere = NamedSharding(mesh, PartitionSpec())
  array = jax.ShapeDtypeStruct((1, LENGTH, heads, width), jnp.bfloat16, sharding=everywhere)
  positions = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32, sharding=everywhere)
  step = jax.jit(jax.grad(total, (0, 1, 2))).lower(array, array, array, positions).compile()
  program, per_second = CompiledProgram.parse(step.as_text()), Calibration(kernel=1e-6)
  seen = seen_blocks(SCORING["causal"], LENGTH, 512, 256).sum() * 512 * 256
  expected = (2 + (5 if fused else 7)) * 2 * heads * width * seen / topology.chip.flops / 1e-6
  assert estimate(schedule_of(program, topology, mesh), per_second).seconds_by_kind()["kernel"] == pytest.approx(
    expected
  )
  faster = estimate(schedule_of(program, topology, mesh, kernel_efficiency={"fwd": 2.0}), per_second).seconds_by_kind()[
    "kernel"
  ]
  assert faster == pytest.approx(expected * (1 - 1 / (9 if not fused else 7)))


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("chip", ["v5p-8", "v6e-4"])
def test_blocks_are_chosen_by_schedules(chip, monkeypatch):
  monkeypatch.setattr(kernel_blocks, "SIZES", ((512, 512, 512), (1024, 1024, 512)))
  keys = {"base_num_decoder_layers": 1, "vocab_size": 1024, "max_target_length": 4096, "dataset_type": "synthetic",
          "compile_topology": chip}  # fmt: skip
  program, topology = program_for(load_config(**keys))
  found = kernel_blocks.best_blocks(program, topology)
  assert found["sa_block_q"] == found["sa_block_kv"] == 1024, "a quarter of the steps, a ninth more pairs"
  reached = kernel_blocks.kernel_efficiency(*program_for(load_config(**keys, **found, sa_use_fused_bwd_kernel=True)))
  assert reached.keys() == {"fwd", "dkv"}, "gradients of queries with those of keys"
  assert all(1.02 < times < 2 for times in reached.values())
  assert not kernel_blocks.kernel_efficiency(program, topology), "default blocks need no compilation"


@pytest.mark.aot
def test_rows_that_default_blocks_do_not_divide_have_nothing_to_be_compared_with():
  keys = {key: 256 for key in SplashAttention.model_fields if key.startswith("sa_block")}
  config = load_config(**keys, max_target_length=768, dataset_type="synthetic", compile_topology="v5p-8")
  assert not kernel_blocks.kernel_efficiency(*program_for(config))
