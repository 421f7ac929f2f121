"""Images and other media of a batch, as arrays, and their place among the tokens.

Shapes: B rows, S tokens of a row, M inputs of a tower in a row, T patches of an input, P values of a patch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.layers.mel import MelConvolutions, halved
from maxtext.media.processed import Processed
from maxtext.models.spec import TowerSpec

_LEAST = 16  # features that an input has room for
Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of an image (one frame) or video."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TowerInputs:
  """What one tower encodes.

  Images of any size share an input where the tower allows it: `patch_places` makes the three optional arrays.

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


def patch_places(grids: Sequence[Grid], merged: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """`positions` [T,2], `grid` [T,2] and `segments` [T] of one input of a tower that holds several images.

  Patches are in the order in which they are merged: blocks from left to right and top to bottom, and so within a block.
  Each frame of a video is a segment.

  Args:
    grids: of the images, in order.
    merged: rows, and columns, of patches that become one token.
    length: patches of the input; what images leave is padding.

  Raises:
    ValueError: images have more patches than the input.
  """
  positions, grid, segments = (
    np.zeros((length, 2), np.int32),
    np.ones((length, 2), np.int32),
    np.zeros(length, np.int32),
  )
  first = frame = 0
  for frames, rows, columns in grids:
    places = np.indices((rows, columns), np.int32).reshape(2, rows // merged, merged, columns // merged, merged)
    places = places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    for _ in range(frames):
      frame, last = frame + 1, first + len(places)
      if last > length:
        raise ValueError(f"images of {list(grids)} patches do not fit in an input of {length} patches.")
      positions[first:last], grid[first:last], segments[first:last] = places, (rows, columns), frame
      first = last
  return positions, grid, segments


def mrope_positions(
  positions: np.ndarray, images: np.ndarray, grids: Sequence[Sequence[Grid]], merged: int, interval: int = 1
) -> np.ndarray:
  """`rotary_positions` [B,S,3] (time, row, column) of tokens in the order of the text.

  Text has three equal components. Tokens of an image count from the position after the text before it: time by frame,
  and the other two by row and column. The text behind it continues after the largest of them.

  Args:
    positions: [B,S] of tokens in their document.
    images: [B,S] whether a token has a feature of an image.
    grids: of the images of each row, in order.
    merged: rows, and columns, of patches that become one token.
    interval: between frames of a video.

  Raises:
    ValueError: a row has another number of tokens of images than its grids.
  """
  found = np.repeat(np.asarray(positions, np.int32)[..., None], 3, axis=-1)
  for row, own in enumerate(grids):
    marked = np.flatnonzero(images[row])
    counts = [frames * rows * columns // merged**2 for frames, rows, columns in own]
    if sum(counts) != len(marked):
      raise ValueError(f"row {row} has {len(marked)} tokens of images, and its grids have {sum(counts)}.")
    starts = np.flatnonzero(positions[row] == 0)
    for places, (frames, rows, columns) in zip(np.split(marked, np.cumsum(counts))[:-1], own, strict=True):
      axes = np.indices((frames, rows // merged, columns // merged)).reshape(3, -1).T * (interval, 1, 1)
      behind = places[-1] + 1
      end = next((start for start in starts if start >= behind), positions.shape[1])
      found[row, places] = found[row, places[0]] + axes
      found[row, behind:end] += axes.max() + 1 - len(places)
  return found


def prompt_rotary_positions(length: int, media: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
  """`rotary_positions` [S,3] of a prompt, as of `mrope_positions`, for media with text or sound between their tokens.

  A run of tokens without text in it begins at time 0. The text behind it continues after the largest position of the
  run's last tower.

  Args:
    length: tokens of the prompt.
    media: of each medium, in order, its tokens, their (time, row, column) [L,3], and a number for the tower of each.
  """
  found = np.repeat(np.arange(length, dtype=np.int32)[:, None], 3, axis=1)
  for places, axes, towers in media:
    for run in np.split(np.arange(len(places)), np.flatnonzero(np.diff(places) > 1) + 1):
      own, first, behind = axes[run] - (axes[run[0], 0], 0, 0), places[run[0]], places[run[-1]] + 1
      last = own[np.flatnonzero(towers[run] != towers[run[-1]]).max(initial=-1) + 1 :]
      found[behind:] += last.max() + 1 - len(run)
      found[places[run]] = found[first] + own
  return found


def audio_segments(clips: Sequence[int], chunk: int, window: int, chunks: int, halvings: int = 3) -> np.ndarray:
  """`segments` [T] of one input of an audio tower that holds several clips, one after the other in whole chunks.

  Tokens attend within their window; those of the frames that a clip's last chunk lacks are padding, 0. The n-th audio
  token of a row has the n-th feature whose segment is not 0.

  Args:
    clips: number of frames of each clip.
    chunk: frames of a chunk.
    window: frames of an attention window, a multiple of `chunk`.
    chunks: of the input.
    halvings: by the tower's convolutions.
  """
  tokens, number, first = halved(chunk, halvings), 0, 0
  segments = np.zeros(chunks * tokens, np.int32)
  for frames in clips:
    for start in range(0, frames, window):
      inside, place, number = min(window, frames - start), first + start // chunk * tokens, number + 1
      segments[place : place + inside // chunk * tokens + halved(inside % chunk, halvings)] = number
    first += -(-frames // chunk) * tokens
  return segments
