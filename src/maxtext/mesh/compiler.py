"""What the compiler is told for each chip, beside the program, and why."""

from collections.abc import Mapping

import jax

_OVERLAPPED: Mapping[str, bool] = {
  # Gathers and reductions of weights run beside products instead of before and after them. Without these, those in
  # the loop over layers are synchronous, and a step waits for every byte.
  "xla_tpu_enable_async_collective_fusion": True,
  "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
  "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
  "xla_tpu_overlap_compute_collective_tc": True,
  "xla_enable_async_all_gather": True,
}

# By platform and the beginning of a device's kind; all TPUs so far want the same.
_OPTIONS: Mapping[str, Mapping[str, bool]] = {"tpu": _OVERLAPPED}


def compiler_options(device: jax.Device) -> dict[str, str | bool]:
  """For programs that run on devices like this one."""
  return dict(_OPTIONS.get(device.platform, {}))
