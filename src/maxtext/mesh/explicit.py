"""Operations on a mesh whose axes are explicit: there an array's sharding is part of its type, and whatever would move
data is said, not found by the compiler.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from maxtext.mesh.rules import axes_of


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
  """Whether shardings are types here."""
  return AxisType.Explicit in mesh.axis_types


def moved(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
  """The same, split as said."""
  return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def product(
  x: jax.Array, weight: jax.Array, contracted: int, precision: str, mesh: Mesh, preferred_element_type: Any = None
) -> jax.Array:
  """The last dimensions of x with the first of a weight.

  The weight is gathered over every axis that splits x otherwise, which is what FSDP is. Where both are split where they
  are contracted, partial sums are added up.
  """
  kept = x.ndim - contracted
  parts = _parts(x)
  taken = {axis for part in parts for axis in axes_of(part)}
  outputs = [tuple(axis for axis in axes_of(part) if axis not in taken) or None for part in _parts(weight)[contracted:]]
  weight = moved(weight, mesh, PartitionSpec(*parts[kept:], *outputs))
  dims = (tuple(range(kept, x.ndim)), tuple(range(contracted))), ((), ())
  spec = PartitionSpec(*parts[:kept], *outputs)
  return jax.lax.dot_general(
    x,
    weight,
    dims,
    precision=precision,
    preferred_element_type=preferred_element_type,
    out_sharding=NamedSharding(mesh, spec),
  )


def beside(bias: jax.Array, y: jax.Array, mesh: Mesh) -> jax.Array:
  """A bias, split as the last dimensions of what it is added to."""
  return moved(bias, mesh, PartitionSpec(*_parts(y)[y.ndim - bias.ndim :]))


def by_compiler(run: Callable[..., jax.Array], sharding: NamedSharding, *arguments: Any) -> jax.Array:
  """The result of a function that says nothing of shardings: inside it the compiler finds them on any mesh, and its
  result is as said on one whose axes are explicit."""
  if not is_explicit(sharding.mesh):
    return run(*arguments)
  return jax.sharding.auto_axes(run, out_sharding=sharding)(*arguments)


def _parts(x: jax.Array) -> tuple[Any, ...]:
  spec = tuple(jax.typeof(x).sharding.spec)
  return spec + (None,) * (x.ndim - len(spec))
