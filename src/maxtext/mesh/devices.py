"""The device mesh: ICI and DCN parallelism over devices in their physical order."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxtext.configs import ConfigError, MaxTextConfig, derived
from maxtext.configs.derived import mesh_axes, parallelism
from maxtext.configs.types import ShardMode
from maxtext.mesh.hybrid_ring import ring_order


def make_mesh(config: MaxTextConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with one axis for each name in `mesh_axes`. Axes of size one are kept, so that every rule has its axis."""
  devices = list(jax.devices() if devices is None else devices)
  slices = _slices(config, devices)
  ici, dcn = parallelism(config, "ici", len(devices) // slices), parallelism(config, "dcn", slices)
  kind = {ShardMode.AUTO: AxisType.Auto, ShardMode.EXPLICIT: AxisType.Explicit}[config.shard_mode]
  return Mesh(_arrange(config, devices, ici, dcn, slices), mesh_axes(config), axis_types=(kind,) * len(ici))


def with_devices(config: MaxTextConfig, devices: Sequence[jax.Device] | None = None) -> MaxTextConfig:
  """The configuration with the values that depend on devices; by default all devices that JAX finds."""
  found = list(jax.devices() if devices is None else devices)
  return derived.with_devices(config, len(found), _slices(config, found))


def _slices(config: MaxTextConfig, devices: list[jax.Device]) -> int:
  """The number of slices, from the hardware. Devices without a slice index are divided as `num_slices` says."""
  found = len({getattr(d, "slice_index", 0) for d in devices})
  wanted = found if config.num_slices == -1 else config.num_slices
  if wanted < 1 or len(devices) % wanted or (found > 1 and wanted != found):
    raise ConfigError(f"num_slices={config.num_slices} does not fit {len(devices)} devices in {found} slices.")
  return wanted


def _arrange(
  config: MaxTextConfig, devices: list[jax.Device], ici: tuple[int, ...], dcn: tuple[int, ...], slices: int
) -> np.ndarray:
  if config.custom_mesh:
    return _hybrid(np.array(ring_order(config.custom_mesh, devices, ici, slices)), ici, dcn)
  if devices[0].platform != "tpu":
    return _hybrid(np.array(devices), ici, dcn)
  split = config.allow_split_physical_axes or _needs_split(ici)
  try:
    if slices > 1:
      return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=split)
    return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=split)
  except NotImplementedError as error:
    sizes = " x ".join(f"{axis}={size}" for axis, size in zip(mesh_axes(config), ici, strict=True) if size > 1)
    raise ConfigError(
      f"A mesh of {sizes} cannot be laid out on whole axes of the slice's torus: write "
      "allow_split_physical_axes=true, or choose sizes that are products of torus axes."
    ) from error


def _hybrid(devices: np.ndarray, ici: tuple[int, ...], dcn: tuple[int, ...]) -> np.ndarray:
  """A mesh of devices that are ordered by slice: along each axis the slice changes slowest."""
  pairs = devices.reshape(*dcn, *ici).transpose([i for axis in range(len(ici)) for i in (axis, axis + len(ici))])
  return pairs.reshape([a * b for a, b in zip(dcn, ici, strict=True)])


def _needs_split(ici: tuple[int, ...]) -> bool:
  """Whether one mesh axis covers the whole slice, which follows the torus only if physical axes may be split."""
  return sum(size > 1 for size in ici) <= 1
