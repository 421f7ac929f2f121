"""A run of two steps in the current folder, as words of a command."""

from tests.support import TINY

KEYS = TINY | {"per_device_batch_size": 1, "steps": 2, "base_output_directory": "runs", "enable_tensorboard": False}


def words(**changes):
  return [f"{key}={value}" for key, value in (KEYS | changes).items()]
