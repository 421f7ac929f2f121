"""Joining the processes of one run."""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.mesh.roll_call import missing_processes


def join(config: MaxTextConfig) -> None:
  """Starts `jax.distributed` where the run has several processes; alone, it does nothing.

  Processes that someone started by hand, or `maxtext launch`, are told by the environment where the first one listens.
  On GPU clusters (`hardware=gpu_multiprocess`) and on TPU pods JAX asks the scheduler or the metadata server itself.
  """
  if config.skip_jax_distributed_system or jax.distributed.is_initialized():
    return
  seconds = config.jax_distributed_initialization_timeout
  if "JAX_COORDINATOR_ADDRESS" in os.environ:
    _join_by_address(os.environ["JAX_COORDINATOR_ADDRESS"], seconds)
  elif config.hardware == "gpu_multiprocess" or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ or _pod_workers() > 1:
    jax.distributed.initialize(initialization_timeout=seconds)


def from_first(text: str) -> str:
  """What process 0 says, on every process."""
  if jax.process_count() == 1:
    return text
  letters = np.zeros(1024, np.uint8)
  encoded = text.encode()[: len(letters)]
  letters[: len(encoded)] = list(encoded)
  return bytes(multihost_utils.broadcast_one_to_all(letters)).rstrip(b"\0").decode()


def on_any(so: bool) -> bool:
  """Whether it is so on any process; all must ask."""
  return bool(np.any(multihost_utils.process_allgather(np.array(so)))) if jax.process_count() > 1 else so


def _join_by_address(address: str, seconds: int) -> None:
  count, index = _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID")
  if missing := missing_processes(address, count, index, seconds):
    raise ConfigError(
      f"Process {index} of {count} waited {seconds} s at {address} for process {', '.join(map(str, missing))}. "
      f"See that every process is started, or raise jax_distributed_initialization_timeout={seconds}."
    )
  jax.distributed.initialize(address, num_processes=count, process_id=index, initialization_timeout=seconds)


def _pod_workers() -> int:
  return len([host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host])


def _number(name: str) -> int:
  text = os.environ.get(name, "")
  if not text.isdigit():
    raise ConfigError(f"{name}={text!r} in the environment must be a number where JAX_COORDINATOR_ADDRESS is set.")
  return int(text)
