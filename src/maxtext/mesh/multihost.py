"""Joining the processes of one run."""

import os

import jax

from maxtext.configs import ConfigError, MaxTextConfig


def join(config: MaxTextConfig) -> None:
  """Starts `jax.distributed` when the environment names a coordinator; alone, it does nothing."""
  address = os.environ.get("JAX_COORDINATOR_ADDRESS")
  if not address or jax.distributed.is_initialized():
    return
  jax.distributed.initialize(
    address,
    num_processes=_number("JAX_NUM_PROCESSES"),
    process_id=_number("JAX_PROCESS_ID"),
    initialization_timeout=config.jax_distributed_initialization_timeout,
  )


def _number(name: str) -> int:
  text = os.environ.get(name, "")
  if not text.isdigit():
    raise ConfigError(f"{name}={text!r} in the environment must be a number where JAX_COORDINATOR_ADDRESS is set.")
  return int(text)
