"""From an image to a tower's inputs: three ways to fit it. A family says which, with its numbers and tokens.

Sizes are (height, width). `features` needs the size alone, so that a prompt can be planned before anything is decoded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from maxtext.media.patches import Filter, Patches, resized
from maxtext.media.processed import FeatureText, Processed, SlotShape
from maxtext.media.sources import MediaError

if TYPE_CHECKING:
  from PIL.Image import Image


@dataclass(frozen=True)
class PanAndScan:
  """Crops of a long image beside the whole of it. `before` and `between` are the words that introduce them."""

  min_side: int = 256
  max_crops: int = 4
  min_ratio: float = 1.2
  before: str = "Here is the original image "
  between: str = " and here are some crops to help you see better "

  def boxes(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
    """(left, top, right, bottom) of each crop; none if the image is nearly square, or crops would be small."""
    long, short = max(height, width), min(height, width)
    if long / short < self.min_ratio:
      return []
    count = min(self.max_crops, max(2, min(long // self.min_side, math.floor(long / short + 0.5))))
    step = math.ceil(long / count)
    if min(step, short) < self.min_side:
      return []
    spans = [(i * step, min((i + 1) * step, long)) for i in range(count)]
    return [(a, 0, b, height) if width >= height else (0, a, width, b) for a, b in spans]


@dataclass(frozen=True)
class SquareImages:
  """Every image becomes a square of `side` pixels, whatever its proportions."""

  patches: Patches
  side: int
  features_each: int
  text: FeatureText
  how: Filter = "bilinear"
  crops: PanAndScan | None = None

  @property
  def token(self) -> str:
    return self.text.token

  @property
  def slot(self) -> SlotShape:
    return _square_slot(self.patches, self.side, self.features_each, 1 + (self.crops.max_crops if self.crops else 0))

  def features(self, height: int, width: int) -> int:
    return self.features_each * (1 + len(self._boxes(height, width)))

  def standing_for(self, height: int, width: int) -> str:
    text, boxes = self.text(self.features_each), self._boxes(height, width)
    if not self.crops or not boxes:
      return text
    return self.crops.before + text + self.crops.between + " ".join([text] * len(boxes))

  def __call__(self, image: "Image") -> Processed:
    boxes = self._boxes(image.height, image.width)
    images = [image, *(image.crop(box) for box in boxes)]
    squares = [resized(one, self.side, self.side, self.how) for one in images]
    text = self.standing_for(image.height, image.width)
    return _slots(self.patches, squares, text, self.features_each * len(images))

  def _boxes(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
    return self.crops.boxes(height, width) if self.crops else []


@dataclass(frozen=True)
class PixelBudget:
  """Sides that are multiples of `multiple`, nearest to the image's own, with a total of pixels within two bounds.

  frames: the bounds are of all frames of a video together, counted in whole groups of `frames`; 0: of each image.
  """

  multiple: int
  min_pixels: int
  max_pixels: int
  frames: int = 0
  max_ratio: int = 200

  @property
  def most_features(self) -> int:
    """Of an image, or of a video where frames count together."""
    return self.max_pixels // self.multiple**2

  def size(self, height: int, width: int, count: int = 1) -> tuple[int, int]:
    factor, count = self.multiple, max(count, self.frames)  # a group that is not full is filled
    if self.frames and min(height, width) < factor:
      scale = max(factor / height, factor / width)
      height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > self.max_ratio:
      raise MediaError(f"The image is {width} x {height} pixels; one side may be {self.max_ratio} times the other.")
    counted = round(count / self.frames) * self.frames if self.frames else 1
    pixels = height * width * (count if self.frames else 1)
    across, down = round(width / factor) * factor, round(height / factor) * factor
    if counted * down * across > self.max_pixels:
      shrink = math.sqrt(pixels / self.max_pixels)
      down = max(factor, math.floor(height / shrink / factor) * factor)
      across = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted * down * across < self.min_pixels:
      grow = math.sqrt(self.min_pixels / pixels)
      down, across = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return down, across


@dataclass(frozen=True)
class FeatureBudget:
  """As large as `max_features` squares of `multiple` pixels allow, in the image's proportions."""

  multiple: int
  max_features: int

  @property
  def most_features(self) -> int:
    """Of an image."""
    return self.max_features

  def size(self, height: int, width: int, count: int = 1) -> tuple[int, int]:
    """The same whatever the `count` of images."""
    scale = math.sqrt(self.max_features * self.multiple**2 / (height * width))
    down, across = (math.floor(scale * side / self.multiple) for side in (height, width))
    if not down or not across:
      down, across = max(1, down and self.max_features), max(1, across and self.max_features)
    return down * self.multiple, across * self.multiple


@dataclass(frozen=True)
class FittedImages:
  """An image in its proportions, within a budget: of pixels, or of features.

  A square of `budget.multiple` pixels becomes one feature.
  """

  patches: Patches
  budget: PixelBudget | FeatureBudget
  text: FeatureText
  how: Filter = "bicubic"

  @property
  def token(self) -> str:
    return self.text.token

  def features(self, height: int, width: int) -> int:
    height, width = self.budget.size(height, width)
    return height * width // self.budget.multiple**2

  @property
  def slot(self) -> SlotShape:
    return self.patches.slot(self.budget.most_features)

  def standing_for(self, height: int, width: int) -> str:
    return self.text(self.features(height, width))

  def __call__(self, image: "Image") -> Processed:
    pixels = resized(image, *self.budget.size(image.height, image.width), self.how)
    features = self.features(image.height, image.width)
    inputs, grid = self.patches(np.repeat(pixels[None], self.patches.frames, 0))  # an image is a film that stands still
    return Processed(inputs, grid, self.text(features), features)


@dataclass(frozen=True)
class TiledImages:
  """Tiles of `side` pixels on the canvas that fits an image best, then the whole image as one tile."""

  patches: Patches
  side: int
  max_tiles: int
  features_each: int
  token: str
  start: str
  end: str
  column_end: str
  row_end: str
  whole: str
  how: Filter = "bilinear"

  def tiles(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the canvas: enlarge least, else reduce least; the smallest of those equally good."""
    n = self.max_tiles
    shapes = np.array([(r, c) for r in range(1, n + 1) for c in range(1, n // r + 1)])
    # float32, as the reference compares them: canvases tie there that would not in float64
    scales = ((shapes * self.side).astype(np.float32) / np.array([height, width], np.float32)).min(-1)
    best = scales[scales >= 1].min() if (scales >= 1).any() else scales.max()
    fitting = shapes[scales == best]
    rows, columns = fitting[fitting.prod(-1).argmin()]
    return int(rows), int(columns)

  @property
  def slot(self) -> SlotShape:
    return _square_slot(self.patches, self.side, self.features_each, self.max_tiles + 1)

  def features(self, height: int, width: int) -> int:
    count = math.prod(self.tiles(height, width))
    return self.features_each * (count + (count > 1))

  def standing_for(self, height: int, width: int) -> str:
    return self._text(*self.tiles(height, width))

  def __call__(self, image: "Image") -> Processed:
    rows, columns = self.tiles(image.height, image.width)
    side = self.side
    canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
    height, width = self._fitted(image.height, image.width, rows, columns)
    canvas[:height, :width] = resized(image, height, width, self.how)
    tiles = list(canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3))
    if len(tiles) > 1:
      tiles.append(resized(image, side, side, self.how))
    return _slots(self.patches, tiles, self._text(rows, columns), self.features_each * len(tiles))

  def _fitted(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """The size on the canvas; images are enlarged to one tile at most."""
    down, across = (min(max(own, self.side), count * self.side) for own, count in ((height, rows), (width, columns)))
    if across / width < down / height:
      return max(1, min(math.floor(height * (across / width)), down)), across
    return down, max(1, min(math.floor(width * (down / height)), across))

  def _text(self, rows: int, columns: int) -> str:
    tile = self.token * self.features_each
    line = self.column_end.join([tile] * columns) + self.row_end
    return self.start + (line * rows if rows * columns > 1 else "") + self.whole + tile + self.end


def _square_slot(patches: Patches, side: int, features: int, most: int) -> SlotShape:
  return SlotShape((side // patches.size) ** 2, len(patches.mean) * patches.size**2, features, most)


def _slots(patches: Patches, images: Sequence[np.ndarray], text: str, features: int) -> Processed:
  """Images of one size, each in a slot of its own and at time 0."""
  inputs, grid = patches(np.stack(images))
  grid[..., 0] = 0
  return Processed(inputs, grid, text, features)
