"""Joining the processes of one run."""

import itertools
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # JAX has no other way to its coordinator
from jax.experimental import multihost_utils

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.distributed.cluster import find_cluster
from maxtext.distributed.hosts import ALL_HOSTS
from maxtext.distributed.peers import JAX_LOST_SECONDS, watch_peers
from maxtext.distributed.rendezvous import missing_processes

INIT_FILE = "jax-init-info.txt"
_USED = itertools.count()
_GATHERED = 1 << 28  # bytes that a device holds at once of what is gathered
_LEAST_PIECE = 1 << 16
_PATIENCE = 3600  # seconds for the slowest process to come; one that has ended is found by its heartbeat


def join(config: MaxTextConfig) -> None:
  """Starts `jax.distributed` for a run of several processes; does nothing for one process.

  Processes that were started by hand or by `maxtext launch` find the address of process 0 in the environment. With
  local checkpoints the orchestrator assigns the process indices, so that a machine gets its own shards again, and
  writes them to a file there. Otherwise JAX's cluster detection decides (`cluster.py`). Then the processes watch each
  other (`peers.py`).
  """
  if config.skip_jax_distributed_system or jax.distributed.is_initialized():
    return
  _join(config)
  watch_peers()


def _join(config: MaxTextConfig) -> None:
  seconds, env = config.jax_distributed_initialization_timeout, os.environ
  if not config.enable_checkpointing:  # it would hold back SIGTERM for a save that never comes
    jax.config.update("jax_enable_preemption_service", False)
  if "JAX_COORDINATOR_ADDRESS" in env:
    _join_by_address(env["JAX_COORDINATOR_ADDRESS"], _read_number("JAX_PROCESS_ID"), seconds)
    return
  cluster = config.hardware == "gpu_multiprocess" or find_cluster() is not None
  if config.enable_emergency_checkpoint and (cluster or "JAX_NUM_PROCESSES" in env):
    index, address = _read_init_file(Path(config.local_checkpoint_directory) / INIT_FILE, seconds)
    if "JAX_NUM_PROCESSES" in env:
      _join_by_address(address, index, seconds)
    else:
      jax.distributed.initialize(
        address, process_id=index, initialization_timeout=seconds, heartbeat_timeout_seconds=JAX_LOST_SECONDS
      )
  elif cluster:
    _join_by_detection(config)


def check_joined(config: MaxTextConfig) -> None:
  """Raises `ConfigError` where hosts of a TPU pod see each other's chips but did not start `jax.distributed`."""
  if jax.process_count() > 1 and not jax.distributed.is_initialized():
    raise ConfigError(
      f"skip_jax_distributed_system={str(config.skip_jax_distributed_system).lower()}, and this is one of "
      f"{jax.process_count()} processes that were not joined: leave it out, or set JAX_COORDINATOR_ADDRESS, "
      f"JAX_NUM_PROCESSES and JAX_PROCESS_ID for each of them."
    )


def broadcast_from_first(text: str) -> str:
  """The text of process 0, on every process."""
  return broadcast_from(0, text.encode()).decode()


def broadcast_from(index: int, data: bytes) -> bytes:
  """The bytes of one process, on every process; the `data` of the others is ignored."""
  source = jax.process_index() == index
  size = int(multihost_utils.broadcast_one_to_all(np.array(len(data)), is_source=source))
  array = np.frombuffer(data, np.uint8) if source else np.zeros(size, np.uint8)
  return multihost_utils.broadcast_one_to_all(array, is_source=source).tobytes()


def gather_bytes(own: bytes, sizes: Sequence[int]) -> list[bytes]:
  """The bytes of every process, on every process, through the devices and a piece at a time.

  Args:
    own: of this process.
    sizes: of each process, which all of them know.
  """
  count = jax.process_count()
  assert len(own) == sizes[jax.process_index()], "a process has other bytes than the others expect"
  if count == 1:
    return [own]
  coordinator_client().wait_at_barrier(unique_name("gather"), timeout_in_ms=_PATIENCE * 1000)
  # In sizes that come again, for which nothing is compiled anew.
  size = min(max(1 << (max(sizes) - 1).bit_length(), _LEAST_PIECE), max(_GATHERED // count, _LEAST_PIECE))
  found: list[list[bytes]] = [[] for _ in sizes]
  for first in range(0, max(sizes), size):
    piece = np.zeros(size, np.uint8)
    part = np.frombuffer(own[first : first + size], np.uint8)
    piece[: len(part)] = part
    for parts, whole, gathered in zip(found, sizes, multihost_utils.process_allgather(piece), strict=True):
      parts.append(gathered[: max(whole - first, 0)].tobytes())
  return [b"".join(parts) for parts in found]


def any_process(value: bool) -> bool:
  """Whether the value is true on any process; all processes must call it."""
  return bool(np.any(multihost_utils.process_allgather(np.array(value)))) if jax.process_count() > 1 else value


def process_folder(all_processes: bool) -> str:
  """The name of this process's own subfolder if all processes write, else an empty string."""
  return f"process_{jax.process_index()}" if all_processes else ""


def coordinator_client() -> Any:
  """The client of the coordinator's key-value store."""
  client = distributed.global_state.client
  assert client is not None
  return client


def unique_name(name: str) -> str:
  """A name that was not used with the coordinator before. All processes must call it in the same order."""
  return f"maxtext/{name}/{next(_USED)}"


def gather_problems(name: str, own: str, seconds: float) -> dict[int, str]:
  """The problems of all processes, by process index; waits until every process has called it.

  It uses the coordinator and not the devices, so threads other than the training loop may call it.

  Args:
    name: from `unique_name`.
    own: the problem of this process; '' is none.
    seconds: the time limit for the slowest process.
  """
  if jax.process_count() == 1:
    return {0: own} if own else {}
  client = coordinator_client()
  if own:
    client.key_value_set(f"{name}/{jax.process_index()}", own)
  client.wait_at_barrier(name, timeout_in_ms=int(seconds * 1000))
  return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(f"{name}/")}


def _join_by_address(address: str, index: int, seconds: int) -> None:
  count = _read_number("JAX_NUM_PROCESSES")
  if missing := missing_processes(address, count, index, seconds):
    # The agents of an elastic run have started every process: one that is missing is lost, which is nobody's mistake.
    raise (RunError if ALL_HOSTS in os.environ else ConfigError)(
      f"Process {index} of {count} waited {seconds} s at {address} for process {', '.join(map(str, missing))}. "
      f"See that every process is started, or raise jax_distributed_initialization_timeout={seconds}."
    )
  jax.distributed.initialize(
    address,
    num_processes=count,
    process_id=index,
    initialization_timeout=seconds,
    heartbeat_timeout_seconds=JAX_LOST_SECONDS,
  )


def _join_by_detection(config: MaxTextConfig) -> None:
  try:
    jax.distributed.initialize(
      initialization_timeout=config.jax_distributed_initialization_timeout, heartbeat_timeout_seconds=JAX_LOST_SECONDS
    )
  except ValueError as error:
    raise ConfigError(
      f"hardware={config.hardware}, but JAX finds no cluster here that it can join ({error}) Start the run with Slurm, "
      f"Open MPI or as a Kubernetes job, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
    ) from None


def _read_init_file(file: Path, seconds: int) -> tuple[int, str]:
  """The process index and the coordinator's address, a line each, once the file is complete."""
  deadline, text = time.monotonic() + seconds, ""
  while True:
    with suppress(FileNotFoundError):
      text = file.read_text()
    if found := re.fullmatch(r"(\d+)\s*\n(\S+:\d+)\s*\n?", text):
      return int(found[1]), found[2]
    if time.monotonic() > deadline:
      break
    time.sleep(0.1)
  holds = f"holds {text!r}" if text else "is not there"
  raise ConfigError(
    f"{file} {holds} after {seconds} s. The orchestrator writes there the number of this process and, below it, "
    f"the coordinator as host:port. Without one, set JAX_COORDINATOR_ADDRESS; else raise "
    f"jax_distributed_initialization_timeout={seconds}."
  )


def _read_number(name: str) -> int:
  text = os.environ.get(name, "")
  if not text.isdigit():
    raise ConfigError(f"{name}={text!r} in the environment must be a number, for a run of several processes.")
  return int(text)
