"""Which processes join a cluster, by the variables that schedulers set, and processes that do."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from maxtext.distributed import rendezvous
from maxtext.distributed.rendezvous import missing_processes
from tests.flags import flags
from tests.support import TINY

SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0",
         "SLURM_LOCALID": "0"}  # fmt: skip
OMPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}  # fmt: skip
NOTEBOOK = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}

# The variables of an environment, and the detector of JAX's that is to be taken there.
ENVIRONMENTS = {
  "nothing": ({}, None),
  "srun": (SLURM, "SlurmCluster"),
  "srun of one": (SLURM | {"SLURM_NTASKS": "1"}, None),
  "a shell in an allocation of Slurm": (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
  "a batch script of Slurm": ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),
  "mpirun": (OMPI, "OmpiCluster"),
  "mpirun of one": (OMPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
  "a notebook's pod": (NOTEBOOK, None),
  "a pod of an indexed job": (NOTEBOOK | {"JOB_COMPLETION_INDEX": "0"}, "K8sCluster"),
  "GKE by hostnames": ({"TPU_WORKER_HOSTNAMES": "a,b"}, "GkeTpuCluster"),
  "GKE by addresses": ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, "GkeTpuCluster"),
  "GKE with one host": ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
  "slices of one host": ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_COORDINATOR_ADDRESS": "a"}, "GkeTpuCluster"),
  "GKE, but on its CPUs": ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
  "GCE": ({"GCE_METADATA_IP": "pod 2 0"}, "GceTpuCluster"),
  "a TPU host without a metadata server": ({"GCE_METADATA_IP": "127.0.0.1:9"}, None),
  "GCE with one host": ({"GCE_METADATA_IP": "pod 1 0"}, None),
  "GCE, but on its CPUs": ({"GCE_METADATA_IP": "pod 2 0", "JAX_PLATFORMS": "cpu"}, None),
}  # fmt: skip
ASKS = {
  "GCE",
  "GCE with one host",
  "a TPU host without a metadata server",
}  # nothing else is ever asked

# Without chips JAX behaves as on a TPU host only if it is told to, and then as on GKE, where no metadata is asked for.
TPU_HOST = """
import os, jax
if "GCE_METADATA_IP" in os.environ:
  del os.environ["TPU_SKIP_MDS_QUERY"]
"""

FIND = """
import json, socket, sys
from maxtext.distributed.cluster import find_cluster
asked, connect, found = [], socket.socket.connect, {}
def told(self, address):
  asked.append(str(address))
  return connect(self, address)
socket.socket.connect = told
before = dict(os.environ)
for name, variables in json.load(sys.stdin).items():
  os.environ |= variables
  if "GCE_METADATA_IP" in variables:
    del os.environ["TPU_SKIP_MDS_QUERY"]
  jax.config.update("jax_platforms", variables.get("JAX_PLATFORMS"))
  asked.clear()
  kind = find_cluster()
  found[name] = [kind and kind.__name__, bool(asked)]
  os.environ.clear()
  os.environ |= before
print(json.dumps(found))
"""

JOIN = """
import sys
from maxtext.distributed.multihost import join
from tests.support import tiny
join(tiny(jax_distributed_initialization_timeout=30))
jax.config.update("jax_platforms", "cpu")
print("joined", jax.process_index(), jax.process_count(), flush=True)
jax.distributed.shutdown()
"""


@contextmanager
def metadata_server(hosts: int, index: int):
  """What a TPU host of a GCE pod is told; yields where."""
  values = {"agent-worker-number": str(index), "tpu-env": "NODE_ID: 'x'\n",
            "worker-network-endpoints": ",".join(["a:b:127.0.0.1"] * hosts)}  # fmt: skip

  class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
      value = values.get(self.path.rpartition("/")[2])
      self.send_response(404 if value is None else 200)
      self.end_headers()
      self.wfile.write((value or "").encode())

    def log_message(self, *args):
      pass

  with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def with_servers(variables: dict[str, str], closing: ExitStack) -> dict[str, str]:
  asked = variables.get("GCE_METADATA_IP", "")
  if not asked.startswith("pod"):
    return variables
  hosts, index = map(int, asked.split()[1:])
  return variables | {"GCE_METADATA_IP": closing.enter_context(metadata_server(hosts, index))}


def environment(**variables: str) -> dict[str, str]:
  """This one's without what would decide by itself, as on a TPU host."""
  kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SLURM_", "OMPI_", "TPU_", "KUBERNETES_"))}
  return kept | flags() | {"JAX_FORCE_TPU_INIT": "1"} | variables


@pytest.fixture(scope="module")
def found(tmp_path_factory):
  """What is found in each environment, in one process; a client of Kubernetes stands in for the one of PyPI."""
  folder = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
  folder.mkdir()
  (folder / "__init__.py").write_text(
    "class Any:\n  def __getattr__(self, name): return Any()\n  def __call__(self): return Any()\n"
    "config = client = Any()\n"
  )
  path = os.pathsep.join([str(folder.parent), *sys.path])
  with ExitStack() as closing:
    asked = {name: with_servers(variables, closing) for name, (variables, _) in ENVIRONMENTS.items()}
    done = subprocess.run(
      [sys.executable, "-c", TPU_HOST + FIND], input=json.dumps(asked), env=environment(PYTHONPATH=path),
      capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_cluster_of_an_environment(found, name):
  cluster, asked = found[name]
  assert cluster == ENVIRONMENTS[name][1]
  assert asked == (name in ASKS), "no network is asked but the metadata server of a TPU host"


def free_port() -> str:
  with socket.create_server(("127.0.0.1", 0)) as probe:
    return str(probe.getsockname()[1])


def run_both(command: list[str], variables: list[dict[str, str]], platforms: dict[str, str]) -> list[str]:
  port = free_port()
  started = [
    subprocess.Popen(
      command, env=environment(**own, **platforms, JAX_COORDINATOR_PORT=port), stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, text=True,
    )
    for own in variables
  ]  # fmt: skip
  try:
    said = [process.communicate(timeout=300)[0] for process in started]
  finally:
    for process in started:
      process.kill()
  assert [process.returncode for process in started] == [0, 0], said
  return said


@pytest.mark.mesh
@pytest.mark.parametrize("kind", ["ompi", "gce"])
def test_two_processes_join(kind):
  with ExitStack() as closing:
    variables = {
      "ompi": lambda i: OMPI | {"OMPI_COMM_WORLD_RANK": str(i)},
      "gce": lambda i: with_servers({"GCE_METADATA_IP": f"pod 2 {i}"}, closing),
    }[kind]
    said = run_both([sys.executable, "-c", TPU_HOST + JOIN], [variables(0), variables(1)], {})
  assert [text.splitlines()[-1] for text in said] == ["joined 0 2", "joined 1 2"]


@pytest.mark.mesh
@pytest.mark.slow
def test_two_processes_of_slurm_train_and_save(tmp_path):
  keys = TINY | {"steps": 2, "per_device_batch_size": 2, "enable_checkpointing": True, "run_name": "run",
                 "base_output_directory": tmp_path, "base_num_decoder_layers": 1,
                 "enable_tensorboard": False}  # fmt: skip
  command = [sys.executable, "-m", "maxtext.cli", "train", *(f"{key}={value}" for key, value in keys.items())]
  variables = [SLURM | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
  said = run_both(command, variables, {"JAX_PLATFORMS": "cpu"})
  assert "on 2 cpu" in said[0]
  assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


def test_several_processes_of_gpus_without_a_cluster_are_a_mistake():
  command = [sys.executable, "-m", "maxtext.cli", "train", "small-llama", "hardware=gpu_multiprocess"]
  done = subprocess.run(command, env=os.environ | flags(), capture_output=True, text=True, check=False)
  assert done.returncode == 2
  assert "hardware=gpu_multiprocess, but JAX finds no cluster here" in done.stderr


def test_strangers_at_the_rendezvous_keep_nobody_waiting():
  """A scanner that connects and says nothing, one that says something else, and a process that has gone."""
  where, found = ("127.0.0.1", int(free_port())), {}
  address = f"127.0.0.1:{where[1]}"

  def join(index):
    found[index] = missing_processes(address, 3, index, 30.0)

  first = Thread(target=join, args=(0,))
  first.start()
  with ExitStack() as closing:
    for text in (b"", b"7\n", b"0\n", b"GET / HTTP/1.1\r\n" * 100, b"1\n"):
      while True:
        with suppress(ConnectionRefusedError):
          stranger = closing.enter_context(socket.create_connection(where))
          break
      stranger.sendall(text)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    began = time.monotonic()
    others = [Thread(target=join, args=(index,)) for index in (1, 2)]
    for thread in others:
      thread.start()
    for thread in (first, *others):
      thread.join(timeout=60)
  assert found == {0: [], 1: [], 2: []}
  assert time.monotonic() - began < 10


def test_a_coordinator_that_accepts_and_never_answers_is_named(monkeypatch):
  monkeypatch.setattr(rendezvous, "_LATER_SECONDS", 0.5)
  with socket.create_server(("127.0.0.1", 0)) as silent:
    assert missing_processes(f"127.0.0.1:{silent.getsockname()[1]}", 3, 1, 0.5) == [0]
