"""The real TPU compiler on the real step: what fits, what it costs, which collectives it makes."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext import load_config
from maxtext.layers.param_factory import ParamFactory
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.reduce_scatter import reduce_scatter_gradient
from maxtext.mesh.topology import Topology
from maxtext.models.execution.execution import execution_config
from maxtext.models.mixture import mixture
from maxtext.planner.compile import program_for
from maxtext.planner.hlo import CompiledProgram, Transfer
from maxtext.training.program import Program

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.aot, pytest.mark.slow]

# A Llama layer's weights that FSDP splits: query, key, value, out, gate, up, down.
WEIGHTS_PER_LAYER = 7


@dataclass(frozen=True)
class Compiled:
  """A step, compiled; `layers` is how often the loop over layers runs."""

  step: Program
  topology: Topology
  memory: Any
  program: CompiledProgram

  @property
  def layers(self) -> int:
    return self.step.config.base_num_decoder_layers

  def gathers(self) -> list[tuple[Transfer, int]]:
    return [(t, times) for t, times in self.program.collectives() if t.collective.collective == "all-gather"]


def compiled(recipe: str, compile_topology: str, **changes: Any) -> Compiled:
  start = time.perf_counter()
  keys = {"dataset_type": "synthetic", "compile_topology": compile_topology}
  step, topology = program_for(load_config(recipe, **keys, **changes))
  executable = step.lower().compile()
  found = Compiled(step, topology, executable.memory_analysis(), CompiledProgram.parse(executable.as_text()))
  print(f"\n{recipe}: compiled in {time.perf_counter() - start:.0f} s, peak "
        f"{found.memory.peak_memory_in_bytes / 1e9:.1f} GB, {found.program.cycles:.3e} cycles")  # fmt: skip
  return found


@pytest.fixture(scope="module")
def llama_narrow() -> Compiled:
  """The recipe of 7B with half the width, which compiles in half the time."""
  return compiled(
    "llama2-7b-v5p-16", "v5p-16", override_model_config=True, base_emb_dim=2048, base_mlp_dim=5632,
    base_num_query_heads=16, base_num_kv_heads=16, per_device_batch_size=2,
  )  # fmt: skip


@pytest.fixture(scope="module")
def llama_7b() -> Compiled:
  return compiled("llama2-7b-v5p-16", "v5p-16")


@pytest.fixture(scope="module")
def llama_70b() -> Compiled:
  return compiled("llama2-70b-v5p-128", "v5p-128")


# What holds for one should hold for the others: the gate compiles the smallest, and XLA takes minutes for those.
@pytest.fixture(
  params=["llama_narrow", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama_7b", "llama_70b"))]
)
def llama(request) -> Compiled:
  return request.getfixturevalue(request.param)


def splash_calls(program: CompiledProgram) -> Counter:
  calls = [(i.op_name or "", n) for i, n in program.walk() if i.opcode == "custom-call" and "tpu_custom_call" in i.rest]
  count: Counter = Counter()
  for name, times in calls:
    for part in ("fwd", "dq", "dkv"):
      count[part] += times * (f"splash_mha_{part}" in name)
  return count


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama_7b", "llama_70b"])
def test_a_step_fits(name, request):
  llama = request.getfixturevalue(name)
  assert llama.memory.peak_memory_in_bytes < llama.topology.chip.hbm_bytes


def test_every_collective_is_one_of_ours(llama):
  collectives = llama.program.collectives()
  assert collectives
  assert all(t.collective.op_name for t, _ in collectives), "one without a source is a decomposed one"


def test_weights_are_gathered_layer_by_layer_and_beside_products(llama):
  vocab, width = llama.step.config.vocab_size, llama.step.config.base_emb_dim
  outside = [t.collective.arrays[0].shape for t, times in llama.gathers() if times == 1]
  assert sorted(outside) == sorted([(vocab, width), (width, vocab)]), "embedding and head"
  in_layers = [t for t, times in llama.gathers() if times == llama.layers]
  assert len(in_layers) == 2 * WEIGHTS_PER_LAYER, "each weight once forward, once backward"
  assert len(outside) + len(in_layers) == len(llama.gathers())
  assert sum(t.asynchronous for t in in_layers) >= 0.8 * len(in_layers)


def test_no_layer_moves_or_copies_the_residual_stream(llama):
  inputs = llama.step.batch.inputs
  stream = (*inputs.sharding.shard_shape(inputs.shape), llama.step.config.base_emb_dim)
  in_layers = [i for i, times in llama.program.walk() if times == llama.layers]
  assert any(a.shape == stream for i in in_layers for a in i.arrays), "there is one of this shape"
  assert not [i for i in in_layers if i.opcode == "copy" and i.arrays[0].shape == stream], "into another layout"
  moved = [t.collective for t, _ in llama.program.collectives()]
  assert {i.collective for i in moved} == {"all-gather", "all-reduce"}
  assert not [i for i in moved if any(a.shape == stream for a in i.arrays)]


def test_attention_is_not_computed_again(llama):
  assert splash_calls(llama.program) == dict.fromkeys(("fwd", "dq", "dkv"), llama.layers)


@pytest.mark.nightly
def test_7b_costs_less_than_it_did_elsewhere(llama_7b):
  assert llama_7b.program.cycles < 0.92 * 5.11e9, "a public implementation's, at 63.8 GB"


@pytest.mark.nightly
def test_70b_costs_what_it_should(llama_70b):
  assert llama_70b.memory.peak_memory_in_bytes == pytest.approx(58.1e9 + 10.7e9, rel=0.05), "and attention's output"
  assert llama_70b.program.cycles == pytest.approx(1.96e10, rel=0.05)
  gathered = sum(t.collective.bytes * times for t, times in llama_70b.gathers())
  assert gathered == pytest.approx(275e9, rel=0.02)


def test_70b_lowers_for_50944_chips_without_an_array():
  before = {id(a) for a in jax.live_arrays()}
  config = load_config(
    "llama2-70b",
    dataset_type="synthetic",
    max_target_length=4096,
    per_device_batch_size=1,
    compile_topology="v5e-256",
    compile_topology_num_slices=199,
  )
  start = time.perf_counter()
  program, _ = program_for(config)
  mesh = program.model.execution.sharding.mesh
  assert mesh.size == 50944
  assert (mesh.shape["data"], mesh.shape["fsdp"]) == (199, 256)
  lowered = program.lower()
  print(f"\nllama2-70b for 50,944 chips: lowered in {time.perf_counter() - start:.1f} s")
  text = lowered.as_text()
  assert "50944" in text
  assert not [a for a in jax.live_arrays() if id(a) not in before and a.size > 1]


SMALL = ["base_num_decoder_layers=2", "base_emb_dim=512", "base_mlp_dim=1024", "vocab_size=1024",
         "max_target_length=1024", "dataset_type=synthetic", "compile_topology=v5p-8"]  # fmt: skip


def plan(*words):
  command = [Path(sys.executable).with_name("maxtext"), "plan", *SMALL, *words]
  environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
  return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_plan_of_what_fits(tmp_path):
  flags = f"compile_xla_flags=--xla_dump_to={tmp_path / 'dump'}"
  done = plan("per_device_batch_size=2", flags, "--json", "--html", str(tmp_path / "plan.html"))
  assert done.returncode == 0, done.stderr
  assert list((tmp_path / "dump").glob("*train_step*")), "the compiler was told"
  found = json.loads(done.stdout)
  assert found["fits"]
  memory = found["memory"]
  weights = 2 * 1024 * 512 + 2 * (4 * 512 * 2048 + 3 * 512 * 1024 + 2 * 512) + 512
  assert memory["parameters"] == pytest.approx(weights * 4 / 4, rel=0.01), "float32, over four chips"
  assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)
  assert found["peak_hbm_bytes_per_chip"] > found["argument_bytes"]
  assert found["estimated_step_seconds"] == pytest.approx(sum(found["estimated_seconds"].values()))
  assert 0 < found["estimated_mfu"] < 1
  assert {name for c in found["collectives"] for name in c["axes"]} == {"fsdp"}
  assert any(o["source"].startswith("layers/linear.py") for o in found["most_expensive"])
  assert 0 < found["recomputed_share"] < 0.5
  labels = {o["label"] for o in found["most_expensive"]}
  assert {"attention query, key and value, backward", "attention kernel, backward"} <= labels
  assert any("remat_policy=minimal would keep about" in sentence for sentence in found["advice"])
  page = (tmp_path / "plan.html").read_text()
  assert "Time of one step" in page
  assert page.count('<div class="stack timeline">') == 2, "a layer forward and backward"
  assert "fsdp=4 along 2 chips and 2 chips" in page


def test_a_plan_of_what_does_not_fit():
  done = plan("per_device_batch_size=65536")
  assert done.returncode == 0, done.stderr
  assert "DOES NOT FIT" in done.stdout


@pytest.mark.nightly
def test_a_search_finds_a_recipe_that_runs(tmp_path):
  recipe = tmp_path / "found.yml"
  done = plan("--search", "--compiles", "3", "--json", "--recipe", str(recipe), "--jobs", "1")
  assert done.returncode == 0, done.stderr
  best, plain = json.loads(done.stdout), json.loads(plan("per_device_batch_size=1", "--json").stdout)
  assert best["fits"]
  assert best["estimated_tokens_per_second_per_chip"] > 1.05 * plain["estimated_tokens_per_second_per_chip"]
  lines = [line for line in done.stderr.splitlines() if "tokens/s/chip" in line]
  assert len(lines) <= 3
  assert any("custom[context,mlpwi_0,mlpwi_1,query,key,value,out]" in line for line in lines), "what is kept is shown"
  found = load_config(recipe)
  assert found.remat_policy == best["keys"]["remat_policy"]
  assert found.base_emb_dim == 512
  assert not found.compile_topology


def moved_by_experts(**keys) -> Counter:
  """Bytes of each collective of a layer of eight experts and its gradients, on four chips with 256 tokens each."""
  config = load_config(
    decoder_block="mixtral", num_experts=8, num_experts_per_tok=2, base_emb_dim=256, base_mlp_dim=256,
    ici_expert_parallelism=4, per_device_batch_size=1, compile_topology="v5p-8", **keys,
  )  # fmt: skip
  mesh = make_mesh(config, Topology.named(config.compile_topology).devices())
  execution = execution_config(config, mesh)
  graph, state = nnx.split(nnx.eval_shape(lambda: mixture(config).build(ParamFactory(0, jnp.float32), 256, execution)))

  def placed(shape, dtype, axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=execution.sharding.rules.sharding(mesh, axes, shape))

  def loss(x, weights):
    y, _ = nnx.merge(graph, nnx.from_flat_state(list(zip(paths, weights, strict=True))))(x)
    return jnp.square(y.astype(jnp.float32)).sum()

  paths, variables = zip(*nnx.to_flat_state(state), strict=True)
  weights = [v.replace(placed(v.get_value().shape, v.get_value().dtype, v.axes)) for v in variables]
  x = placed((4, 256, 256), jnp.bfloat16, ("activation_batch", "activation_length", "activation_embed"))
  text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, weights).compile().as_text()
  moved: Counter = Counter()
  for transfer, times in CompiledProgram.parse(text).collectives():
    moved[transfer.collective.collective] += transfer.collective.bytes * times
  return moved


def test_tokens_are_sent_to_their_experts_alone():
  tokens = 256 * 256 * 2  # bytes of a chip's, each of which goes to two experts of the eight on four chips
  sent, gathered = moved_by_experts(), moved_by_experts(use_ring_of_experts=True)
  assert sent["ragged-all-to-all"] == 4 * 2 * tokens, "there and back, forward and backward"
  assert sent["all-gather"] < 0.1 * tokens, "numbers and the router's weight"
  assert not gathered["ragged-all-to-all"]
  assert gathered["all-gather"] > 2 * 4 * tokens, "all tokens, and the gradients of all results"


def reduced_bytes(staged: bool) -> dict[str, int]:
  """Bytes that a loop over two layers moves for its gradients on 64 chips of v5p, by kind of collective."""
  mesh = Mesh(mesh_utils.create_device_mesh((64,), Topology.named("v5p-128").devices(), allow_split_physical_axes=True),
              ("fsdp",))  # fmt: skip
  spec = PartitionSpec("fsdp", None)

  def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
      weight = reduce_scatter_gradient(weight, mesh, spec, {"fsdp"}) if staged else weight
      return jnp.tanh(x @ weight), None

    return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

  def struct(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

  weights = struct((2, 2048, 2048), None, "fsdp", None)
  step = jax.jit(jax.grad(loss), out_shardings=weights.sharding)
  options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
  compiled = step.lower(weights, struct((4096, 2048), "fsdp", None)).compile(compiler_options=options)
  moved: Counter[str] = Counter()
  for transfer, times in CompiledProgram.parse(compiled.as_text()).collectives():
    moved[transfer.collective.collective] += transfer.collective.bytes * times
  return moved


def test_gradients_are_reduce_scattered_in_stages():
  whole = 2 * 2048 * 2048 * 2
  at_once, staged = reduced_bytes(False), reduced_bytes(True)
  assert at_once["all-reduce"] >= whole, "every device sums every gradient: the reason for stages"
  assert at_once["reduce-scatter"] == 0
  assert staged["reduce-scatter"] >= whole / 16
  assert staged["all-reduce"] <= whole / 16 * 1.1, "what is left is summed over the last torus axis alone"
