"""The real TPU compiler takes every fast path, forward and backward, alone on a chip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.kernels.attention import AttentionKernel
from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.kernels.delta_rule import chunked
from maxtext.kernels.grouped_matmul import GroupedMatmul
from maxtext.kernels.splash_attention import SplashBlocks
from maxtext.kernels.weight_quantize import STORED_FORMATS, stored_shapes
from maxtext.layers.indexer import among_best
from maxtext.layers.matmul import PlainMatmul
from maxtext.layers.matmul_call import MatmulCall, Site
from maxtext.layers.quantized_weight import QuantizedFormat, WeightRounding
from maxtext.mesh.topology import Topology
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.memory_traffic import memory_traffic

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.aot, pytest.mark.slow]

B, S, H, K, D = 1, 1024, 4, 2, 128
SCORING = {
  "window": ScoreSpec(D**-0.5, 256), "chunk": ScoreSpec(D**-0.5, 256, chunked=True),
  "cap": ScoreSpec(D**-0.5, cap=30.0),
}  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param("v5p-8", marks=pytest.mark.nightly), "v6e-4"])
def mesh(request):
  return Mesh(np.array(Topology.named(request.param).devices()[:1]), ("data",))


def compiled(mesh, run, *shapes):
  """A program of the sum of what is returned and its gradients by all arrays of floats."""
  structs = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec())) for shape, dtype in shapes
  ]
  floats = [i for i, (_, dtype) in enumerate(shapes) if jnp.issubdtype(dtype, jnp.floating)]
  step = jax.value_and_grad(lambda *arrays: run(*arrays).astype(jnp.float32).sum(), floats)
  return jax.jit(step).lower(*structs).compile().as_text()


@pytest.mark.parametrize("case", SCORING)
def test_splash_attention(mesh, case):
  """In rows of several documents, with sinks where there is a window."""
  attention, whole = AttentionKernel("splash", blocks=SplashBlocks(*(512,) * 8)), PartitionSpec(None, None, None, None)
  sinks = [((H,), jnp.float32)] if case == "window" else []

  def run(q, k, v, positions, segments, *sinks):
    inputs = AttentionInputs(q, k, v, Tokens(positions, segments), *sinks)
    return attention(inputs, SCORING[case], AttentionSharding(mesh, whole, whole))

  rows = [((B, S), jnp.int32)] * 2
  heads = [((B, S, n, D), jnp.bfloat16) for n in (H, K, K)]
  text = compiled(mesh, run, *heads, *rows, *sinks)
  assert all(f"splash_mha_{part}" in text for part in ("fwd", "dkv"))


def test_grouped_products(mesh):
  shapes = ((2048, 512), jnp.bfloat16), ((8, 512, 1024), jnp.bfloat16), ((8,), jnp.int32)
  text = compiled(mesh, GroupedMatmul("megablox"), *shapes)
  assert "tpu_custom_call" in text


def test_delta_rule(mesh):
  def run(q, k, v, g, beta, begins, state):
    return chunked(q, k, v, g, beta, begins > 0, state, size=64)[0]

  arrays = [((B, S, H, D), jnp.float32)] * 3 + [((B, S, H), jnp.float32)] * 2
  compiled(mesh, run, *arrays, ((B, S), jnp.int32), ((B, H, D, D), jnp.float32))


def test_the_choice_of_an_indexer(mesh):
  """It has no gradient; what it chooses is a mask."""
  compiled(mesh, lambda scores, x: among_best(scores, 256) * x, ((B, S, S), jnp.float32), ((B, S, 1), jnp.float32))


@pytest.mark.parametrize(("name", "most"), [("int8", 1.1), ("int4", 1.2), ("mxfp4", 1.2), ("nvfp4", 2.0)])
def test_a_matmul_reads_weights_at_rest_as_they_are_stored(name, most):
  """Of 16 tokens, as in a decode step: nothing is written out unpacked, nor scales at the size of the weight. (Before
  v6e, whose vector unit has bfloat16, scales are.)"""
  inputs, outputs, stored = 4096, 14336, STORED_FORMATS[name]
  format_ = QuantizedFormat(WeightRounding(name, stored.block))
  call = MatmulCall(Site("layers/up", "linear"), "ab,bc->ac", jnp.bfloat16)
  mesh = Mesh(np.array(Topology.named("v6e-4").devices()[:1]), ("data",))
  place = NamedSharding(mesh, PartitionSpec())
  shapes = stored_shapes(stored, stored.block, inputs, (outputs,))
  arrays = {leaf: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for leaf, (shape, dtype) in shapes.items()}
  x = jax.ShapeDtypeStruct((16, inputs), jnp.bfloat16, sharding=place)
  found = jax.jit(lambda x, arrays: format_.matmul(call, PlainMatmul(), x, arrays)).lower(x, arrays).compile()
  moved = sum(bytes for _, bytes in memory_traffic(CompiledProgram.parse(found.as_text())))
  assert moved < most * sum(a.size * a.dtype.itemsize for a in arrays.values())
