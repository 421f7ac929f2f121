"""Descriptions of GPUs for XLA's CUDA compiler, which asks the driver for them where there is a GPU.

The numbers are facts: limits of a compute capability from NVIDIA's CUDA programming guide, counts and sizes of a chip
from its data sheet and from the configurations that XLA publishes (`xla/backends/gpu/target_config/specs`). The text is
written here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from maxtext.mesh.chips import CHIPS


@dataclass(frozen=True)
class _GpuTarget:
  """What the compiler asks of a GPU beside `Chip`.

  Attributes:
    name: of the device.
    capability: major number of the compute capability.
    cores: streaming multiprocessors.
    fpus: units for float32 in each of them.
    shared_memory: bytes in each of them; a block may have all but 1 KiB.
    l2_cache: bytes.
    links: NVLinks.
  """

  name: str
  capability: int
  cores: int
  fpus: int
  shared_memory: int
  l2_cache: int
  links: int


_GPU_TARGETS: Mapping[str, _GpuTarget] = {
  "a100": _GpuTarget("NVIDIA A100-SXM4-80GB", 8, 108, 64, 164 * 1024, 40 * 2**20, 12),
  "h100": _GpuTarget("NVIDIA H100 80GB HBM3", 9, 132, 128, 228 * 1024, 50 * 2**20, 18),
  "h200": _GpuTarget("NVIDIA H200", 9, 132, 128, 228 * 1024, 50 * 2**20, 18),
  "b200": _GpuTarget("NVIDIA B200", 10, 148, 128, 228 * 1024, 132_644_864, 18),
}
_SPECIAL_INSTRUCTIONS = 9  # capabilities from here on have instructions of their own ("sm_90a"), which matmuls use
_TOOLKIT = "13.0.0"  # without a version the compiler takes no float8 matmuls of cuBLAS
_CUDNN = (9, 10)


def target_config(name: str) -> str:
  """The description of a GPU of `CHIPS`, as the compiler's option `target_config` takes it."""
  chip, target = CHIPS[name], _GPU_TARGETS[name]
  special = "ACCELERATED_FEATURES" if target.capability >= _SPECIAL_INSTRUCTIONS else "NONE"
  major, minor = _CUDNN
  return f"""
gpu_device_info {{
  name: "{target.name}"
  cuda_compute_capability {{ major: {target.capability} feature_extension: {special} }}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_block_optin: {target.shared_memory - 1024}
  shared_memory_per_core: {target.shared_memory}
  core_count: {target.cores}
  fpus_per_core: {target.fpus}
  clock_rate_ghz: {chip.clock / 1e9}
  l2_cache_size: {target.l2_cache}
  memory_bandwidth: {chip.hbm_bandwidth:.0f}
  device_memory_size: {chip.hbm_bytes}
  device_interconnect_info {{ active_links: {target.links} }}
  driver_version: "{_TOOLKIT}"
  runtime_version: "{_TOOLKIT}"
  compile_time_toolkit_version: "{_TOOLKIT}"
  dnn_version: "{major}.{minor}.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {major} minor: {minor} }}
device_description_str: "{target.name}"
"""
