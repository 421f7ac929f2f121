"""Images from bytes and files, whoever made them: RGB of a bounded size, or a MediaError."""

import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxtext.media.sources import MediaError, optional, read_bytes

if TYPE_CHECKING:
  from PIL.Image import Image

# Not all that Pillow reads: a decoder that nobody needs is one more to attack.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")


@dataclass(frozen=True)
class ImageLimits:
  """`bytes` of the file, and `pixels` that its header promises; they are read before any pixel is decoded."""

  bytes: int = 32 << 20
  pixels: int = 1 << 26


def load_image(source: "bytes | str | os.PathLike[str] | Image", limits: ImageLimits | None = None) -> "Image":
  """An image in RGB, turned as its EXIF says; grey, palettes and 16 bits as Pillow converts them, alpha is dropped."""
  pil, turn = optional("PIL.Image", "multimodal"), optional("PIL.ImageOps", "multimodal")
  limits = limits or ImageLimits()
  try:
    image: Any = source
    if isinstance(source, bytes | str | os.PathLike):
      image = pil.open(io.BytesIO(read_bytes(source, limits.bytes)), formats=FORMATS)
    width, height = image.size
    if width * height > limits.pixels:
      raise _too_large(f"has {width} x {height} pixels", limits)
    return turn.exif_transpose(image).convert("RGB")
  except MediaError:
    raise
  except pil.UnidentifiedImageError as error:
    raise MediaError(f"The file is no image of a known format ({', '.join(FORMATS)}).") from error
  except pil.DecompressionBombError as error:
    raise _too_large("has far more pixels than its file is large", limits) from error
  except Exception as error:  # Pillow's decoders raise whatever comes to them of a damaged file
    raise MediaError(f"The image cannot be decoded: {error}.") from error


def image_size(source: "bytes | str | os.PathLike[str] | Image") -> tuple[int, int]:
  """Height and width of what `load_image` would return, from the header of a file."""
  pil = optional("PIL.Image", "multimodal")
  limits = ImageLimits()
  try:
    image: Any = source
    if isinstance(source, bytes | str | os.PathLike):
      image = pil.open(io.BytesIO(read_bytes(source, limits.bytes)), formats=FORMATS)
    width, height = image.size
    if width * height > limits.pixels:
      raise _too_large(f"has {width} x {height} pixels", limits)
    turned = image.getexif().get(_ORIENTATION, 1) in _ON_ITS_SIDE
  except MediaError:
    raise
  except Exception as error:
    raise MediaError(f"The image cannot be read: {error}.") from error
  return (width, height) if turned else (height, width)


_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # of EXIF


def _too_large(what: str, limits: ImageLimits) -> MediaError:
  return MediaError(f"The image {what}; the limit is {limits.pixels:,} pixels.")
