"""The device mesh: ICI and DCN parallelism over devices in their physical order."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxtext.configs import MaxTextConfig
from maxtext.configs.derived import parallelism


def make_mesh(config: MaxTextConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with one axis per name in `mesh_axes`; size-one axes included, so that every rule has its axis."""
  devices = list(jax.devices() if devices is None else devices)
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  ici, dcn = parallelism(config, "ici", len(devices) // slices), parallelism(config, "dcn", slices)
  return Mesh(_arrange(config, devices, ici, dcn, slices), config.mesh_axes, axis_types=(AxisType.Auto,) * len(ici))


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
