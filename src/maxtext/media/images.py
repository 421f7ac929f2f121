"""Images from bytes and files, whoever made them: RGB of a bounded size, or a MediaError."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxtext.media.sources import MediaError, optional, read_bytes

if TYPE_CHECKING:
  from PIL.Image import Image

# Not all that Pillow reads: a decoder that nobody needs is one more to attack.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")


@dataclass(frozen=True)
class ImageLimits:
  """`bytes` of the file, and `pixels` that its header promises; they are read before any pixel is decoded.

  `scans` of a progressive JPEG: each decodes the whole image once more. Encoders write about ten.
  """

  bytes: int = 32 << 20
  pixels: int = 1 << 26
  scans: int = 64


def load_image(source: "bytes | str | os.PathLike[str] | Image", limits: ImageLimits | None = None) -> "Image":
  """An image in RGB, turned as its EXIF says; grey, palettes and 16 bits as Pillow converts them, alpha is dropped."""
  with _opened(source, limits or ImageLimits()) as image:
    turn = _TURNS.get(_orientation(image))
    method = None if turn is None else optional("PIL.Image", "multimodal").Transpose[turn]
    return (image if method is None else image.transpose(method)).convert("RGB")


def image_size(source: "bytes | str | os.PathLike[str] | Image") -> tuple[int, int]:
  """Height and width of what `load_image` would return, from the header of a file."""
  with _opened(source, ImageLimits()) as image:
    width, height = image.size
    return (width, height) if _orientation(image) in _ON_ITS_SIDE else (height, width)


@contextmanager
def _opened(source: Any, limits: ImageLimits) -> Iterator[Any]:
  """The image with its header read, if it is within the limits; whatever is wrong with it is a MediaError."""
  pil = optional("PIL.Image", "multimodal")
  try:
    image = source
    if not isinstance(source, pil.Image):
      data = read_bytes(source, limits.bytes)
      if data.startswith(_JPEG) and data.count(_SCAN) > limits.scans:
        raise MediaError(f"The image is a JPEG of more than {limits.scans} scans, the limit.")
      image = pil.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > limits.pixels:
      raise _too_large(f"has {width} x {height} pixels", limits)
    yield image
  except MediaError:
    raise
  except pil.UnidentifiedImageError as error:
    raise MediaError(f"The file is no image of a known format ({', '.join(FORMATS)}).") from error
  except pil.DecompressionBombError as error:
    raise _too_large("has far more pixels than its file is large", limits) from error
  except Exception as error:  # Pillow's decoders raise whatever comes to them of a damaged file
    raise MediaError(f"The image cannot be decoded: {error}.") from error


def _orientation(image: Any) -> int:
  """That of EXIF, from the header: what PNG's own `getexif` returns comes after the pixels, which it decodes. Pillow
  turns a TIFF itself when it decodes it, and says its size as it is then."""
  if image.format == "TIFF":
    return 1
  return optional("PIL.Image", "multimodal").Image.getexif(image).get(0x0112, 1)


_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"  # markers, which its compressed bytes never contain
_TURNS = {
  2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
  8: "ROTATE_90",
}  # fmt: skip
_ON_ITS_SIDE = (5, 6, 7, 8)


def _too_large(what: str, limits: ImageLimits) -> MediaError:
  return MediaError(f"The image {what}; the limit is {limits.pixels:,} pixels.")
