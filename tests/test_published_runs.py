"""Published runs: their keys load, their flags reach the compiler, and a plan is set beside what was measured."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from maxtext import ConfigError, load_config
from maxtext.cli.main import main
from maxtext.configs.loader import resolve
from maxtext.mesh.devices import make_mesh
from maxtext.mesh.topology import Topology
from maxtext.planner.kept_steps import _digest
from maxtext.planner.plan import plan
from maxtext.planner.published_runs import NOT_COMPILER_OPTIONS, published_run, published_runs
from maxtext.training.program import Program
from tests.support import TINY, tiny
from tests.terminal import Terminal

MESH_AXES = tiny().mesh_axes


def test_their_configurations_load():
  """Those that do not ask for something that is not there. The number must not fall."""
  refused = {}
  for run in published_runs().values():
    try:
      resolve(values=run.planned_keys)
    except ConfigError as error:
      refused[run.id] = str(error)
  print(f"\n{len(published_runs()) - len(refused)} of {len(published_runs())} published configurations load")
  assert len(published_runs()) == 159
  assert len(refused) <= 7
  assert not [message for message in refused.values() if "no effect" in message]


def test_their_figures_are_those_of_their_batch():
  """Tokens of a step are rows times length times devices, as the configuration has them."""
  for run in published_runs().values():
    keys, topology = run.keys, Topology.named(run.topology, run.slices)
    rows = keys["per_device_batch_size"] * topology.chips * topology.chip.devices
    length = keys.get("max_target_length", 2048)
    assert run.tokens == pytest.approx(rows * length * keys.get("gradient_accumulation_steps", 1)), run.id
    assert 0.5 < run.step_seconds < 200, run.id
    assert run.flags or not run.id.startswith("tpu7x"), run.id


@pytest.mark.aot
@pytest.mark.slow
def test_the_compiler_takes_their_flags():
  pytest.importorskip("libtpu")
  device = Topology.named("v6e-4").devices()[0]
  lowered = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=SingleDeviceSharding(device)))
  refused = set()
  for name, value in {item: None for run in published_runs().values() for item in run.flags.items()}:
    try:
      lowered.compile(compiler_options={name: value if isinstance(value, bool) else str(value)})
    except jax.errors.JaxRuntimeError as error:
      if "No such compile option" in str(error):
        refused.add(name)
  assert refused == NOT_COMPILER_OPTIONS


def test_the_command_lists_them_and_names_a_wrong_one(capsys):
  assert main(["plan", "--published"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 1 + len(published_runs())
  assert lines[0].split() == ["run", "chips", "tokens", "a", "step", "step", "tokens/s/chip"]
  (row,) = (line for line in lines if line.startswith("tpu7x-256-llama3.1-405b-8k-fp8-20260420 "))
  assert row.split()[1] == "256", "chips, not devices"
  assert main(["plan", "--published", "v6e-8-llama3.1-8b-8k"]) == 2
  assert "is not a published run. Did you mean 'v6e-8-llama3.1-8b-8k-bf16-" in capsys.readouterr().err
  assert main(["plan", "--published", "v5p-8-deepseek2-16b-2k-bf16-20250905", "--search"]) == 2
  assert "--search does not start from --published" in capsys.readouterr().err
  assert main(["plan", "--published", "", "steps=3"]) == 2
  assert "it takes no keys" in capsys.readouterr().err
  assert main(["plan", "--published", "--json"]) == 0
  assert len(json.loads(capsys.readouterr().out)) == len(published_runs())


# As many tokens as the published run has, and as little for the compiler to do as there can be.
SMALL = {
  "override_model_config": True, "base_emb_dim": 128, "base_mlp_dim": 128, "head_dim": 128, "vocab_size": 128,
  "base_num_decoder_layers": 1, "base_num_query_heads": 1, "base_num_kv_heads": 1, "attention": "dot_product",
  "max_target_length": 128, "per_device_batch_size": 192, "use_iota_embed": False, "remat_policy": "full",
  "compile_xla_flags": "",
}  # fmt: skip
LITTLE_EFFORT = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0"}


@pytest.mark.aot
@pytest.mark.slow
def test_a_plan_is_set_beside_what_was_published_and_its_step_is_compiled_once(tmp_path):
  pytest.importorskip("libtpu")
  name = "v6e-8-llama3.1-8b-8k-bf16-20250717"
  run, cache = published_run(name), tmp_path / "cache"
  words = [f"{key}={value}" for key, value in SMALL.items()]
  command = [sys.executable, "-m", "maxtext", "plan", "--published", name, *words, "--cache", str(cache)]
  how = {"env": os.environ | LITTLE_EFFORT, "check": True, "capture_output": True, "text": True}
  text = subprocess.run(command, **how).stdout
  assert text.startswith(f"{name} on v6e-8: 8 chips (fsdp=8), 196,608 tokens a step\n")
  assert f"published    3.44 s, 7,138 tokens/s/chip: {run.source}" in text
  assert text.endswith(f"shorter, with other {', '.join(SMALL)}\n"), "so small a model is faster"
  (file,) = cache.iterdir()
  written = file.stat().st_mtime_ns
  found = json.loads(subprocess.run([*command, "--json"], **how).stdout)
  assert found["published"] == run.as_json()
  assert f"compiled here in {found['compile_seconds']:.0f} s" in text, "then, not now"
  assert (list(cache.iterdir()), file.stat().st_mtime_ns) == ([file], written)
  environment = os.environ | LITTLE_EFFORT | {"TERM": "xterm"}
  terminal = Terminal([*command, "vocab_size=256"], 100, env=environment)
  terminal.wait_for(r"compiling for v6e-8 \(an earlier compilation took \d+ s\)  [1-9]")
  terminal.press("\x03")
  start = time.monotonic()
  assert terminal.wait() == 130
  assert time.monotonic() - start < 5
  assert terminal.screen() == ["maxtext: stopped.", ""]


@pytest.mark.aot
@pytest.mark.slow
def test_a_kept_step_is_that_of_its_layout_and_flags(monkeypatch):
  """Two layouts of a mesh lower to the same text."""
  pytest.importorskip("libtpu")
  topology = Topology.named("v6e-8")
  devices = topology.devices()

  def digest(devices=devices, **keys):
    config = load_config(**TINY, attention="dot_product", compile_topology="v6e-8", **keys)
    program = Program.of(config, Mesh(np.reshape(devices, make_mesh(config, devices).devices.shape), MESH_AXES))
    return _digest(program, topology, program.lower())

  first = digest()
  assert digest() == first
  assert digest(devices[::-1]) != first
  assert digest(compile_xla_flags="--xla_tpu_scoped_vmem_limit_kib=65536") != first
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
  assert digest() != first


@pytest.mark.nightly
def test_a_step_that_was_kept_damaged_is_compiled_again(tmp_path):
  pytest.importorskip("libtpu")
  config = load_config(**TINY, attention="dot_product", compile_topology="v5e-4")
  first = plan(config, cache=tmp_path)
  (file,) = tmp_path.iterdir()
  written, whole = file.stat().st_mtime_ns, file.read_bytes()
  file.write_bytes(whole[:100])
  assert plan(config, cache=tmp_path).estimate.seconds == first.estimate.seconds
  assert file.stat().st_mtime_ns > written
  assert plan(load_config(**TINY, attention="dot_product", compile_topology="v5e-8"), cache=tmp_path).chips == 8
  assert len(list(tmp_path.iterdir())) == 2, "another topology is another program"


@pytest.mark.aot
@pytest.mark.slow
def test_an_unknown_flag_of_the_compiler_is_named():
  pytest.importorskip("libtpu")
  config = load_config(
    **TINY, attention="dot_product", compile_topology="v5e-4", compile_xla_flags="--xla_tpu_faster=true"
  )
  with pytest.raises(ConfigError, match="compile_xla_flags: the compiler has no option 'xla_tpu_faster'"):
    plan(config)


@pytest.mark.parametrize(
  ("name", "chips", "devices"), [("tpu7x-4x8x8", 256, 2), ("v5p-4x4x4", 64, 1), ("v6e-16x16", 256, 1)]
)
def test_shapes_are_names_of_topologies(name, chips, devices):
  found = Topology.named(name)
  assert (found.chips, found.chip.devices) == (chips, devices)


@pytest.mark.parametrize(
  ("name", "says"), [("v6e-4x4x4", "2 dimensions"), ("v5p-8x", "such as v5p-4x4x4"), ("v5p-0x4x4", "comes in sizes")]
)
def test_wrong_shapes_are_named(name, says):
  with pytest.raises(ConfigError, match=says):
    Topology.named(name)
