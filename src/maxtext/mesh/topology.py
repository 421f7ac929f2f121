"""Named topologies, to compile for hardware that is not here, and to estimate where there is no compiler."""

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import jax
from jax.experimental import topologies

from maxtext.configs.errors import ConfigError
from maxtext.mesh.chips import CHIPS, Chip
from maxtext.mesh.gpu_target import target_config


@dataclass(frozen=True)
class _Generation:
  """The torus of a TPU generation, and how its topologies are named."""

  cores_in_name: int  # what the number in 'v5p-128' counts, per chip
  dims: int  # dimensions of its torus
  config_name: str = "default"


@dataclass(frozen=True)
class DeviceDescription:
  """A GPU that is not here: enough to lay out arrays, not to compile."""

  id: int
  device_kind: str
  process_index: int
  platform: str = "gpu"


_NODE = 8  # GPUs that NVLink connects
_TPUS_OF_HOST = 4
_GPUS = tuple(name for name, chip in CHIPS.items() if chip.kind.startswith("NVIDIA"))
_GENERATIONS = {
  "v4": _Generation(2, 3, "megacore"),
  "v5e": _Generation(1, 2),
  "v5p": _Generation(2, 3),
  "v6e": _Generation(1, 2),
  "tpu7x": _Generation(2, 3),
}

# The compiler's library looks for a TPU's metadata server and complains at length where there is none.
_COMPILER_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
}

_SHAPES: dict[int, dict[int, tuple[int, ...]]] = {
  2: {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)},
  3: {
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
    64: (4, 4, 4),
    128: (4, 4, 8),
    256: (4, 8, 8),
    512: (8, 8, 8),
    1024: (8, 8, 16),
    2048: (8, 16, 16),
    4096: (16, 16, 16),
    8960: (16, 20, 28),
  },
}


@dataclass(frozen=True)
class Topology:
  """One or more slices of the same shape and chip."""

  name: str  # of the generation
  shape: tuple[int, ...]  # of the torus; the number of GPUs
  slices: int = 1

  @staticmethod
  def named(name: str, slices: int = 1) -> "Topology":
    """Reads Google's names: 'v5p-128' and 'tpu7x-128' are 64 chips, as are 'v5p-4x4x4' and 'tpu7x-4x4x4'; 'v5e-256' is
    256; 'h100-8' is eight GPUs."""
    kind, _, count = name.partition("-")
    if kind in _GPUS:
      if not count.isdigit() or int(count) < 1:
        raise ConfigError(f"compile_topology={name}: write the number of GPUs, as in {kind}-8.")
      if int(count) > _NODE and int(count) % _NODE:
        raise ConfigError(f"compile_topology={name}: a node has {_NODE} GPUs, so write a multiple of {_NODE}.")
      return Topology(kind, (int(count),), slices)
    generation = _GENERATIONS.get(kind)
    if generation is None:
      known = ", ".join((*_GENERATIONS, *_GPUS))
      raise ConfigError(f"compile_topology={name}: the chip is one of {known}, as in v5p-128 or h100-8.")
    shapes = {str(n * generation.cores_in_name): s for n, s in _SHAPES[generation.dims].items()}
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", count):
      shape = tuple(map(int, count.split("x")))
      if len(shape) != generation.dims:
        raise ConfigError(f"compile_topology={name}: the torus of {kind} has {generation.dims} dimensions.")
      return Topology(kind, shape, slices)
    if count not in shapes:
      raise ConfigError(
        f"compile_topology={name}: {kind} comes in sizes {', '.join(shapes)}, and in shapes such as "
        f"{kind}-{'x'.join(map(str, _SHAPES[generation.dims][64]))}."
      )
    return Topology(kind, shapes[count], slices)

  @staticmethod
  def named_in(name: str) -> str:
    """The hardware that the name of a recipe has, such as v5p-128 of model-v5p-128-fast; '' where it has none."""
    found = re.search(rf"(?:^|-)((?:{'|'.join((*_GENERATIONS, *_GPUS))})-\d+(?:x\d+)*)(?=-|$)", name)
    return found[1] if found else ""

  @property
  def chip(self) -> Chip:
    """The chip, with its peak numbers."""
    return CHIPS[self.name]

  @property
  def chips(self) -> int:
    """Whole chips, in all slices."""
    return prod(self.shape) * self.slices

  @property
  def hosts(self) -> int:
    """Machines, in all slices: of four TPUs, or of eight GPUs."""
    here = prod(self.shape)
    return self.slices * max(1, here // min(here, _NODE if self.gpu else _TPUS_OF_HOST))

  @property
  def gpu(self) -> bool:
    """Whether its chips are GPUs: nodes of eight at most, with a network between them, instead of a torus."""
    return self.name in _GPUS

  @property
  def compiles(self) -> bool:
    """Whether programs can be compiled for it without its hardware: for GPUs with JAX's CUDA plugin."""
    return not self.gpu or _has_cuda_plugin()

  @property
  def links(self) -> int:
    """Links of a chip: two for each dimension of the torus."""
    return 1 if self.gpu else 2 * len(self.shape)

  @property
  def wrap(self) -> tuple[bool, bool, bool]:
    """Which dimensions are rings. Without this the compiler decomposes every all-gather."""
    if len(self.shape) == 3:
      return (min(self.shape) >= 4,) * 3
    first, second = (size == 16 for size in self.shape)
    return first, second, False

  def devices(self) -> Sequence[jax.Device]:
    """Descriptions of the devices, for TPUs from their compiler; no device is used."""
    if self.gpu:
      return self._gpus()
    for name, value in _COMPILER_ENVIRONMENT.items():
      os.environ.setdefault(name, value)
    try:
      description = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{self.name}:{'x'.join(map(str, self.shape))}",
        chip_config_name=_GENERATIONS[self.name].config_name,
        chips_per_host_bounds=(2, 2, 1),
        num_slices=self.slices,
        wrap=self.wrap,
      )
    except (ImportError, RuntimeError) as error:
      raise ConfigError(f"The TPU compiler cannot be loaded ({error}); pip install 'maxtext[tpu]'.") from error
    return description.devices

  def _gpus(self) -> Sequence[jax.Device]:
    node = min(self.shape[0], _NODE)
    if not self.compiles:
      absent = [DeviceDescription(i, self.chip.kind, i // node) for i in range(self.chips)]
      return cast(list[jax.Device], absent)
    try:
      return topologies.get_topology_desc(
        platform="cuda",
        target_config=target_config(self.name),
        topology=f"{self.slices}x{self.shape[0] // node}x{node}",
      ).devices
    except (NotImplementedError, ImportError, RuntimeError) as error:
      raise ConfigError(
        f"JAX's CUDA plugin cannot be loaded ({error}); where there is no GPU, set JAX_PLATFORMS=cpu before JAX is "
        "imported."
      ) from error


def _has_cuda_plugin() -> bool:
  try:
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))
  except ModuleNotFoundError:  # of all plugins
    return False
