"""Every mesh trains like one device."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import maxtext
from maxtext import ConfigError
from maxtext.distributed.supervisor import supervise
from maxtext.mesh.rules import LOGICAL_AXES
from tests.flags import flags
from tests.support import TINY, losses, program, tiny

pytestmark = pytest.mark.mesh

MAXTEXT = Path(sys.executable).with_name("maxtext")

RUN = {"base_num_decoder_layers": 4, "steps": 20, "learning_rate": 1e-3, "warmup_steps_fraction": 0.1}

MESHES = {
  "optimizer over data 4 x fsdp 2": pytest.param(
    {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 2, "shard_optimizer_over_data": True}, marks=pytest.mark.slow
  ),
  "data 8": pytest.param({"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1}, marks=pytest.mark.slow),
  "fsdp 8": pytest.param({"ici_fsdp_parallelism": 8}, marks=pytest.mark.slow),
  "fsdp 4 x tensor 2": {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
  "tensor 8": pytest.param({"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8}, marks=pytest.mark.slow),
  "fsdp 2 x fsdp_transpose 2 x tensor_sequence 2": pytest.param(
    {"ici_fsdp_parallelism": 2, "ici_fsdp_transpose_parallelism": 2, "ici_tensor_sequence_parallelism": 2},
    marks=pytest.mark.slow,
  ),
  "fsdp 2 x fsdp_transpose 2 x tensor 2": pytest.param(
    {"ici_fsdp_parallelism": 2, "ici_fsdp_transpose_parallelism": 2, "ici_tensor_parallelism": 2},
    marks=pytest.mark.slow,
  ),
  "tensor_sequence 2 x fsdp 4": pytest.param(
    {"ici_fsdp_parallelism": 4, "ici_tensor_sequence_parallelism": 2}, marks=pytest.mark.slow
  ),
  "data 2 x fsdp 2 x tensor 2": pytest.param(
    {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}, marks=pytest.mark.slow
  ),
  "tensor 4 x tensor_transpose 2": pytest.param(
    {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 4, "ici_tensor_transpose_parallelism": 2},
    marks=pytest.mark.slow,
  ),
}


@pytest.fixture(scope="module")
def one_device():
  curve = losses(tiny(**RUN))
  assert curve[-1] < curve[0] - 0.3, "the run must learn, or equal curves say little"
  return curve


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES.keys())
def test_loss_curve(one_device, axes):
  curve = losses(tiny(**RUN, per_device_batch_size=1, **axes), devices=8)
  np.testing.assert_allclose(curve, one_device, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("mode", "kept"), [("auto", 8), ("explicit", 32)])
def test_tokens_between_the_matmuls_are_split_over_tensor(mode, kept):
  """So is what layers keep for the backward pass: [layers, rows, tokens, width]."""
  axes = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4, "shard_mode": mode, "remat_policy": "full"}
  text = program(tiny(**RUN, per_device_batch_size=1, **axes), 8).lower().compile().as_text()
  assert {tokens for tokens in (8, 32) if f"f32[4,4,{tokens},48]" in text} == {kept}


def rules_file(folder, text, axes=("data", "tensor", "fsdp")):
  """A table unlike the base one: fsdp splits what is wide, tensor the residual stream and the vocabulary."""
  named = {"mlp": ["fsdp"], "heads": ["fsdp"], "embed": ["tensor"], "vocab": ["fsdp"],
           "activation_batch": ["data", "fsdp"], "activation_embed_and_logits_batch": ["data", "fsdp"],
           "activation_embed": ["tensor"]}  # fmt: skip
  table = [[name, named.get(name, [])] for name in LOGICAL_AXES]
  file = folder / "mine.yml"
  file.write_text(yaml.safe_dump({"mesh_axes": list(axes), "logical_axis_rules": table}, sort_keys=False) + text)
  return str(file)


@pytest.mark.slow
def test_loss_curve_by_a_table_of_ones_own(one_device, tmp_path):
  axes = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4, "sharding_tolerance": 0.5}
  config = tiny(**RUN, **axes, per_device_batch_size=1, custom_mesh_and_rule=rules_file(tmp_path, ""))
  p = program(config, devices=8)
  assert p.model.execution.sharding.mesh.axis_names == ("data", "tensor", "fsdp")
  query = p.state.params["groups/0/layers/0/mixer/query/weight"]
  assert query.sharding.spec == jax.P(None, "tensor", "fsdp", None)
  np.testing.assert_allclose(losses(config, devices=8), one_device, atol=1e-5, rtol=0)


def test_a_named_table():
  p = program(tiny(custom_mesh_and_rule="fsdp", per_device_batch_size=1), devices=8)
  assert dict(p.model.execution.sharding.mesh.shape) == {"data": 1, "fsdp": 8}
  assert p.state.params["groups/0/layers/0/mixer/query/weight"].sharding.spec == jax.P(None, "fsdp", None, None)


WRONG_TABLES = {
  "axis of the mesh": ({"axes": ("data", "tensr")}, "", "mesh_axes: 'tensr' is not a mesh axis; they are data, stage"),
  "axis of a rule": ({"axes": ("data", "fsdp")}, "", "'tensor' is not a mesh axis. There are data, fsdp."),
  "dimension": ({}, "- [mpl, []]\n", "logical_axis_rules: 'mpl' is not a logical axis. Did you mean 'mlp'?"),
  "key": ({}, "steps: 3\n", "'steps' is none of mesh_axes, logical_axis_rules"),
  "the batch": ({}, "data_sharding: [data]\n", "data_sharding=['data'] is not supported: a batch is sharded by"),
}


@pytest.mark.parametrize(("axes", "text", "message"), WRONG_TABLES.values(), ids=WRONG_TABLES.keys())
def test_mistakes_in_a_table_are_named(tmp_path, axes, text, message):
  with pytest.raises(ConfigError) as error:
    program(tiny(custom_mesh_and_rule=rules_file(tmp_path, text, **axes)))
  assert message in str(error.value)


@pytest.mark.parametrize("name", ["none.yml", "fsdpp"])
def test_tables_that_are_not_there(name):
  with pytest.raises(ConfigError, match=rf"Cannot read {name}: No such file|custom_mesh_and_rule={name}: .* 'fsdp'"):
    tiny(custom_mesh_and_rule=name)


def test_replicas_share_the_optimizers_state():
  axes = {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 2, "per_device_batch_size": 1}
  whole, shared = (
    program(tiny(**axes, shard_optimizer_over_data=shard), devices=8).state.opt_state for shard in (False, True)
  )
  sizes = [
    sum(np.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(state) if a.ndim) for state in (whole, shared)
  ]
  assert sizes[0] == 4 * sizes[1]


@pytest.mark.slow
def test_loss_curve_with_every_head_split():
  """Eight tensor-parallel devices for eight heads; the tiny model's four are replicated there."""
  heads = {"base_num_query_heads": 8, "base_num_kv_heads": 8}
  axes = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8, "per_device_batch_size": 1}
  np.testing.assert_allclose(
    losses(tiny(**RUN, **heads, **axes), devices=8), losses(tiny(**RUN, **heads)), atol=1e-5, rtol=0
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("processes", "devices", "axes"),
  [
    pytest.param(2, 4, {"fsdp": 4, "tensor": 2}, id="2 x 4"),
    pytest.param(4, 2, {"fsdp": 4, "tensor": 2}, id="4 x 2", marks=pytest.mark.nightly),
    pytest.param(2, 4, {"fsdp": 1, "context": 8}, id="2 x 4, rows shared", marks=pytest.mark.nightly),
    pytest.param(2, 4, {"fsdp": 4, "pipeline": 2}, id="2 x 4, layers shared", marks=pytest.mark.nightly),
  ],
)
def test_several_processes(one_device, tmp_path, processes, devices, axes):
  values = TINY | RUN | {"per_device_batch_size": 1} | {f"ici_{axis}_parallelism": n for axis, n in axes.items()}
  values |= {"base_output_directory": tmp_path, "run_name": "run", "metrics_file": tmp_path / "metrics.jsonl"}
  values |= {"profiler": "xplane", "profiler_steps": 1, "upload_all_profiler_results": True}
  values |= {"dump_hlo": True, "dump_hlo_local_dir": tmp_path / "xla", "dump_hlo_upload_all": True}
  done = launch("--processes", processes, "--devices", devices, "--", "train", *(f"{k}={v}" for k, v in values.items()))
  assert done.returncode == 0, done.stdout
  assert all(line.startswith("[") for line in done.stdout.splitlines()), "every line is tagged with its process"
  curve = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  np.testing.assert_allclose(curve, one_device, atol=1e-5, rtol=0)
  for process in range(processes):
    assert any((tmp_path / f"run/profile/process_{process}").rglob("*.xplane.pb"))
    assert any((tmp_path / f"run/xla_dump/process_{process}").glob("*.txt"))


def launch(*words):
  command = [MAXTEXT, "launch", *map(str, words)]
  return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("present", [[0, 2], pytest.param([1, 2], marks=pytest.mark.slow)])
def test_who_is_missing_is_said(present):
  """Three processes are expected, one of them never starts."""
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]

  def start(index):
    env = os.environ | {
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": str(index)
    }  # fmt: skip
    command = [MAXTEXT, "train", "small-llama", "jax_distributed_initialization_timeout=12"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

  workers = [start(index) for index in present]
  absent = ({0, 1, 2} - set(present)).pop()
  for index, worker in zip(present, workers, strict=True):
    output, _ = worker.communicate(timeout=60)
    assert worker.returncode == 2
    assert output.startswith(f"maxtext: Process {index} of 3 waited 12 s at 127.0.0.1:{port} for process {absent}. See")
    assert len(output.splitlines()) == 1


@pytest.mark.chaos
@pytest.mark.slow
def test_a_killed_process_is_named_and_the_run_starts_again(tmp_path):
  file = tmp_path / "metrics.jsonl"
  words = ["--processes", "2", "--restarts", "2", "--stall-timeout", "120", "--", "train", "small-llama", "steps=10",
           "per_device_batch_size=2", f"base_output_directory={tmp_path}",
           f"jax_cache_dir={tmp_path / 'cache'}", f"metrics_file={file}"]  # fmt: skip
  command = [MAXTEXT, "launch", *words]
  env = os.environ | flags()
  with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
    seen = []
    for line in process.stdout:
      seen.append(line)
      if "step  3/10" in line and not any("SIGKILL" in s for s in seen):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        killed = time.monotonic()
      if "was killed by SIGKILL" in line:
        assert time.monotonic() - killed < 15
  output = "".join(seen)
  assert process.returncode == 0, output
  assert re.search(
    r"maxtext: process 1 was killed by SIGKILL\.\nmaxtext: starting all 2 again in \S+ s \(1 of 2\)\.\n", output
  )
  steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
  assert steps == list(range(1, 11)), "what the lost attempt wrote is written again, and stands there once"


@pytest.mark.nightly
@pytest.mark.chaos
@pytest.mark.slow
def test_processes_that_stand_still_show_where_and_start_again(tmp_path):
  script = """if True:
    import os, pathlib, sys, time
    def waits_for_ever():
      time.sleep(600)
    own = pathlib.Path(sys.argv[1]) / os.environ["JAX_PROCESS_ID"]
    if not own.exists():
      own.touch()
      waits_for_ever()
  """
  said, command = io.StringIO(), [sys.executable, "-S", "-c", script, str(tmp_path)]  # starts within a fraction of 5 s
  with ThreadPoolExecutor(1) as thread:  # the supervisor would take SIGTERM from the main one
    assert thread.submit(supervise, command, 2, restarts=1, stall_timeout=5, out=said).result() == 0
  for process in range(2):
    assert re.search(rf"\[{process}\]   File .* in waits_for_ever\n", said.getvalue())
  assert re.search(
    r"maxtext: no process has written anything for 5 s; their stack traces are above\.\n"
    r"maxtext: starting all 2 again in \S+ s \(1 of 1\)\.\n$",
    said.getvalue(),
  )


def test_processes_go_on_when_nobody_reads_what_they_say():
  class Gone(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

  class Ascii(io.TextIOWrapper):
    def __init__(self):
      super().__init__(io.BytesIO(), encoding="ascii")

  odd = r"b'neither UTF-8 \xe9 nor ASCII \xc3\xa9\n'"
  says = f"import os; os.write(1, {odd}); print('more than a pipe holds\\n' * 20000, flush=True); os._exit(3)"
  codes = []

  def supervised(out):
    codes.append(supervise([sys.executable, "-c", says], 1, restarts=1, stall_timeout=30, out=out))

  for out in (Gone(), Ascii()):
    thread = threading.Thread(target=supervised, args=[out], daemon=True)  # one that hangs is not waited for
    thread.start()
    thread.join(60)
  assert codes == [1, 1], "each was started again, and ended"
  assert out.buffer.getvalue().count(b"ended with code 3") == 2


@pytest.mark.slow
def test_the_coordinator_listens_to_this_machine_alone():
  """JAX by itself listens on every address."""
  script = """if True:
    import os, jax
    from pathlib import Path
    address, number = os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(address, num_processes=1, process_id=number)
    port = f":{int(address.rpartition(':')[2]):04X} "
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    print("listens on", [line.split()[1] for line in lines if port in line and line.split()[3] == "0A"])
  """
  said = io.StringIO()
  with ThreadPoolExecutor(1) as thread:  # the supervisor would take SIGTERM from the main one
    assert thread.submit(supervise, [sys.executable, "-c", script], 1, out=said).result() == 0, said.getvalue()
  (found,) = re.findall(r"listens on \['([0-9A-F]+):[0-9A-F]+'\]", said.getvalue())
  assert found in ("0100007F", "0000000000000000FFFF00000100007F"), "127.0.0.1, as it is or mapped"


@pytest.mark.slow
def test_two_simulated_slices(one_device):
  axes = {"num_slices": 2, "dcn_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
  config = tiny(**RUN, per_device_batch_size=1, **axes)
  mesh = program(config, devices=8).model.execution.sharding.mesh
  first_slice = {d.id for d in mesh.devices.reshape(2, 4)[0]}
  assert first_slice == {0, 1, 2, 3}, "data steps over slices, the rest stays within one"
  np.testing.assert_allclose(losses(config, devices=8), one_device, atol=1e-5, rtol=0)
  both = tiny(num_slices=2, dcn_data_parallelism=1, dcn_fsdp_parallelism=2, ici_fsdp_parallelism=4)
  ids = [d.id for d in program(both, devices=8).model.execution.sharding.mesh.devices.flat]
  assert ids == list(range(8))
  with pytest.raises(ConfigError, match="num_slices=3 does not fit 8 devices in 1 slices"):
    program(tiny(num_slices=3), devices=8)


def test_parameters_that_stay_whole_are_refused():
  config = tiny(ici_tensor_parallelism=8, ici_fsdp_parallelism=1, per_device_batch_size=1, steps=1)
  with pytest.raises(
    ConfigError, match=r"sharding_tolerance=0\.02, but \d+% of the parameters stay whole .*query/weight"
  ):
    maxtext.train(config)


def test_debug_sharding_shows_every_parameter(capsys):
  keys = {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 4, "per_device_batch_size": 1, "steps": 1}
  maxtext.train(tiny(debug_sharding=True, **keys))
  shown = capsys.readouterr().out
  assert "mixer/query/weight" in shown
  query = next(line for line in shown.splitlines() if "mixer/query/weight" in line)
  assert query.split()[-5:] == ["-,", "fsdp,", "tensor,", "-", "1,536"]


def test_parameters_and_optimizer_are_split():
  p = program(tiny(ici_fsdp_parallelism=4, ici_tensor_parallelism=2, per_device_batch_size=1), devices=8)
  state = p.init()
  query = "groups/0/layers/0/mixer/query/weight"
  moments = [x for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state) if query in str(path)]
  for array in (state.params[query], *moments):
    assert array.addressable_shards[0].data.size == array.size // 8
  assert len(moments) == 2


def test_initial_weights_do_not_depend_on_mesh_or_scan():
  one = program(tiny()).init().params
  for config, devices in (
    (tiny(scan_layers=False), 1),
    (tiny(ici_fsdp_parallelism=4, ici_tensor_parallelism=2, per_device_batch_size=1), 8),
    (tiny(ici_tensor_parallelism=8, ici_fsdp_parallelism=1, per_device_batch_size=1), 8),
  ):
    other = program(config, devices).init().params
    assert other.keys() == one.keys()
    for name in one:
      np.testing.assert_array_equal(one[name], other[name], err_msg=name)
