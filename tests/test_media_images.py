"""Images become what transformers' Pillow processors make of them, to the bit; files that are none become errors."""

import io
import json
import re
import struct
import subprocess
import sys
import types
import zlib
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from maxtext.media.audio import load_sound
from maxtext.media.image_processors import (
  FeatureBudget,
  FittedImages,
  PanAndScan,
  PixelBudget,
  SquareImages,
  TiledImages,
)
from maxtext.media.images import ImageLimits, image_size, load_image
from maxtext.media.patches import Patches
from maxtext.media.processed import FeatureText
from maxtext.media.sources import MediaError
from maxtext.media.video import load_video

TILED = Path(__file__).parent / "data" / "tiled_images.json"  # of torchvision, which is not installed here; see main
SIZES = [(1, 1), (2, 2), (37, 53), (53, 37), (224, 224), (896, 896), (333, 1000), (1000, 333), (5, 700), (641, 479)]


def noise(height, width, mode="RGB", seed=0):
  """Noise over a gradient: wrong rows, columns, channels and filters all show."""
  channels = len(Image.new(mode, (1, 1)).getbands())
  ramp = np.linspace(0, 180, height * width * channels).reshape(height, width, channels)
  values = (ramp + np.random.default_rng(seed + height * 10_000 + width).integers(0, 75, ramp.shape)).astype(np.uint8)
  return Image.fromarray(values.squeeze(-1) if channels == 1 else values, mode)


def native(size=16, merge=2, low=65536, high=16777216, **changes):
  patches = Patches(size, merge=merge, frames=2, **changes)
  return FittedImages(patches, PixelBudget(size * merge, low, high), FeatureText("<|image_pad|>"))


def reference_native(size=16, merge=2, low=65536, high=16777216, **changes):
  from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

  sizes = {"shortest_edge": low, "longest_edge": high}
  half = [0.5, 0.5, 0.5]
  means = {"image_mean": list(changes.get("mean", half)), "image_std": list(changes.get("std", half))}
  return Qwen2VLImageProcessorPil(patch_size=size, merge_size=merge, size=sizes, **means)


CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
NATIVE = {  # patches of 16 (Qwen 3), of 14 with other colours (Qwen 2), little room, and a single patch per feature
  "qwen3": {"low": 4096, "high": 524288},
  "qwen2": {"size": 14, "low": 3136, "high": 1003520, **CLIP},
  "cramped": {"low": 1024, "high": 4096},
  "unmerged": {"merge": 1, "low": 1024, "high": 65536},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", NATIVE)
def test_native_images_are_the_reference_s(kind, size):
  image, settings = noise(*size), NATIVE[kind]
  ours, processor = native(**settings)(image), reference_native(**settings)
  theirs = processor([image], return_tensors="np")
  np.testing.assert_array_equal(ours.inputs[0], theirs["pixel_values"])
  assert ours.inputs.dtype == np.float32
  t, rows, columns = theirs["image_grid_thw"][0]
  assert ours.grid.shape == (1, t * rows * columns, 3)
  assert tuple(ours.grid.reshape(-1, 3).max(0) + 1) == (t, rows, columns)
  assert ours.features == native(**settings).features(*size) == ours.text.count("<|image_pad|>")

  from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

  theirs["image_grid_thw"] = np.asarray(theirs["image_grid_thw"])
  around = types.SimpleNamespace(image_processor=processor, image_token="<|image_pad|>")
  assert ours.text == Qwen3VLProcessor.replace_image_token(around, theirs, 0)


def test_the_grid_says_where_each_patch_was():
  """An image whose pixels say in which patch they lie: the inputs of a patch are its row and column in the grid."""
  rows, columns = np.mgrid[:96, :160] // 16
  image = Image.fromarray(np.stack([rows, columns, rows * 0], -1).astype(np.uint8))
  for processor in (native(low=1024), native(low=1024, merge=1)):
    found = processor(image)
    red, green = (found.inputs[0].reshape(60, 3, 512)[:, i, 0] for i in (0, 1))
    np.testing.assert_array_equal(np.round((red + 1) * 127.5), found.grid[0, :, 1])
    np.testing.assert_array_equal(np.round((green + 1) * 127.5), found.grid[0, :, 2])


@pytest.mark.parametrize("size", [(1, 201), (300, 1)])
def test_native_images_refuse_what_the_reference_refuses(size):
  with pytest.raises(ValueError, match="aspect ratio"):
    reference_native()([noise(*size)])
  with pytest.raises(MediaError, match="may be 200 times the other"):
    native()(noise(*size))


def square(crops=None):
  text = FeatureText("<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n")
  return SquareImages(Patches(14), 896, 256, text, crops=crops)


@pytest.mark.parametrize("size", [*SIZES, (300, 750)])
@pytest.mark.parametrize("crops", [None, PanAndScan(), PanAndScan(min_side=100, max_crops=6)])
def test_square_images_are_the_reference_s(crops, size):
  from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
  from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

  image, processor = noise(*size), square(crops)
  settings = crops and {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": crops.min_side,
    "pan_and_scan_max_num_crops": crops.max_crops,
    "pan_and_scan_min_ratio_to_activate": crops.min_ratio,
  }
  reference = Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, **settings or {})
  theirs = reference([image], return_tensors="np")
  ours = processor(image)
  pixels = np.asarray(theirs["pixel_values"])
  patches = pixels.reshape(-1, 3, 64, 14, 64, 14).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 4096, 588)
  np.testing.assert_array_equal(ours.inputs, patches)
  np.testing.assert_array_equal(ours.grid, np.broadcast_to(square()(image).grid, ours.grid.shape))
  assert ours.features == processor.features(*size) == ours.text.count("<image_soft_token>") == 256 * len(pixels)
  around = types.SimpleNamespace(full_image_sequence=square().text(256))
  assert ours.text == Gemma3Processor.replace_image_token(around, theirs, 0)


def test_some_images_are_cropped():
  """The sizes above would show nothing of crops if none had any."""
  assert [len(PanAndScan().boxes(*size)) for size in SIZES] == [0, 0, 0, 0, 0, 0, 3, 3, 0, 2]


def pooled(count=280):
  patches = Patches(16, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), channels_last=True)
  return FittedImages(patches, FeatureBudget(48, count), FeatureText("<|image|>", "<|image>", "<image|>"))


@pytest.mark.parametrize("size", [*SIZES, (1, 3000), (3000, 1), (48, 48), (768, 768)])
@pytest.mark.parametrize("count", [70, 280, 1120])
def test_pooled_images_are_the_reference_s(count, size):
  from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
  from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

  image, processor = noise(*size), pooled(count)
  theirs = Gemma4ImageProcessorPil(max_soft_tokens=count)([image], return_tensors="np")
  ours = processor(image)
  there = theirs["image_position_ids"][0, :, 0] >= 0
  np.testing.assert_array_equal(ours.inputs[0], theirs["pixel_values"][0, there])
  np.testing.assert_array_equal(ours.grid[0, :, [2, 1]].T, theirs["image_position_ids"][0, there])
  assert not ours.grid[..., 0].any()
  assert ours.features == processor.features(*size) == ours.text.count("<|image|>")
  around = types.SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
  assert ours.text == Gemma4Processor.replace_image_token(around, theirs, 0)


def tiled(max_tiles=16):
  separators = {"column_end": "<|tile_x_separator|>", "row_end": "<|tile_y_separator|>", "whole": "<|image|>"}
  ends = {"start": "<|image_start|>", "end": "<|image_end|>"}
  return TiledImages(Patches(14, bfloat16=True), 336, max_tiles, 144, "<|patch|>", **ends, **separators)


@pytest.mark.parametrize("case", json.loads(TILED.read_text()), ids=lambda case: "x".join(map(str, case["size"])))
def test_tiled_images_are_the_reference_s(case):
  """Canvases and texts are the same; resized levels are within one, since torchvision rounds otherwise than Pillow."""
  image, processor = noise(*case["size"]), tiled(case["max_tiles"])
  ours = processor(image)
  rows, columns = case["tiles"]
  assert processor.tiles(*case["size"]) == (rows, columns)
  assert ours.inputs.shape == (case["slots"], 576, 588)
  pixels = ours.inputs.reshape(-1, 24, 24, 3, 14, 14).transpose(0, 3, 1, 4, 2, 5).reshape(-1)
  at = np.random.default_rng(0).integers(0, pixels.size, len(case["values"]))
  # one level of 255 is 2/255, and bfloat16 rounds it by half as much again
  assert np.abs(pixels[at] - case["values"]).max() <= 3 / 255
  assert np.abs(pixels[at] - case["values"]).mean() < 0.1 / 255
  np.testing.assert_array_equal(pixels.view(np.uint32) & 0xFFFF, 0)  # bfloat16, as there
  assert ours.features == processor.features(*case["size"]) == ours.text.count("<|patch|>")

  from transformers.models.llama4.processing_llama4 import Llama4Processor

  assert ours.text == Llama4Processor._prompt_split_image(None, (rows, columns), 144)


def encoded(image, kind="PNG", **options):
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def rotated(orientation):
  exif = Image.Exif()
  exif[0x0112] = orientation
  return encoded(noise(40, 60), "JPEG", exif=exif, quality=95)


PALETTE = noise(30, 20).convert("P")
FILES = {
  "grey": encoded(noise(30, 20, "L")),
  "alpha": encoded(noise(30, 20, "RGBA")),
  "grey and alpha": encoded(noise(30, 20, "LA")),
  "palette": encoded(PALETTE),
  "palette with transparency": encoded(PALETTE, transparency=3),
  "one bit": encoded(noise(30, 20).convert("1")),
  "16 bits": encoded(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(30, 20) * 100)),
  "CMYK": encoded(noise(30, 20).convert("CMYK"), "JPEG"),
  "WebP": encoded(noise(30, 20), "WEBP", lossless=True),
  "GIF of two frames": encoded(PALETTE, "GIF", save_all=True, append_images=[noise(30, 20, seed=1).convert("P")]),
  "TIFF": encoded(noise(30, 20), "TIFF", compression="tiff_lzw"),
  **{f"turned {i}": rotated(i) for i in range(1, 9)},
  **{f"turned {i}, TIFF": encoded(noise(30, 20), "TIFF", tiffinfo={0x0112: i}) for i in (2, 6)},
}


@pytest.mark.parametrize("kind", FILES)
def test_files_are_read_as_the_reference_reads_them(tmp_path, kind):
  from transformers.image_utils import load_image as reference

  path = tmp_path / "image"
  path.write_bytes(FILES[kind])
  theirs = np.asarray(reference(str(path)))
  for source in (FILES[kind], path, str(path), Image.open(path)):
    size, ours = image_size(source), load_image(source)
    assert (ours.mode, size) == ("RGB", (ours.height, ours.width))
    np.testing.assert_array_equal(np.asarray(ours), theirs)


def test_turned_images_are_turned():
  turned = [load_image(FILES[f"turned {i}"]).size for i in (1, 6)]
  assert turned == [(60, 40), (40, 60)]


def png(width, height, rows=b""):
  """A PNG that promises width x height pixels and holds `rows`."""

  def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

  header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


WHOLE = encoded(noise(64, 64), "JPEG")
HOSTILE = {
  "empty": (b"", "no image of a known format"),
  "text": (b"no image at all", "no image of a known format"),
  "a format that is not read": (encoded(noise(4, 4), "PPM"), "no image of a known format"),
  "cut JPEG": (WHOLE[: len(WHOLE) // 2], "cannot be decoded"),
  "cut PNG": (FILES["alpha"][:-200], "cannot be decoded"),
  "wrong checksum": (FILES["grey"][:40] + b"xxxx" + FILES["grey"][44:], "cannot be decoded|no image"),
  "no rows": (png(100, 100), "cannot be decoded"),
  "a bomb": (png(60_000, 60_000), "limit is 67,108,864 pixels"),
  "somewhat too large": (png(9_000, 9_000), "has 9000 x 9000 pixels"),
  "many scans": (WHOLE[:-2] + b"\xff\xda" * 64 + WHOLE[-2:], "JPEG of more than 64 scans"),
  "no file": ({}, "A dict is no file"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_image_is_an_error_in_words(kind):
  data, words = HOSTILE[kind]
  with pytest.raises(MediaError, match=words):
    load_image(data)
  with suppress(MediaError) if "decoded" in words else pytest.raises(MediaError, match=words):
    image_size(data)  # whose header may be whole


@pytest.mark.parametrize("side", [8_000, 13_000])
def test_the_size_of_an_image_decodes_nothing(monkeypatch, side):
  monkeypatch.setattr(PngImageFile, "load", lambda self: pytest.fail("it was decoded"))
  with pytest.raises(MediaError, match="limit is") if side > 8_192 else nullcontext():
    assert image_size(png(side, side)) == (side, side)


def test_limits_and_missing_files():
  assert load_image(FILES["grey"], ImageLimits(bytes=len(FILES["grey"]), pixels=600)).size == (20, 30)
  with pytest.raises(MediaError, match="larger than the limit of 50 bytes"):
    load_image(FILES["grey"], ImageLimits(bytes=50))
  with pytest.raises(MediaError, match="limit is 599 pixels"):
    load_image(FILES["grey"], ImageLimits(pixels=599))
  with pytest.raises(MediaError, match="limit is 599 pixels"):
    load_image(noise(30, 20), ImageLimits(pixels=599))
  with pytest.raises(MediaError, match="cannot be read: No such file"):
    load_image("/nowhere/image.png")
  with pytest.raises(MediaError, match="larger than the limit"):
    load_image("/dev/zero", ImageLimits(bytes=1 << 20))


@pytest.mark.parametrize(
  ("module", "extra"), [("PIL.Image", "multimodal"), ("soundfile", "multimodal"), ("av", "video")]
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, extra):
  monkeypatch.setitem(sys.modules, module, None)
  load = {"PIL.Image": load_image, "soundfile": load_sound, "av": load_video}[module]
  with pytest.raises(ImportError, match=re.escape(f"pip install 'maxtext[{extra}]'")):
    load(b"")


def test_importing_media_imports_no_decoder():
  modules = "audio, images, image_processors, patches, processed, sources, video"
  code = (
    f"import sys; from maxtext.media import {modules}; print({{'PIL', 'soundfile', 'av', 'jax'}} & set(sys.modules))"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout == "set()\n"


def test_damaged_bytes_never_crash():
  """Every kind of file with bytes changed here and there is an image of its size, or an error in words."""
  random = np.random.default_rng(0)
  refused = 0
  for data in FILES.values():
    for _ in range(40):
      changed = np.frombuffer(data, np.uint8).copy()
      at = random.integers(0, len(changed), random.integers(1, 6))
      changed[at] = random.integers(0, 256, len(at))
      try:
        load_image(changed.tobytes(), ImageLimits(pixels=1 << 16))
      except MediaError:
        refused += 1
  assert refused > 100


@pytest.mark.parametrize(
  "kind", [("PNG", {}), ("WEBP", {"lossless": True, "method": 0}), ("GIF", {})], ids=lambda k: k[0]
)
def test_a_bomb_takes_no_memory(tmp_path, kind):
  """A small file of too many pixels that are all there, in a process of its own, whose peak is its own."""
  (tmp_path / "small").write_bytes(encoded(noise(30, 20, "L"), kind[0], **kind[1]))
  (tmp_path / "bomb").write_bytes(encoded(Image.new("L", (8_200, 8_200)), kind[0], **kind[1]))
  code = """
import resource, sys
from maxtext.media.images import load_image
from maxtext.media.sources import MediaError
load_image(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
  load_image(sys.argv[2])
except MediaError as error:
  assert "limit" in str(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
  command = [sys.executable, "-c", code, str(tmp_path / "small"), str(tmp_path / "bomb")]
  grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
  assert grown < 20_000  # kB; decoded, it would be ten times as much


def main():
  """Write what torchvision makes of images: python -m tests.test_media_images, where it and transformers are."""
  from transformers import Llama4ImageProcessor

  cases = []
  sizes = [*SIZES, (336, 336), (337, 336), (672, 672), (1, 3000), (3000, 1), (336, 1344), (1500, 1400), (100, 2000)]
  for size, max_tiles in [(size, n) for n in (16, 4) for size in sizes]:
    found = Llama4ImageProcessor(max_patches=max_tiles)([noise(*size)], return_tensors="pt")
    pixels = found["pixel_values"].float().numpy()
    at = np.random.default_rng(0).integers(0, pixels.size, 100)
    case = {"size": size, "max_tiles": max_tiles, "tiles": found["aspect_ratios"][0].tolist(), "slots": len(pixels)}
    cases.append({**case, "values": [round(float(value), 5) for value in pixels.reshape(-1)[at]]})
  TILED.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
  main()
