"""Pixels as the rows of a tower's first weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from maxtext.media.processed import SlotShape
from maxtext.media.sources import optional

if TYPE_CHECKING:
  from PIL.Image import Image

Filter = Literal["bilinear", "bicubic"]
Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Patches:
  """Squares of `size` pixels through `frames` frames.

  merge: the patches of a square of merge x merge follow one another, since the tower makes one feature of them.
  channels_last: the values of a patch are in the order (t),p,p,C, instead of C,(t),p,p.
  bfloat16: the reference normalizes in bfloat16, in which one of 256 levels is up to half a level away.
  """

  size: int
  mean: Colour = (0.5, 0.5, 0.5)
  std: Colour = (0.5, 0.5, 0.5)
  merge: int = 1
  frames: int = 1
  channels_last: bool = False
  bfloat16: bool = False

  def __call__(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [G,T,P] and grid [G,T,3] of pixels [F,H,W,3] in uint8, G = F / frames; sides are multiples of patches."""
    F, H, W, C = pixels.shape
    tables = _levels(self.mean, self.std, self.bfloat16)
    values = np.stack([np.take(tables[c], pixels[..., c]) for c in range(C)])
    G, rows, columns, m = F // self.frames, H // self.size, W // self.size, self.merge
    # axes: 0 channel, 1 slot, 2 frame, 3 block of rows, 4 row, 5 pixel, 6 block of columns, 7 column, 8 pixel
    values = values.reshape(C, G, self.frames, rows // m, m, self.size, columns // m, m, self.size)
    order = (2, 5, 8, 0) if self.channels_last else (0, 2, 5, 8)
    inputs = values.transpose(1, 3, 6, 4, 7, *order).reshape(G, rows * columns, -1)
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
    grid = grid.reshape(rows // m, m, columns // m, m, 2).transpose(0, 2, 1, 3, 4).reshape(1, rows * columns, 2)
    time = np.broadcast_to(np.arange(G)[:, None, None], (G, rows * columns, 1))
    return inputs, np.concatenate([time, np.repeat(grid, G, 0)], -1).astype(np.int32)

  def slot(self, most: int) -> SlotShape:
    """The patches of one feature; a medium has so many features at most."""
    return SlotShape(self.merge**2, self.frames * len(self.mean) * self.size**2, 1, most, "patches")

  def pixels(self, inputs: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
    """The image [H,W,3] in uint8 whose patches [T,P] these are, at rows and columns [T,2]; without places, it is
    square, and they come row by row. Of several frames, the first."""
    size, channels = self.size, len(self.mean)
    if places is None:
      places = np.indices((math.isqrt(len(inputs)),) * 2).reshape(2, -1).T
    order = (self.frames, size, size, channels) if self.channels_last else (channels, self.frames, size, size)
    values = inputs.reshape(-1, *order)
    first = values[:, 0] if self.channels_last else values[:, :, 0].transpose(0, 2, 3, 1)
    rows, columns = places.max(0) + 1
    found = np.zeros((rows, size, columns, size, channels))
    found[places[:, 0], :, places[:, 1]] = first
    pixels = found.reshape(rows * size, columns * size, channels)
    return np.clip(np.rint((pixels * self.std + self.mean) * 255), 0, 255).astype(np.uint8)


def resized(image: "Image", height: int, width: int, how: Filter) -> np.ndarray:
  """[H,W,3] uint8."""
  resampling = optional("PIL.Image", "multimodal").Resampling
  return np.asarray(image.resize((width, height), resampling[how.upper()]))


@lru_cache
def _levels(mean: Colour, std: Colour, bfloat16: bool) -> np.ndarray:
  """What each of 256 levels becomes [3,256] float32, by the reference's operations in their order."""
  rounded: Callable[[np.ndarray], np.ndarray] = _to_bfloat16 if bfloat16 else np.asarray
  scaled = rounded((np.arange(256) * (1 / 255)).astype(np.float32))
  means, stds = (np.asarray(values, np.float32)[:, None] for values in (mean, std))
  return rounded(rounded(scaled - rounded(means)) / rounded(stds))


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
  """float32 rounded to what bfloat16 can hold, halves to even."""
  bits = np.asarray(values, np.float32).view(np.uint32)
  return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
