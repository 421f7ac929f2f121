"""Images and other media of a batch, as arrays, and their place among the tokens.

Shapes: B rows, S tokens of a row, M inputs of a tower in a row, T patches of an input, P values of a patch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.layers.mel import MelConvolutions, halved
from maxtext.media.processed import Processed
from maxtext.models.spec import TowerSpec

_LEAST = 16  # features that an input has room for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TowerInputs:
  """What one tower encodes.

  Images of any size share an input where the tower allows it, and so do sounds.

  Attributes:
    inputs: [B,M,T,P], or what the front end takes of audio; inputs that no token refers to are padding.
    indices: [B,S] the feature of each token, counted over all M inputs of its row; -1 for tokens of text.
    positions: [B,M,T,2] row and column of a patch in its image; None where all images have one size.
    grid: [B,M,T,2] rows and columns of that image.
    segments: [B,M,T] number of the image from 1, and 0 for padding; patches attend within their image.
  """

  inputs: jax.Array
  indices: jax.Array
  positions: jax.Array | None = None
  grid: jax.Array | None = None
  segments: jax.Array | None = None

  def of_tower(self) -> dict[str, jax.Array]:
    """The arguments of `Tower.features`, for the inputs of all rows together."""
    given = {"inputs": self.inputs, "positions": self.positions, "grid": self.grid, "segments": self.segments}
    return {name: a.reshape(-1, *a.shape[2:]) for name, a in given.items() if a is not None}

  def spans(self, features: int) -> jax.Array:
    """[B,S] the number from 1 of the image whose features a token has, of which one input has so many; 0 for text."""
    number = self.indices // features + 1
    if self.segments is not None:
      rows, inputs, patches = self.segments.shape
      segments = self.segments[:, :, :: patches // features] + patches * jnp.arange(inputs)[:, None]
      number = jnp.take_along_axis(segments.reshape(rows, -1), jnp.maximum(self.indices, 0), axis=1)
    return jnp.where(self.indices >= 0, number, 0)


Media = Mapping[str, TowerInputs]
"""The media of a batch, by the name of the tower."""


def tower_inputs(tower: TowerSpec, medium: Processed) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
  """The arguments of `Tower.features` for each input of a medium, alone in its batch, and which features are real.

  A sound is one input; each image, tile or frame is one. What has any size is padded to one of few, since a program is
  compiled for each.
  """
  front = tower.front_end
  if isinstance(front, MelConvolutions):
    chunks, length = medium.inputs.shape[:2]
    tokens = halved(length, front.count)
    size = max(chunks, min(_doubled(chunks, 1), tower.length // tokens))
    grid = medium.grid[:, :: 2**front.count]
    segments = _padded(np.where(grid[..., 0] >= 0, grid[..., 1] + 1, 0), size, 0).reshape(1, -1)
    yield {"inputs": _padded(medium.inputs, size, 0).swapaxes(1, 2)[None], "segments": segments}, segments[0] > 0
    return
  each = medium.features // len(medium.inputs)
  merged = medium.inputs.shape[1] // each
  for inputs, places in zip(medium.inputs, medium.grid[..., 1:], strict=True):
    if not tower.any_size:
      yield {"inputs": inputs[None]}, np.ones(each, bool)
      continue
    size = merged * _doubled(each, _LEAST)
    grid = np.broadcast_to(places.max(0) + 1, places.shape)
    arrays = {"inputs": (inputs, 0), "positions": (places, 0), "grid": (grid, 1), "segments": (np.ones(len(places)), 0)}
    found = {name: _padded(array, size, value)[None] for name, (array, value) in arrays.items()}
    yield found | {"segments": found["segments"].astype(np.int32)}, np.arange(size // merged) < each


def _doubled(count: int, first: int) -> int:
  """`first`, doubled until it is `count` at least."""
  return first << max(0, math.ceil(math.log2(count / first)))


def _padded(array: np.ndarray, size: int, value: int) -> np.ndarray:
  """The array with `value` behind it, up to `size` along the first axis."""
  widths = ((0, size - len(array)), *((0, 0),) * (array.ndim - 1))
  return np.pad(array, widths, constant_values=value)
