"""Reduce-scatter of gradients over one part of the torus after the other.

FSDP needs of each gradient only a device's own shard. The TPU compiler makes that a reduce-scatter, half the bytes of
an all-reduce, where the devices of a group lie along one axis of the torus (or two of three); over a whole torus at
once it sums everything everywhere and slices. So a gradient is told to reach its sharding in two stages.
"""

from collections.abc import Collection, Iterator
from functools import cache, partial
from math import isqrt

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.mesh.rules import mesh_axes_of


def reduce_scatter_gradient(x: jax.Array, mesh: Mesh, spec: PartitionSpec, summed: Collection[str]) -> jax.Array:
  """The array itself, whose gradient reaches the sharding `spec` in two stages.

  Args:
    x: a weight.
    mesh: of the sharding.
    spec: the weight's sharding, which is that of its gradient.
    summed: mesh axes that split tokens, over which gradients are summed.
  """
  first = first_stage(mesh, spec, summed)
  return x if first is None else _staged((first, NamedSharding(mesh, spec)), x)


def first_stage(mesh: Mesh, spec: PartitionSpec, summed: Collection[str]) -> NamedSharding | None:
  """The sharding that a gradient has after its first stage; None if one stage is enough.

  It is over all parts of the torus but the last that the gradient is scattered over.
  """
  whole = _by_torus_axis(mesh, frozenset(summed))
  parts = {axis: [name for name in whole.axis_names if name.partition("/")[0] == axis] for axis in mesh.axis_names}
  stages = [name for entry in spec for axis in mesh_axes_of(entry) if axis in summed for name in parts[axis]]
  if len(stages) < 2:
    return None

  def entry(part: object) -> tuple[str, ...] | None:
    names = [name for axis in mesh_axes_of(part) for name in parts[axis] if name != stages[-1]]
    return tuple(names) or None

  return NamedSharding(whole, PartitionSpec(*(entry(part) for part in spec)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _staged(stages: tuple[NamedSharding, ...], x: jax.Array) -> jax.Array:
  return x


def _forward(stages: tuple[NamedSharding, ...], x: jax.Array) -> tuple[jax.Array, None]:
  return x, None


def _backward(stages: tuple[NamedSharding, ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
  for sharding in stages:
    gradient = jax.lax.with_sharding_constraint(gradient, sharding)
  return (gradient,)


_staged.defvjp(_forward, _backward)


@cache
def _by_torus_axis(mesh: Mesh, split: frozenset[str]) -> Mesh:
  """The same devices in the same order, with some mesh axes split into the torus axes that they run along."""
  sizes: dict[str, int] = {}
  for i, axis in enumerate(mesh.axis_names):
    line = np.moveaxis(mesh.devices, i, 0).reshape(mesh.devices.shape[i], -1)[:, 0]
    if axis in split:
      sizes |= {f"{axis}/{j}": size for j, size in enumerate(_torus_factors(list(line)))}
    else:
      sizes[axis] = len(line)
  return Mesh(mesh.devices.reshape(list(sizes.values())), tuple(sizes), axis_types=mesh.axis_types[:1] * len(sizes))


def _torus_factors(line: list[jax.Device]) -> list[int]:
  """How the devices along a mesh axis split into slices and torus axes, outermost first. Devices of which the torus is
  not known are split into two."""
  count = len(line)
  if line[0].platform != "tpu":
    inner = next(size for size in range(isqrt(count), 0, -1) if count % size == 0)
    return [size for size in (count // inner, inner) if size > 1]
  places = np.array([(getattr(d, "slice_index", 0), *d.coords, d.core_on_chip) for d in line])
  sizes = list(_runs(places))
  if len(sizes) > 1 and (places[: sizes[0], :-1] == places[0, :-1]).all():  # the cores of a chip are no torus axis
    sizes[:2] = [sizes[0] * sizes[1]]
  return sizes[::-1]


def _runs(places: np.ndarray) -> Iterator[int]:
  """Sizes of the torus axes of places in row-major order, innermost first."""
  while len(places) > 1:
    same = places[1] == places[0]
    moved = np.flatnonzero((places[:, same] != places[0, same]).any(axis=1))
    size = int(moved[0]) if len(moved) and len(places) % moved[0] == 0 else len(places)
    yield size
    places = places[::size]
