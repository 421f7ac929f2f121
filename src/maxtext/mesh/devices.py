"""The device mesh: ICI and DCN parallelism over devices in their physical order."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxtext.configs import ConfigError, MaxTextConfig, derived
from maxtext.configs.derived import mesh_axes, parallelism
from maxtext.configs.types import ShardMode


def make_mesh(config: MaxTextConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with one axis per name in `mesh_axes`; size-one axes included, so that every rule has its axis."""
  devices = list(jax.devices() if devices is None else devices)
  slices = _slices(config, devices)
  ici, dcn = parallelism(config, "ici", len(devices) // slices), parallelism(config, "dcn", slices)
  kind = {ShardMode.AUTO: AxisType.Auto, ShardMode.EXPLICIT: AxisType.Explicit}[config.shard_mode]
  return Mesh(_arrange(config, devices, ici, dcn, slices), mesh_axes(config), axis_types=(kind,) * len(ici))


def with_devices(config: MaxTextConfig, devices: Sequence[jax.Device] | None = None) -> MaxTextConfig:
  """The configuration with what follows from devices, by default all that JAX finds."""
  found = list(jax.devices() if devices is None else devices)
  return derived.with_devices(config, len(found), _slices(config, found))


def _slices(config: MaxTextConfig, devices: list[jax.Device]) -> int:
  """What the hardware says; devices that know no slices may be told to form some, in their order."""
  found = len({getattr(d, "slice_index", 0) for d in devices})
  asked = found if config.num_slices == -1 else config.num_slices
  if asked < 1 or len(devices) % asked or (found > 1 and asked != found):
    raise ConfigError(f"num_slices={config.num_slices} does not fit {len(devices)} devices in {found} slices.")
  return asked


def _arrange(
  config: MaxTextConfig, devices: list[jax.Device], ici: tuple[int, ...], dcn: tuple[int, ...], slices: int
) -> np.ndarray:
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
      f"A mesh of {sizes} cannot be laid out on whole axes of the slice's torus: let them be split by "
      "allow_split_physical_axes=true, or choose sizes that are products of them."
    ) from error


def _hybrid(devices: np.ndarray, ici: tuple[int, ...], dcn: tuple[int, ...]) -> np.ndarray:
  """Devices slice by slice to a mesh in which each axis steps through its slices first, then within them."""
  pairs = devices.reshape(*dcn, *ici).transpose([i for axis in range(len(ici)) for i in (axis, axis + len(ici))])
  return pairs.reshape([a * b for a, b in zip(dcn, ici, strict=True)])


def _needs_split(ici: tuple[int, ...]) -> bool:
  """One mesh axis over the whole slice only follows the torus if physical axes may be split."""
  return sum(size > 1 for size in ici) <= 1
