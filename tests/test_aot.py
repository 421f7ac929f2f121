"""The real TPU compiler on the real step: what fits, what it costs, which collectives it makes."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import pytest

from maxtext import load_config
from maxtext.plan.compile import program_for
from maxtext.plan.hlo import CompiledProgram

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.aot, pytest.mark.slow]

# A Llama layer's weights that FSDP splits: query, key, value, out, gate, up, down.
WEIGHTS_PER_LAYER = 7


def compiled(model: str, **keys):
  start = time.perf_counter()
  program, topology = program_for(load_config(model, dataset_type="synthetic", max_target_length=4096, **keys))
  executable = program.lower().compile()
  print(f"\n{model} for {keys['compile_topology']}: compiled in {time.perf_counter() - start:.0f} s")
  return executable.memory_analysis(), CompiledProgram.parse(executable.as_text()), topology


def splash_calls(program: CompiledProgram) -> Counter:
  calls = [(i.op_name or "", n) for i, n in program.walk() if i.opcode == "custom-call" and "tpu_custom_call" in i.rest]
  count: Counter = Counter()
  for name, times in calls:
    for part in ("fwd", "dq", "dkv"):
      count[part] += times * (f"splash_mha_{part}" in name)
  return count


def test_7b_compiles_for_eight_chips_with_splash():
  memory, program, topology = compiled("llama2-7b", compile_topology="v5p-16", per_device_batch_size=1)
  assert memory.peak_memory_in_bytes < topology.chip.hbm_bytes
  assert splash_calls(program) == {"fwd": 64, "dq": 32, "dkv": 32}, "forward, and again for the backward pass"
  print(f"peak {memory.peak_memory_in_bytes / 1e9:.1f} GB, {program.cycles:.3e} cycles")


def test_70b_on_64_chips_costs_what_it_should():
  memory, program, _ = compiled(
    "llama2-70b", compile_topology="v5p-128", per_device_batch_size=2, remat_policy="save_dot_except_mlpwi"
  )
  print(f"peak {memory.peak_memory_in_bytes / 1e9:.1f} GB, {program.cycles:.3e} cycles")
  assert memory.peak_memory_in_bytes == pytest.approx(58.1e9, rel=0.05)
  assert program.cycles == pytest.approx(1.96e10, rel=0.05)

  collectives = program.collectives()
  assert all(i.op_name for i, _ in collectives), "a collective without a source is a decomposed one"
  in_loop = Counter(i.collective for i, times in collectives if times == 80)
  assert in_loop["all-gather"] == 2 * WEIGHTS_PER_LAYER, "each weight once forward, once backward"
  gathered = sum(i.bytes * times for i, times in collectives if i.collective == "all-gather")
  assert gathered == pytest.approx(275e9, rel=0.02)
  outside = [i for i, times in collectives if times == 1 and i.collective == "all-gather"]
  assert sorted(i.type.split("{")[0] for i in outside) == ["bf16[32000,8192]", "bf16[8192,32000]"], "embedding and head"


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
  mesh = program.model.how.mesh
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
  done = plan("per_device_batch_size=2", "--json", "--html", str(tmp_path / "plan.html"))
  assert done.returncode == 0, done.stderr
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
  assert "Time of one step" in (tmp_path / "plan.html").read_text()


def test_a_plan_of_what_does_not_fit():
  done = plan("per_device_batch_size=65536")
  assert done.returncode == 0, done.stderr
  assert "DOES NOT FIT" in done.stdout


def test_a_search_finds_a_recipe_that_runs(tmp_path):
  recipe = tmp_path / "found.yml"
  done = plan("--search", "--compiles", "3", "--json", "--recipe", str(recipe), "--jobs", "1")
  assert done.returncode == 0, done.stderr
  best, plain = json.loads(done.stdout), json.loads(plan("per_device_batch_size=1", "--json").stdout)
  assert best["fits"]
  assert best["estimated_tokens_per_second_per_chip"] > 1.05 * plain["estimated_tokens_per_second_per_chip"]
  assert len([line for line in done.stderr.splitlines() if "tokens/s/chip" in line]) <= 3
  found = load_config(recipe)
  assert found.remat_policy == best["keys"]["remat_policy"]
  assert found.base_emb_dim == 512
  assert not found.compile_topology
