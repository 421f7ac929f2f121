"""Joining the processes of one run."""

import os

import jax

from maxtext.configs import MaxTextConfig


def join(config: MaxTextConfig) -> None:
  """Starts `jax.distributed` when the environment names a coordinator; alone, it does nothing."""
  address = os.environ.get("JAX_COORDINATOR_ADDRESS")
  if not address or jax.distributed.is_initialized():
    return
  jax.distributed.initialize(
    address,
    num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
    process_id=int(os.environ["JAX_PROCESS_ID"]),
    initialization_timeout=config.jax_distributed_initialization_timeout,
  )
