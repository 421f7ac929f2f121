"""Videos become what transformers' video processors make of them; files that are none become errors."""

import io
import json
import types
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from maxtext.media.audio import MelSounds, SoundLimits
from maxtext.media.image_processors import FeatureBudget, PixelBudget
from maxtext.media.patches import Patches
from maxtext.media.processed import FeatureText
from maxtext.media.sources import MediaError
from maxtext.media.video import Sampling, VideoLimits, Videos, interleaved, load_video

REFERENCE = Path(__file__).parent / "data" / "videos.json"  # of torchvision, which is not installed here; see main
FILMS = [(9, 48, 64, 3), (2, 100, 40, 25), (30, 120, 90, 30), (60, 64, 200, 24), (1, 32, 32, 10), (45, 20, 20, 7.5)]
PAD = "<|video_pad|>"
KINDS = {
  "omni": Videos(
    Patches(16, merge=2, frames=2),
    PixelBudget(32, 128 * 32 * 32, 768 * 32 * 32),
    Sampling(fps=2, multiple=2),
    FeatureText(PAD),
  ),
  "vl": Videos(
    Patches(16, merge=2, frames=2),
    PixelBudget(32, 4096, 65536, frames=2),
    Sampling(fps=2, to_end=True),
    FeatureText(PAD, "<|vision_start|>", "<|vision_end|>"),
    stamp="<{seconds:.1f} seconds>",
  ),
  "pooled": Videos(
    Patches(16, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), channels_last=True),
    FeatureBudget(48, 70),
    Sampling(count=8),
    FeatureText("<|video|>", "<|image>", "<image|>"),
    stamp="{minute:02d}:{second:02d} ",
    between=" ",
  ),
}


def film(frames, height, width, seed=0):
  """Noise over a gradient that moves: wrong frames, rows, columns and channels all show."""
  random = np.random.default_rng(seed + frames * 1_000_000 + height * 1_000 + width)
  ramp = np.linspace(0, 150, height * width * 3).reshape(height, width, 3)
  steps = np.arange(frames).reshape(-1, 1, 1, 1) * 37 % 60
  return (ramp + steps + random.integers(0, 45, (frames, height, width, 3))).astype(np.uint8)


def encoded(frames, rate, kind="matroska", codec="ffv1", pixels="bgr0", sound=None):
  """A file of frames [F,H,W,3], without loss unless told otherwise, with sound [S,2] in int16 at 48 kHz."""
  file = io.BytesIO()
  with av.open(file, "w", format=kind) as container:
    stream = container.add_stream(codec, rate=Fraction(rate))
    stream.height, stream.width = frames.shape[1:3]
    stream.pix_fmt = pixels
    track = None if sound is None else container.add_stream("pcm_s16le", rate=48_000, layout="stereo")
    for values in frames:
      container.mux(stream.encode(av.VideoFrame.from_ndarray(values, "rgb24").reformat(format=pixels)))
    container.mux(stream.encode())
    if track:
      for start in range(0, len(sound), 4_800):
        part = av.AudioFrame.from_ndarray(sound[start : start + 4_800].reshape(1, -1), "s16", "stereo")
        part.sample_rate, part.pts, part.time_base = 48_000, start, Fraction(1, 48_000)
        container.mux(track.encode(part))
  return file.getvalue()


@pytest.mark.parametrize(
  "case", json.loads(REFERENCE.read_text()), ids=lambda c: "-".join(map(str, [c["kind"], *c["film"]]))
)
def test_videos_are_the_reference_s(case):
  """Sizes, frames and grids are equal; levels are within one, since torchvision rounds otherwise than Pillow."""
  *size, rate = case["film"]
  video, processor = load_video(encoded(film(*size), rate)), KINDS[case["kind"]]
  assert (video.total, video.height, video.width) == tuple(size)
  assert video.rate == pytest.approx(rate)
  assert processor.sampling(video.total, video.rate) == case["indices"]
  found = processor(video)
  assert list(found.inputs.shape) == case["shape"]
  np.testing.assert_array_equal(found.grid.reshape(-1, 3).max(0) + 1, case["grid"])
  at = np.random.default_rng(0).integers(0, found.inputs.size, len(case["values"]))
  levels = np.abs(found.inputs.reshape(-1)[at] - case["values"]) * 255 * np.mean(processor.patches.std)
  assert levels.max() < 1.01
  assert levels.mean() < 0.1
  assert found.features == processor.features(video.total, video.rate, *size[1:])
  assert found.text == case["text"]
  assert found.text.count(processor.text.token) == found.features


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_reference_s(kind):
  """Three minutes of small frames, so that minutes and many frames are seen."""
  size = (900, 16, 24)
  video = load_video(encoded(film(*size), 5))
  processor = KINDS[kind]
  found = processor(video)
  indices = processor.sampling(video.total, video.rate)
  assert found.text == reference_text(kind, indices, video.rate, found)
  assert len(indices) == {"omni": 360, "vl": 360, "pooled": 8}[kind]


def reference_text(kind, indices, rate, found):
  from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
  from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

  if kind == "omni":  # as its processor expands: one token for each feature
    return PAD * (found.inputs.shape[0] * found.inputs.shape[1] // 4)
  times = [index / rate for index in indices]
  metadata = types.SimpleNamespace(fps=rate, frames_indices=np.asarray(indices), timestamps=times)
  rows, columns = found.grid[0, :, 1:].max(0) + 1
  inputs = {
    "video_grid_thw": [np.array([len(found.inputs), rows, columns])],
    "video_metadata": [metadata],
    "num_soft_tokens_per_video": [rows * columns // 9],
  }
  tokens = {"video_token": KINDS[kind].text.token, "boi_token": "<|image>", "eoi_token": "<image|>"}
  ends = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
  around = types.SimpleNamespace(
    **tokens, **ends, video_processor=types.SimpleNamespace(merge_size=2, temporal_patch_size=2)
  )
  around._calculate_timestamps = lambda *args: Qwen3VLProcessor._calculate_timestamps(around, *args)
  processor = Qwen3VLProcessor if kind == "vl" else Gemma4Processor
  return processor.replace_video_token(around, inputs, 0)


def test_sampling_is_the_reference_s():
  """Qwen 2's samples are steps in float32, which miss a whole number by one now and then, or end one too late."""
  torch = pytest.importorskip("torch")
  from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

  equal = 0
  for total in [*range(4, 300, 7), 1_000, 5_400]:
    for rate in (7.5, 24.0, 30.0):
      ours = KINDS["omni"].sampling(total, rate)
      steps = torch.arange(0, total, total / len(ours)).int().tolist()
      assert len(ours) == max(4, min(768, total, total / rate * 2) // 2 * 2)
      assert all(
        a == b or (a == b + 1 and a == i * total / len(ours)) for i, (a, b) in enumerate(zip(ours, steps, strict=False))
      )
      equal += ours == steps
      around = types.SimpleNamespace(fps=2, min_frames=4, max_frames=768)
      metadata = types.SimpleNamespace(total_num_frames=total, fps=rate)
      assert KINDS["vl"].sampling(total, rate) == Qwen3VLVideoProcessor.sample_frames(around, metadata).tolist()
  assert equal > 100


def test_budgets_are_the_reference_s():
  """Of all frames together, and of each."""
  from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_each
  from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_all

  random = np.random.default_rng(0)
  for _ in range(2_000):
    height, width = (int(2 ** random.uniform(2, 11)) for _ in range(2))
    count, factor = int(random.integers(2, 40)), int(random.choice([28, 32]))
    low = int(2 ** random.uniform(10, 18))
    bounds = {"min_pixels": low, "max_pixels": low * int(random.integers(2, 200))}
    if max(height, width) > 190 * min(height, width):
      continue
    assert PixelBudget(factor, **bounds).size(height, width, count) == of_each(height, width, factor, **bounds)
    together = PixelBudget(factor, **bounds, frames=2).size(height, width, count)
    assert together == of_all(count, height, width, 2, factor, **bounds)


@pytest.mark.parametrize(("seconds", "samples"), [(2.0, 40_000), (1.0, 160_000), (2 / 3, 16_000), (0.5, 320_000)])
def test_sound_is_interleaved_as_in_the_reference(seconds, samples):
  from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

  names = ("image_token", "audio_token", "video_token", "vision_bos_token", "vision_eos_token")
  names += ("audio_bos_token", "audio_eos_token")
  tokens = {name: f"<|{name}|>" for name in names}
  tower = types.SimpleNamespace(merge_size=2)
  around = types.SimpleNamespace(**tokens, image_processor=tower, video_processor=tower)
  video = KINDS["omni"](load_video(encoded(film(30, 120, 90), 5)))
  sound = MelSounds(FeatureText("<|audio_token|>"))(np.zeros(samples, np.float32))
  grid = [np.append(len(video.inputs), video.grid[0, :, 1:].max(0) + 1)]
  expand = Qwen3OmniMoeProcessor.replace_multimodal_special_tokens
  prompt = "a<|vision_bos_token|><|video_token|><|vision_eos_token|>b"
  [text] = expand(around, [prompt], iter([sound.features]), iter([]), iter(grid), iter([seconds]), True, 13.0, 2.0)
  found = interleaved(video, sound, "<|video_token|>", "<|audio_token|>", seconds, 13.0)
  starts, ends = "<|vision_bos_token|><|audio_bos_token|>", "<|audio_eos_token|><|vision_eos_token|>"
  assert text == f"a{starts}{found}{ends}b"


@pytest.mark.parametrize("indices", [[0], [0, 3, 8], [8], [2, 3, 4]])
def test_frames_are_the_frames(indices):
  frames = film(9, 48, 64)
  video = load_video(encoded(frames, 3))
  found = [np.asarray(image) for image in video.frames(indices)]
  np.testing.assert_array_equal(found, frames[indices])


@pytest.mark.parametrize(
  ("kind", "codec"), [("mp4", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx-vp9"), ("mpegts", "libx264")]
)
def test_files_of_each_kind(tmp_path, kind, codec):
  """Smooth frames that grow brighter: a lossy codec keeps their order and nearly their levels."""
  frames = np.broadcast_to(np.arange(40, 200, 8, np.uint8).reshape(-1, 1, 1, 1), (20, 64, 96, 3))
  path = tmp_path / "film"
  path.write_bytes(encoded(np.ascontiguousarray(frames), 10, kind, codec, "yuv420p"))
  video = load_video(path)
  assert (video.total, video.height, video.width, round(video.rate)) == (20, 64, 96, 10)
  found = [np.asarray(image).mean() for image in video.frames(list(range(20)))]
  np.testing.assert_allclose(found, frames[:, 0, 0, 0], atol=4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_frame_stands_still(kind):
  """The references refuse it, or want two; here it is one slot of the same frame."""
  frames = film(1, 200, 300)
  found = KINDS[kind](load_video(encoded(frames, 10)))
  if kind == "pooled":
    assert len(found.inputs) == 1
    return
  twice = KINDS[kind](load_video(encoded(np.repeat(frames, 2, 0), 10)))
  np.testing.assert_array_equal(found.inputs, twice.inputs)
  assert found.features == twice.features == KINDS[kind].features(1, 10, 200, 300)


def test_the_end_of_a_damaged_video_is_its_last_frame():
  frames = film(9, 48, 64)
  data = encoded(frames, 3)
  whole = load_video(data)
  cut = type(whole)(data[: len(data) * 2 // 3], whole.total, whole.rate, whole.height, whole.width, whole.limits)
  found = [np.asarray(image) for image in cut.frames(list(range(9)))]
  assert len(found) == 9
  np.testing.assert_array_equal(found[3], frames[3])
  np.testing.assert_array_equal(found[-1], found[-2])


def test_sound_tracks():
  time = np.arange(48_000) / 48_000
  tones = np.stack([np.sin(2 * np.pi * 500 * time), np.sin(2 * np.pi * 900 * time)], 1) * 0.4
  data = encoded(film(9, 48, 64), 3, sound=(tones * 32_768).astype(np.int16))
  sound = load_video(data).sound()
  other = np.arange(16_000) / 16_000
  expected = 0.2 * (np.sin(2 * np.pi * 500 * other) + np.sin(2 * np.pi * 900 * other))
  assert sound.dtype == np.float32
  assert len(sound) == 16_000
  np.testing.assert_allclose(sound[200:-200], expected[200:-200], atol=1e-4)
  assert load_video(encoded(film(9, 48, 64), 3)).sound() is None
  with pytest.raises(MediaError, match="limit of 47,999 samples"):
    load_video(data).sound(limits=SoundLimits(samples=47_999))


def test_what_is_no_video_is_an_error_in_words(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  whole = encoded(film(9, 48, 64), 3)
  (tmp_path / "secret.mkv").write_bytes(whole)
  files = {"concatenation": b"ffconcat version 1.0\nfile secret.mkv\n", "NUT": encoded(film(9, 48, 64), 3, "nut")}
  for data in files.values():  # FFmpeg would read them
    with av.open(io.BytesIO(data)) as container:
      assert len(list(container.decode(video=0))) == 9
  for data in (b"", b"no video at all", whole[:100], *files.values()):
    with pytest.raises(MediaError, match="no video of a known format"):
      load_video(data)


def test_a_sound_is_no_video():
  file = io.BytesIO()
  soundfile.write(file, np.zeros(9_000), 16_000, format="OGG")
  with pytest.raises(MediaError, match="has no video in it"):
    load_video(file.getvalue())


def test_limits():
  data = encoded(film(9, 48, 64), 3)
  load_video(data, VideoLimits(len(data), 9, 48 * 64))
  for limits, words in [
    (VideoLimits(bytes=999), "limit of 999 bytes"),
    (VideoLimits(frames=8), "more than 8 frames"),
    (VideoLimits(pixels=48 * 64 - 1), "limit is 3,071 pixels"),
  ]:
    with pytest.raises(MediaError, match=words):
      load_video(data, limits)


def test_damaged_bytes_never_crash():
  random = np.random.default_rng(0)
  outcomes = {"taken": 0, "refused": 0}
  for kind, codec, pixels in [("matroska", "ffv1", "bgr0"), ("mp4", "libx264", "yuv420p"), ("avi", "mpeg4", "yuv420p")]:
    data = encoded(film(6, 48, 64), 3, kind, codec, pixels)
    for _ in range(30):
      changed = np.frombuffer(data, np.uint8).copy()
      at = random.integers(0, len(changed), 40)
      changed[at] = random.integers(0, 256, len(at))
      try:
        KINDS["vl"](load_video(changed.tobytes(), VideoLimits(pixels=1 << 16)))
        outcomes["taken"] += 1
      except MediaError:
        outcomes["refused"] += 1
  assert min(outcomes.values()) > 5, outcomes


def main():
  """Write what torchvision makes of videos: python -m tests.test_media_video, where it and transformers are."""
  import torch
  from transformers import Gemma4VideoProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
  from transformers.video_utils import VideoMetadata

  half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
  patch = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
  omni = {"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}, **patch, **half}
  processors = {
    "omni": (Qwen2VLVideoProcessor(**omni), {"fps": 2}),
    "vl": (Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 65536}), {"fps": 2}),
    "pooled": (Gemma4VideoProcessor(), {"num_frames": 8}),
  }
  cases = []
  for kind, (processor, options) in processors.items():
    for *size, rate in FILMS:
      if size[0] < {"omni": 2, "vl": 2, "pooled": 8}[kind]:  # refused there
        continue
      metadata = VideoMetadata(total_num_frames=size[0], fps=rate)
      video = torch.from_numpy(film(*size)).permute(0, 3, 1, 2)
      options = {"do_sample_frames": True, "return_metadata": True, "return_tensors": "pt", **options}
      found = processor([video], video_metadata=[metadata], **options)
      pixels = found["pixel_values_videos"].numpy()
      indices = np.asarray(found["video_metadata"][0].frames_indices).tolist()
      if kind == "pooled":
        there = found["video_position_ids"][0, :, 0].numpy() >= 0
        pixels, (columns, rows) = pixels[:, there], found["video_position_ids"][0].numpy().max(0) + 1
        grid = [len(pixels), int(rows), int(columns)]
      else:
        grid = found["video_grid_thw"][0].tolist()
        pixels = pixels.reshape(grid[0], grid[1] * grid[2], -1)
      places = np.stack(np.unravel_index(np.arange(np.prod(grid)), grid), -1).reshape(grid[0], -1, 3)
      text = reference_text(kind, indices, rate, types.SimpleNamespace(inputs=pixels, grid=places))
      at = np.random.default_rng(0).integers(0, pixels.size, 100)
      values = [round(float(value), 6) for value in pixels.reshape(-1)[at]]
      film_ = {"kind": kind, "film": [*size, rate], "indices": indices, "shape": pixels.shape, "grid": grid}
      cases.append({**film_, "text": text, "values": values})
  REFERENCE.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
  main()
