"""How the device mesh lies on the torus of a slice."""

from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from maxtext.mesh.topology import Topology


class TorusSide(NamedTuple):
  """A dimension of the torus: its chips, whether they are a ring, and the mesh axes that run along it."""

  size: int
  ring: bool
  axes: tuple[str, ...]


def torus_sides(mesh: Mesh, topology: Topology) -> list[TorusSide]:
  """The sides of one slice; those of a single chip are left out."""
  places = np.array([device.coords for device in mesh.devices.flat]).reshape(*mesh.devices.shape, -1)
  return [
    TorusSide(
      size, ring, tuple(a for axis, a in enumerate(mesh.axis_names) if np.diff(places[..., side], axis=axis).any())
    )
    for side, (size, ring) in enumerate(zip(topology.shape, topology.wrap, strict=False))
    if size > 1
  ]
