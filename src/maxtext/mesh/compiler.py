"""Compiler options for each chip, and why they are set."""

import os
from collections.abc import Mapping

import jax

from maxtext.mesh.chips import CHIPS, find_chip

Options = Mapping[str, str | bool]

# Gathers of weights and reductions of gradients overlap with matmuls. By default the compiler makes those in the loop
# over layers synchronous, and a step waits for every byte.
_OVERLAPPED: Options = {
  "xla_enable_async_all_gather": True,  # a gather is split into a start and a done
  "xla_tpu_enable_async_collective_fusion": True,  # matmuls may run between the two
  "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,  # also those of gathers
  "xla_tpu_enable_async_collective_fusion_multiple_steps": True,  # and a gather may last through several of them
  "xla_enable_async_all_reduce": True,  # the same for reductions
  "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
  "xla_tpu_overlap_compute_collective_tc": True,  # the core that computes also moves data that arrives
  # No windowed einsum: matmuls of parts of weights need activations copied into other layouts.
  "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}

# What NVIDIA's published runs of JAX set. XLA's own matmul kernels need blocks that were tried on a GPU; the compiler
# takes small ones where it has none.
_NVIDIA: Options = {
  "xla_gpu_enable_latency_hiding_scheduler": True,
  "xla_gpu_enable_triton_gemm": False,
}

_OPTIONS: Mapping[str, Options] = {
  "v4": _OVERLAPPED,
  "v5e": _OVERLAPPED,
  "v5p": _OVERLAPPED,
  "v6e": _OVERLAPPED,
  "tpu7x": _OVERLAPPED,
  "a100": _NVIDIA,
  "h100": _NVIDIA,
  "h200": _NVIDIA,
  "b200": _NVIDIA,
}

# Environment variables in which users set compiler flags.
FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def compiler_options(device: jax.Device, flags: str = "") -> dict[str, str | bool]:
  """Compiler options for programs on devices like this one.

  Args:
    device: a device of the program.
    flags: more options, as `--name=value` separated by spaces. They override the table; the environment does too.
  """
  chip = find_chip(device.device_kind)
  options = next((options for name, options in _OPTIONS.items() if CHIPS[name] is chip), {})
  elsewhere = {name for variable in FLAG_VARIABLES for name in _flags(os.environ.get(variable, ""))}
  own: dict[str, str | bool] = {**_flags(flags)}
  if device.platform == "gpu":  # its compiler takes booleans as such alone
    own = {name: {"true": True, "false": False}.get(value.lower(), value) for name, value in _flags(flags).items()}
  return {name: value for name, value in options.items() if name not in elsewhere} | own


def _flags(text: str) -> dict[str, str]:
  return dict(word.removeprefix("--").partition("=")[::2] for word in text.split())
