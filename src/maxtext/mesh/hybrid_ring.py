"""Hybrid rings (`custom_mesh`): both axes of a mesh are rings of neighbours on a torus of 16 x 16 chips.

The inner axis goes round a small rectangle of chips, the outer one round all rectangles. On whole axes of the torus a
mesh axis has 16 devices; here 64 and 4, or 32 and 8.
"""

from collections.abc import Sequence
from math import prod

import jax

from maxtext.configs import ConfigError
from maxtext.configs.errors import did_you_mean

_SIDE = 16
_RECTANGLES = {"hybrid_ring_64x4": (2, 2), "hybrid_ring_32x8": (2, 4)}


def ring_order(name: str, devices: Sequence[jax.Device], ici: Sequence[int], slices: int) -> list[jax.Device]:
  """The devices, slice by slice, the inner axis fastest.

  Args:
    name: of the layout.
    devices: of all slices.
    ici: sizes of the mesh axes in one slice.
    slices: their number.
  """
  rectangle = _RECTANGLES.get(name)
  if rectangle is None:
    raise ConfigError(
      f"custom_mesh={name} is not a layout.{did_you_mean(name, _RECTANGLES)} There are {' and '.join(_RECTANGLES)}."
    )
  outer, inner = _SIDE**2 // prod(rectangle), prod(rectangle)
  if [size for size in ici if size > 1] != [outer, inner]:
    raise ConfigError(f"custom_mesh={name} is for two mesh axes of {outer} and {inner} devices, in this order.")
  places = {(getattr(d, "slice_index", 0), *getattr(d, "coords", ())[:2]): d for d in devices}
  order = [
    (x, y) for corner in _ring(_SIDE // rectangle[0], _SIDE // rectangle[1]) for x, y in _within(corner, rectangle)
  ]
  found = sorted({place[0] for place in places})
  wanted = [(i, *place) for i in found for place in order]
  if len(found) != slices or sorted(wanted) != sorted(places):
    raise ConfigError(f"custom_mesh={name} is for slices of {_SIDE} x {_SIDE} chips, such as v6e-256.")
  return [places[place] for place in wanted]


def _within(corner: tuple[int, int], rectangle: tuple[int, int]) -> list[tuple[int, int]]:
  return [(corner[0] * rectangle[0] + x, corner[1] * rectangle[1] + y) for x, y in _ring(*rectangle)]


def _ring(rows: int, columns: int) -> list[tuple[int, int]]:
  """A closed walk over a grid, each place once, each step to a neighbour; `rows` is even.

  Down the first column, and back up through the others, row by row.
  """
  back = [
    (row, column)
    for row in reversed(range(rows))
    for column in (range(1, columns) if (rows - row) % 2 else reversed(range(1, columns)))
  ]
  return [(row, 0) for row in range(rows)] + back
