"""Explicit sharding: operations on a mesh with explicit axes. There an array's sharding is part of its type, and every
movement of data is written in the program; the compiler adds none.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from maxtext.mesh.rules import mesh_axes_of


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
  """Whether a mesh has explicit axes, so that shardings are part of types."""
  return AxisType.Explicit in mesh.axis_types


def reshard(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
  """The array with another sharding."""
  return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def matmul(
  x: jax.Array, weight: jax.Array, contracted: int, precision: str, mesh: Mesh, preferred_element_type: Any = None
) -> jax.Array:
  """Contracts the last `contracted` dimensions of x with the first of a weight.

  The weight is gathered over every axis that splits other dimensions of x, which is what FSDP is. Where both are split
  along a contracted dimension, partial sums are added up.
  """
  kept = x.ndim - contracted
  spec = _spec(x)
  used = {axis for part in spec for axis in mesh_axes_of(part)}
  outputs = [
    tuple(axis for axis in mesh_axes_of(part) if axis not in used) or None for part in _spec(weight)[contracted:]
  ]
  weight = reshard(weight, mesh, PartitionSpec(*spec[kept:], *outputs))
  dims = (tuple(range(kept, x.ndim)), tuple(range(contracted))), ((), ())
  out_spec = PartitionSpec(*spec[:kept], *outputs)
  return jax.lax.dot_general(
    x,
    weight,
    dims,
    precision=precision,
    preferred_element_type=preferred_element_type,
    out_sharding=NamedSharding(mesh, out_spec),
  )


def match_sharding(bias: jax.Array, y: jax.Array, mesh: Mesh) -> jax.Array:
  """A bias with the sharding of the last dimensions of the array that it is added to."""
  return reshard(bias, mesh, PartitionSpec(*_spec(y)[y.ndim - bias.ndim :]))


def auto_axes(run: Callable[..., Any], sharding: Any, *arguments: Any) -> Any:
  """Calls a function in which the compiler chooses the shardings; on explicit axes its result gets `sharding`, one or a
  tree of them."""
  if not is_explicit(jax.tree.leaves(sharding)[0].mesh):
    return run(*arguments)
  return jax.sharding.auto_axes(run, out_sharding=sharding)(*arguments)


def _spec(x: jax.Array) -> tuple[Any, ...]:
  """The array's partition spec, with an entry for every dimension."""
  spec = tuple(jax.typeof(x).sharding.spec)
  return spec + (None,) * (x.ndim - len(spec))
