"""Processes that differ are told before the first step: in which key, on which process, and both values."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest

from maxtext.configs.types import DerivedValues, MaxTextConfig
from maxtext.distributed.agreement import digest
from maxtext.training.consistency import MAY_DIFFER, configuration_values, step_values
from tests.agreement_worker import SMALL as ONE
from tests.agreement_worker import changed
from tests.corpora import write_corpus
from tests.flags import flags
from tests.support import TINY, program, tiny

# Of each kind: numbers of the optimizer, the data's order, a size, a number format, the mesh, a switch, a list, a name.
TEN = ["learning_rate", "adam_weight_decay", "data_shuffle_seed", "base_emb_dim", "dtype", "ici_tensor_parallelism",
       "scan_layers", "logical_axis_rules", "run_name", "steps"]  # fmt: skip


KEYS = [key for key in MaxTextConfig.model_fields if key not in {*MAY_DIFFER, *DerivedValues.model_fields}]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_changes_the_digest(key):
  here, there = configuration_values(tiny()), configuration_values(changed(tiny(), key))
  assert digest(there) != digest(here)
  assert [k for k in here if here[k] != there[k]] == [key]


@pytest.fixture(scope="module")
def step():
  return step_values(program(tiny(**ONE)))


@pytest.mark.parametrize("key", MAY_DIFFER)
def test_what_may_differ_does_not_reach_the_step(key, step):
  config = changed(tiny(**ONE), key)
  assert configuration_values(config) == configuration_values(tiny(**ONE))
  assert step_values(program(config)) == step


@pytest.mark.parametrize(
  "change", [{"learning_rate": 0.5}, {"adam_weight_decay": 0.5}, {"gradient_clipping_threshold": 3}]
)
def test_the_lowered_step_has_constants_too(change, step):
  assert step_values(program(tiny(**ONE, **change))) != step


def test_the_first_call_uses_what_was_lowered():
  """Comparing the step costs its text and a digest of that; it is not traced or lowered twice."""
  p, made = program(tiny(**ONE)), []
  step_values(p)
  state, batch = p.init(), next(p.feed()).batch
  jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **about: made.append((name, about)))
  p.step(state, batch)
  names = [name for name, about in made]
  assert any("backend_compile" in name for name in names), "the listener listens"
  assert not any("jaxpr" in name for name in names), names


def start(command: list[str], index: int, port: int, **how) -> subprocess.Popen:
  env = os.environ | flags() | how.pop("env", {}) | {
    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)
  }  # fmt: skip
  return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how)


def free_port() -> int:
  with socket.create_server(("127.0.0.1", 0)) as probe:
    return probe.getsockname()[1]


def ended(processes: list[subprocess.Popen], seconds: float) -> tuple[list[int], list[str]]:
  try:
    said = [process.communicate(timeout=seconds)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  return [process.returncode for process in processes], said


def compared(folders: str, keys: list[str], seconds: float) -> dict[str, str]:
  """What process 0 found of each comparison, of two real processes that join once."""
  port = free_port()
  command = [sys.executable, "-m", "tests.agreement_worker", folders, *keys]
  codes, said = ended([start(command, index, port) for index in range(2)], seconds)
  assert codes == [0, 0], said
  return json.loads(next(line for line in said[0].splitlines() if line.startswith("found "))[6:])


def check(found: dict[str, str], keys: list[str]) -> None:
  assert found.pop("nothing") == ""
  host, config = socket.gethostname(), tiny(**ONE)
  for key in keys:
    here, there = (configuration_values(c)[key] for c in (config, changed(config, key)))
    assert found[key] == (
      f"The processes of this run differ: {key} is {here} on process 0 and {there} on process 1 ({host}). "
      f"Start all of them with the same command, files and installed versions."
    )
  assert found["the lowered step"].startswith("The processes of this run differ: the lowered step is ")


@pytest.mark.mesh
@pytest.mark.slow
def test_two_processes_name_what_differs(tmp_path):
  folders = [write_corpus(tmp_path / name, sizes) for name, sizes in (("a", (37, 1, 50, 12)), ("b", (37, 2, 50, 12)))]
  found = compared(",".join(map(str, folders)), TEN, 300)
  check(found, TEN)
  assert "data.sources[0]." in found["data"]
  assert "documents is 100 on process 0 and 101 on process 1" in found["data"]


@pytest.mark.mesh
@pytest.mark.nightly
def test_two_processes_name_every_key_that_differs():
  check(compared("-", KEYS, 1200), KEYS)


@pytest.mark.mesh
@pytest.mark.slow
def test_a_run_whose_processes_differ_ends_before_its_first_step(tmp_path):
  keys = TINY | ONE | {"steps": 3, "base_output_directory": tmp_path, "run_name": "run", "enable_tensorboard": False}
  command = [sys.executable, "-m", "maxtext.cli", "train", *(f"{key}={value}" for key, value in keys.items())]
  port, seeds = free_port(), ({}, {"M_DATA_SHUFFLE_SEED": "7", "M_ADAM_WEIGHT_DECAY": "0.3"})
  codes, said = ended([start(command, index, port, env=env) for index, env in enumerate(seeds)], 300)
  assert codes == [2, 2], said
  for text in said:
    assert "adam_weight_decay is 0.1 on process 0 and 0.3 on process 1" in text
    assert "data_shuffle_seed is 0 on process 0 and 7 on process 1" in text
    assert "Traceback" not in text
  assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.mesh
@pytest.mark.slow
def test_a_process_that_compiles_slowly_is_waited_for(tmp_path):
  """The collectives of CPUs give the others 30 seconds to connect, counted from the first process's first step."""
  port = free_port()
  command = [sys.executable, "-m", "tests.slow_compile_worker", str(tmp_path)]
  processes = [start(command, index, port, env={"JAX_ENABLE_COMPILATION_CACHE": "false"}) for index in range(2)]
  codes, said = ended(processes, 900)
  assert codes == [0, 0], said
  assert all("ended at step 2" in text for text in said)
