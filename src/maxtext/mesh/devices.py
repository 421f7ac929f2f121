"""The device mesh: ICI and DCN parallelism over devices in their physical order."""

from collections.abc import Sequence
from math import prod

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxtext.configs import ConfigError, MaxTextConfig


def make_mesh(config: MaxTextConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with one axis per name in `mesh_axes`; size-one axes included, so that every rule has its axis."""
  devices = list(jax.devices() if devices is None else devices)
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  dcn = parallelism(config, "dcn", slices)
  ici = parallelism(config, "ici", len(devices) // slices)
  return Mesh(_arrange(config, devices, ici, dcn, slices), config.mesh_axes, axis_types=(AxisType.Auto,) * len(ici))


def parallelism(config: MaxTextConfig, network: str, count: int) -> tuple[int, ...]:
  """The sizes of all mesh axes on one network, with -1 filled so that they multiply to `count`."""
  keys = [f"{network}_{_KEY_OF_AXIS.get(axis, axis)}_parallelism" for axis in config.mesh_axes]
  for key in type(config).model_fields:
    if key.startswith(f"{network}_") and key not in keys and getattr(config, key) != 1:
      raise ConfigError(f"{key}={getattr(config, key)} has no axis in mesh_axes={config.mesh_axes}: set it to 1.")
  sizes = [getattr(config, key, 1) for key in keys]
  product = " x ".join(f"{key}={size}" for key, size in zip(keys, sizes, strict=True) if size != 1) or "1"
  unit = "slices" if network == "dcn" else "devices per slice"
  if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
    raise ConfigError(f"{product}: sizes are positive, and at most one is -1, which takes what is left.")
  known = prod(size for size in sizes if size != -1)
  filled = tuple(count // known if size == -1 else size for size in sizes)
  if prod(filled) != count:
    raise ConfigError(f"{product} does not multiply to the {count} {unit} there are.")
  return filled


def _arrange(
  config: MaxTextConfig, devices: list[jax.Device], ici: tuple[int, ...], dcn: tuple[int, ...], slices: int
) -> np.ndarray:
  if devices[0].platform != "tpu":
    return np.array(devices).reshape([a * b for a, b in zip(dcn, ici, strict=True)])
  split = config.allow_split_physical_axes or _needs_split(ici)
  if slices > 1:
    return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=split)
  return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=split)


def _needs_split(ici: tuple[int, ...]) -> bool:
  """One mesh axis over the whole slice only follows the torus if physical axes may be split."""
  return sum(size > 1 for size in ici) <= 1


_KEY_OF_AXIS = {"stage": "pipeline"}
