"""Joining the processes of one run."""

import itertools
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # JAX has no other way to its coordinator
from jax.experimental import multihost_utils

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.distributed.cluster import find_cluster
from maxtext.distributed.rendezvous import missing_processes

INIT_FILE = "jax-init-info.txt"
_USED = itertools.count()


def join(config: MaxTextConfig) -> None:
  """Starts `jax.distributed` where the run has several processes; alone, it does nothing.

  Processes that someone started by hand, or `maxtext launch`, are told by the environment where the first one listens.
  With a local tier of checkpoints the orchestrator deals the numbers, so that a machine gets its own parts again, and
  leaves them in a file there. Else JAX's own detection of clusters decides (`cluster.py`).
  """
  if config.skip_jax_distributed_system or jax.distributed.is_initialized():
    return
  seconds, env = config.jax_distributed_initialization_timeout, os.environ
  if not config.enable_checkpointing:  # it would keep SIGTERM for a save that never comes
    jax.config.update("jax_enable_preemption_service", False)
  if "JAX_COORDINATOR_ADDRESS" in env:
    _join_by_address(env["JAX_COORDINATOR_ADDRESS"], _number("JAX_PROCESS_ID"), seconds)
    return
  cluster = config.hardware == "gpu_multiprocess" or find_cluster() is not None
  if config.enable_emergency_checkpoint and (cluster or "JAX_NUM_PROCESSES" in env):
    index, address = _told_by_file(Path(config.local_checkpoint_directory) / INIT_FILE, seconds)
    if "JAX_NUM_PROCESSES" in env:
      _join_by_address(address, index, seconds)
    else:
      jax.distributed.initialize(address, process_id=index, initialization_timeout=seconds)
  elif cluster:
    _join_by_detection(config)


def refuse_unjoined(config: MaxTextConfig) -> None:
  """TPU hosts of a pod see each other's chips without `jax.distributed`, but cannot agree on anything."""
  if jax.process_count() > 1 and not jax.distributed.is_initialized():
    raise ConfigError(
      f"skip_jax_distributed_system={str(config.skip_jax_distributed_system).lower()}, and this is one of "
      f"{jax.process_count()} processes that were not joined: leave it out, or set JAX_COORDINATOR_ADDRESS, "
      f"JAX_NUM_PROCESSES and JAX_PROCESS_ID for each of them."
    )


def from_first(text: str) -> str:
  """What process 0 says, on every process."""
  return from_process(0, text.encode()).decode()


def from_process(index: int, data: bytes) -> bytes:
  """What one process has, on every process; what the others hand over does not matter."""
  source = jax.process_index() == index
  size = int(multihost_utils.broadcast_one_to_all(np.array(len(data)), is_source=source))
  letters = np.frombuffer(data, np.uint8) if source else np.zeros(size, np.uint8)
  return multihost_utils.broadcast_one_to_all(letters, is_source=source).tobytes()


def on_any(so: bool) -> bool:
  """Whether it is so on any process; all must ask."""
  return bool(np.any(multihost_utils.process_allgather(np.array(so)))) if jax.process_count() > 1 else so


def of_process(all_of_them: bool) -> str:
  """A folder of its own for each process, where all of them write."""
  return f"process_{jax.process_index()}" if all_of_them else ""


def coordinator() -> Any:
  """The client of the key-value store that all processes share."""
  client = distributed.global_state.client
  assert client is not None
  return client


def once(name: str) -> str:
  """A name for the coordinator that was not used before, as it must be; every process asks in the same order."""
  return f"maxtext/{name}/{next(_USED)}"


def problems_of_all(name: str, own: str, seconds: float) -> dict[int, str]:
  """What went wrong on which process, once all have said so under a name that is used once; '' is that nothing did.

  It goes through the coordinator and not through the devices, so threads beside the loop may ask.
  """
  if jax.process_count() == 1:
    return {0: own} if own else {}
  client = coordinator()
  if own:
    client.key_value_set(f"{name}/{jax.process_index()}", own)
  client.wait_at_barrier(name, timeout_in_ms=int(seconds * 1000))
  return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(f"{name}/")}


def _join_by_address(address: str, index: int, seconds: int) -> None:
  count = _number("JAX_NUM_PROCESSES")
  if missing := missing_processes(address, count, index, seconds):
    raise ConfigError(
      f"Process {index} of {count} waited {seconds} s at {address} for process {', '.join(map(str, missing))}. "
      f"See that every process is started, or raise jax_distributed_initialization_timeout={seconds}."
    )
  jax.distributed.initialize(address, num_processes=count, process_id=index, initialization_timeout=seconds)


def _join_by_detection(config: MaxTextConfig) -> None:
  try:
    jax.distributed.initialize(initialization_timeout=config.jax_distributed_initialization_timeout)
  except ValueError as error:
    raise ConfigError(
      f"hardware={config.hardware}, but JAX finds no cluster here that it can join ({error}) Start the run with Slurm, "
      f"Open MPI or as a Kubernetes job, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
    ) from None


def _told_by_file(file: Path, seconds: int) -> tuple[int, str]:
  """The number of this process and the coordinator's address, a line each, once the file is there and whole."""
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


def _number(name: str) -> int:
  text = os.environ.get(name, "")
  if not text.isdigit():
    raise ConfigError(f"{name}={text!r} in the environment must be a number, for a run of several processes.")
  return int(text)
