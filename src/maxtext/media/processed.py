"""What a tower and the prompt get for one image, video or sound."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
  from maxtext.media.patches import Patches


@dataclass(frozen=True)
class Processed:
  """One image, video or sound as a tower takes it, and the text that stands for it. Nothing is padded but sound chunks.

  inputs: [N,T,P] float32; N slots of the tower (tiles of an image, frames of a video, chunks of a sound; 1 for most
    images), T patches (or frames of a spectrogram) each, P values. The P values of a patch are in the order of the
    reference's weights (a convolution [W,C,(t),p,p] flattens to C,(t),p,p).
  grid: [N,T,3] int32 (time, row, column) of each patch, counted as the reference counts positions: rows and columns
    within the slot, time by the slot of a video and by the frame within a chunk of sound, where the row is the number
    of the window. -1 at padding.
  text: what replaces the placeholder in the prompt: special tokens with one feature token per feature.
  features: the number of features (feature tokens in `text`).
  sound: of a video, whose feature tokens are in `text` too; None if there is none.
  """

  inputs: np.ndarray
  grid: np.ndarray
  text: str
  features: int
  sound: "Processed | None" = None


@dataclass(frozen=True)
class FeatureText:
  """One `token` per feature, between `start` and `end`."""

  token: str
  start: str = ""
  end: str = ""

  def __call__(self, features: int) -> str:
    return self.start + self.token * features + self.end


@dataclass(frozen=True)
class SlotShape:
  """The unit in which the inputs of a tower are counted, since all of its slots are alike.

  Attributes:
    patches: of a slot; of sound, the frames of a chunk.
    values: of a patch, or a frame.
    features: that a slot becomes; the last slot of a sound may become fewer.
    most: slots that a medium takes.
    layout: a slot is an input of the tower (`separate`), or the patches of one feature, in one input with those of all
      images of a row (`patches`), or a chunk, in one input with those of all sounds (`sound`).
    stride: frames of a feature of sound.
  """

  patches: int
  values: int
  features: int
  most: int
  layout: Literal["separate", "patches", "sound"] = "separate"
  stride: int = 1


class MediaProcessor(Protocol):
  """Makes inputs of a tower: of images, sounds or videos."""

  @property
  def token(self) -> str:
    """The name of the token that stands for a feature."""
    ...

  @property
  def features(self) -> Callable[..., int]:
    """The number of features of an image of (height, width), of a sound of so many samples, or of a video."""
    ...

  @property
  def standing_for(self) -> Callable[..., str]:
    """The text of a medium, `Processed.text`, from the same as its features."""
    ...

  @property
  def slot(self) -> SlotShape:
    """What all slots of the tower are like."""
    ...

  def __call__(self, medium: Any, /) -> Processed: ...


class ImageProcessor(MediaProcessor, Protocol):
  """Makes inputs of a tower of images."""

  @property
  def patches(self) -> "Patches":
    """How pixels become inputs."""
    ...
