"""Recipes: each is a configuration without a warning, and what is in its name is hardware on which its state fits."""

import subprocess
import sys
from pathlib import Path

import pytest

from maxtext.cli.plan import _on_its_chips
from maxtext.configs.loader import recipe_names, resolve
from maxtext.mesh.topology import Topology
from maxtext.planner.compile import program_for
from maxtext.rl.engines import engine_slots
from maxtext.rl.train_policy import policy_config
from maxtext.training.live_engine import engine_problem, slots_on
from maxtext.training.state import bytes_per_device

GRPO = [name for name in recipe_names() if "-grpo-" in name]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_a_configuration(name):
  has_data = "grpo" in name or name == "shapes-gemma3"
  found = resolve(name, values={} if has_data else {"dataset_type": "synthetic"})
  assert found.warning is None
  topology = _on_its_chips(found).config.compile_topology
  assert bool(topology) == (name not in ("gsm8k-grpo", "shapes-gemma3", "small-llama", "stdlib-llama"))
  if topology:
    Topology.named(topology)


@pytest.mark.parametrize(
  ("name", "topology"),
  [
    ("llama2-70b-v5p-128-fast", "v5p-128"), ("llama3.1-8b-grpo-v5p-8", "v5p-8"), ("a-tpu7x-4x4x4", "tpu7x-4x4x4"),
    ("b-h100-64", "h100-64"), ("v6e-8", "v6e-8"), ("small-llama", ""), ("gpt3-6b", ""), ("x-v5p-", ""), ("xv5p-8", ""),
  ],
)  # fmt: skip
def test_hardware_is_read_from_names(name, topology):
  assert Topology.named_in(name) == topology


@pytest.mark.aot
@pytest.mark.parametrize("name", GRPO)
def test_state_and_cache_of_a_recipe_fit_its_chips(name):
  pytest.importorskip("libtpu")
  config = _on_its_chips(resolve(name)).config
  program, topology = program_for(config)
  assert not engine_problem(program), "the engine runs the trainer's model on its mesh"
  devices = len(topology.devices())
  slots = slots_on(devices, engine_slots(config))
  held = {
    "state": bytes_per_device(program.state), "gradients": bytes_per_device(program.state.params),
    "cache": cache_bytes(config, devices, slots), **{one: bytes_per_device(f) for one, f in program.frozen.items()},
  }  # fmt: skip
  print(f"\n{name}: " + ", ".join(f"{what} {size / 2**30:.1f}" for what, size in held.items()) + " GiB a device")
  assert sum(held.values()) < 0.85 * topology.chip.hbm_bytes / topology.chip.devices
  assert policy_config(config, devices).steps == config.num_batches


def cache_bytes(config, devices, slots):
  """Keys and values in bfloat16 of all slots, which are divided among devices, or their heads are."""
  heads = config.base_num_kv_heads * config.head_dim
  return 2 * 2 * slots * config.max_target_length * config.base_num_decoder_layers * heads // devices


def test_gsm8k_becomes_tasks(tmp_path):
  row = '{"question": " How many? ", "answer": "First 1,000 #### no.\\n#### 1,018"}\n'
  for name in ("train", "test"):
    (tmp_path / f"{name}.jsonl").write_text(row)
  script = str(Path(__file__).parents[1] / "examples" / "rl" / "gsm8k.py")
  command = [sys.executable, script, "out", "train.jsonl", "test.jsonl"]
  subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
  found = (tmp_path / "out" / "test.jsonl").read_text()
  assert found.startswith('{"prompt": "How many?\\n\\nThink between <reasoning> and')
  assert found.endswith('"answer": "1018"}\n')
  (tmp_path / "test.jsonl").write_text('{"question": "?", "answer": "none"}\n')
  done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
  assert done.returncode == 1
  assert "has no ####: none" in done.stderr
  assert "Traceback" not in done.stderr
