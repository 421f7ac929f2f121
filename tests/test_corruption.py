"""Devices that are wrong: a bit that flips in the memory of one, or a step that is computed wrongly, is found."""

import io
import json
import os
import re
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.bit_flips import flip_bit
from maxtext import train
from maxtext.checkpoint.tree import named
from maxtext.configs.errors import RunError
from maxtext.distributed.agent import Agent
from maxtext.distributed.leader import ElasticPolicy
from maxtext.distributed.supervisor import supervise
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.compare_replicas import CompareReplicas
from maxtext.training.device_checksums import DeviceChecksums, compare_replicas, first_holders
from maxtext.training.replayed_step import ReplayedStep
from tests.flags import flags
from tests.support import program, tiny

pytestmark = pytest.mark.mesh

RUN = {"base_num_decoder_layers": 1, "steps": 6, "learning_rate": 1e-3, "per_device_batch_size": 1,
       "warmup_steps_fraction": 0.1}  # fmt: skip
DATA = {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 1}
MESHES = {
  "data": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
  "fsdp": {"ici_fsdp_parallelism": 8},
  "tensor": {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8},
  "data, fsdp and tensor": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
  "optimizer over data": {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 2, "shard_optimizer_over_data": True},
}
KINDS = {
  "dropout and bfloat16": {"dropout_rate": 0.1, "dtype": "bfloat16"},
  "experts": {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2},
  "accumulation": {"gradient_accumulation_steps": 2},
}
LAYOUTS = {
  "data": ((8,), PartitionSpec(), True),
  "tensor, replicated over the rest": ((4, 2), PartitionSpec(None, "b"), True),
  "pairs": ((2, 4), PartitionSpec("b"), False),
  "both dimensions": ((2, 4), PartitionSpec("a"), True),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_bit_of_one_replica_is_found_and_the_device_named(layout, dtype):
  shape, spec, is_certain = LAYOUTS[layout]
  mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], devices=jax.devices())
  whole = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 50, (8, 8))
  tree = {n: jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, spec))(whole.astype(dtype)) for n in "xyz"}
  checksums, holders = DeviceChecksums(mesh), first_holders(mesh, list(tree.values()))
  assert compare_replicas(checksums(tree), holders) is None
  for bit in (0, 101):
    flip_bit(tree["y"], 5, bit)
    found = compare_replicas(checksums(tree), holders)
    assert (found.arrays, found.is_certain) == ([1], is_certain)
    assert found.devices == ([5] if is_certain else sorted({5, 1}))
    flip_bit(tree["y"], 5, bit)


def test_what_no_other_device_holds_is_not_compared():
  mesh = jax.make_mesh((8,), ("a",), devices=jax.devices())
  x = jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, PartitionSpec("a")))(np.arange(16.0))
  flip_bit(x, 5, 3)
  assert compare_replicas(DeviceChecksums(mesh)([x]), first_holders(mesh, [x])) is None


class Flip(Callback):
  """Flips a bit of what one device holds of an array, once."""

  def __init__(self, name: str, device: int, after: int) -> None:
    self.name, self.device, self.after = name, device, after

  def due(self, step):
    return step == self.after

  def on_update(self, step, state, position, metrics):
    flip_bit(named(state)[self.name], self.device, 13)
    return False


def test_a_run_ends_and_its_next_start_trusts_nothing_later(tmp_path, capsys):
  """The flip after step 4 is found at 6, before that is saved, and the next start repeats it."""
  keys = DATA | RUN | {"base_output_directory": str(tmp_path), "run_name": "run", "enable_checkpointing": True,
                       "checkpoint_period": 2, "replica_check_period": 3, "max_num_checkpoints_to_keep": 9}  # fmt: skip
  config, devices = tiny(**keys), jax.devices()[:4]
  with pytest.raises(RunError, match=r"^device 2 of host 0 \(\S+\) holds other bits than the replicas in params/") as e:
    train(config, callbacks=[Flip("params/final_norm/scale", 2, 4)], devices=devices)
  assert "at step 6. The last step that was proven right is 4," in str(e.value)
  folder = tmp_path / "run" / "checkpoints"
  assert json.loads((folder / "corrupt.json").read_text())["proven"] == 4
  (folder / "4").rename(folder / "5")  # as if one had been saved since
  capsys.readouterr()
  state = train(config, devices=devices)
  said = capsys.readouterr().out
  assert "only steps up to 4 are proven right; 5.unproven is left out" in said
  assert "checkpoints/2\n" in said
  assert int(state.step) == 6
  assert not (folder / "corrupt.json").exists()


def test_without_a_proven_checkpoint_the_user_decides(tmp_path):
  keys = DATA | RUN | {"base_output_directory": str(tmp_path), "run_name": "run", "enable_checkpointing": True,
                       "checkpoint_period": 4, "steps": 4}  # fmt: skip
  train(tiny(**keys), devices=jax.devices()[:4])
  note = tmp_path / "run" / "checkpoints" / "corrupt.json"
  note.write_text(json.dumps({"step": 4, "what": "device 1 of host 0 (a) computes other bits", "proven": 3}))
  with pytest.raises(RunError, match=r"device 1 .* at step 4, and of the checkpoints .* remove \S+corrupt.json to"):
    train(tiny(**keys | {"steps": 5}), devices=jax.devices()[:4])
  assert (note.parent / "4").exists()


def steps(config, devices=8):
  """A program, its first state and its batches."""
  p = program(config, devices)
  return p, p.model.execution.sharding.mesh, p.init(), p.feed()


class Unreliable:
  """A step function of which one call, on one device, has a wrong bit in its result."""

  def __init__(self, step, call, name, device):
    self.step, self.call, self.name, self.device, self.calls = step, call, name, device, 0

  def __call__(self, state, batch):
    state, metrics = self.step(state, batch)
    self.calls += 1
    if self.calls == self.call:
      flip_bit(named(state)[self.name], self.device, 200)
    return state, metrics


@pytest.mark.parametrize("call", [2, 3])
def test_a_wrong_result_of_what_is_fully_sharded_is_found_by_running_the_step_again(call):
  p, mesh, state, feed = steps(tiny(**RUN, ici_fsdp_parallelism=4), 4)
  name = next(n for n, a in named(p.state).items() if a.sharding.shard_shape(a.shape) != a.shape)
  noted = []
  step = ReplayedStep(Unreliable(p.step, call, name, 3), mesh, 2, 0, lambda *words: noted.append(words))
  state, _ = step(state, next(feed).batch)
  with pytest.raises(RunError, match=r"^device 3 of host 0 \S+ computes other bits when the same step is run again"):
    step(state, next(feed).batch)
  assert [(at, proven) for at, _, proven in noted] == [(2, 0)]


@pytest.mark.nightly
@pytest.mark.parametrize(
  ("mesh", "kind"), [*((m, {}) for m in MESHES), *(("data, fsdp and tensor", k) for k in KINDS.values())],
  ids=[*MESHES, *KINDS],
)  # fmt: skip
def test_clean_steps_raise_no_alarm_and_a_flip_does(mesh, kind):
  p, of, state, feed = steps(tiny(**RUN | MESHES[mesh] | kind))
  check = CompareReplicas(of, p.state, 1, 0, lambda *_: None)
  step = ReplayedStep(p.step, of, 1, 0, lambda *_: None)
  for number in range(1, 5):
    state, _ = step(state, next(feed).batch)
    check.check(number, state)
  held = first_holders(of, jax.tree.leaves(state))
  replicated = [n for n, column in zip(named(state), held.T, strict=True) if (column != np.arange(8)).any()]
  for of_what in ("params", "opt_state"):
    name = next(n for n in replicated if n.startswith(of_what) and n.endswith("scale"))
    flip_bit(named(state)[name], 6, 77)
    with pytest.raises(RunError, match=f"device 6 of .* (in|of) {name}"):
      check.check(9, state)
    flip_bit(named(state)[name], 6, 77)


# A process of a run whose host 1 has a wrong device.
TRAINER = """if True:
  import sys
  import jax
  from maxtext import train
  from maxtext.configs.errors import RunError
  from tests.support import tiny
  from tests.test_corruption import DATA, RUN, Flip

  class FlipOnHost1(Flip):
    def on_update(self, step, state, position, metrics):
      self.device = jax.local_devices()[1].id
      return jax.process_index() == 1 and super().on_update(step, state, position, metrics)

  config = tiny(**DATA | RUN, base_output_directory=sys.argv[1], run_name="run", enable_checkpointing=True,
                checkpoint_period=2, replica_check_period=3, step_replay_period=2)
  try:
    train(config, callbacks=[FlipOnHost1("params/final_norm/scale", 0, 4)])
  except RunError as error:
    print("error:", error)
    sys.exit(2)
"""


@pytest.mark.nightly
def test_a_device_of_another_process_is_named_by_all(tmp_path):
  said = io.StringIO()
  environment = flags(2) | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
  assert supervise([sys.executable, "-c", TRAINER, str(tmp_path)], 2, environment=environment, out=said) == 2
  for process in range(2):
    line = next(line for line in said.getvalue().splitlines() if line.startswith(f"[{process}] error:"))
    assert re.search(r"device \d+ of host 1 \(\S+\) holds other bits than the replicas in params/\S+ ", line)
    assert "at step 6. The last step that was proven right is 4" in line
  assert json.loads((tmp_path / "run" / "checkpoints" / "corrupt.json").read_text())["proven"] == 4


# A process that trains nothing; that of host 1 finds itself suspected in its first start.
WORKER = """if True:
  import json, os, sys, time
  from pathlib import Path
  from maxtext.distributed.heartbeat import finished_step, report_suspect, start_heartbeat
  start_heartbeat()
  request = json.loads(sys.stdin.readline() or "null") or sys.exit()
  os.environ |= request["environment"]
  folder, host = Path(request["arguments"][0]), os.environ["MAXTEXT_HOST"]
  (folder / f"start-{host}-of-{os.environ['JAX_NUM_PROCESSES']}").touch()
  finished_step(1)
  time.sleep(1.0)
  if os.environ["JAX_NUM_PROCESSES"] == "2":
    if host == "1":
      report_suspect()
    time.sleep(1.0)
    sys.exit(1)
"""


def test_an_elastic_run_leaves_a_suspected_host_out(tmp_path, monkeypatch):
  monkeypatch.setattr("signal.signal", lambda *_: None)  # the agents are threads here
  log, codes = (tmp_path / "log").open("w"), {}
  policy = ElasticPolicy(2, 1, 60, 3)

  def run(host):
    agent = Agent([sys.executable, "-c", WORKER], [str(tmp_path)], host, policy, tmp_path / "members", out=log)
    codes[host] = agent.run()

  threads = [threading.Thread(target=run, args=(host,), daemon=True) for host in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=120)
  said = Path(log.name).read_text()
  assert "host 1 is suspected: its devices are wrong" in said, said
  assert "Going on with 1 of 2 hosts: 0" in said
  assert codes == {0: 0, 1: 0}
  assert sorted(path.name for path in tmp_path.glob("start-*")) == ["start-0-of-1", "start-0-of-2", "start-1-of-2"]
