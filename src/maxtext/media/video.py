"""Frames and sound of a video from bytes or a file: counted, sampled and patched as a family says."""

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext.media.audio import MelSounds, SoundLimits, check_rate, check_samples, joined
from maxtext.media.image_processors import FeatureBudget, PixelBudget
from maxtext.media.patches import Filter, Patches, resized
from maxtext.media.processed import FeatureText, Processed, SlotShape
from maxtext.media.sources import MediaError, optional, read_bytes

if TYPE_CHECKING:
  from PIL.Image import Image

# None that names other files: `ffconcat`, which FFmpeg reads too, takes any that lies where the server runs.
FORMATS = ("avi", "flv", "matroska", "mov", "mpegts", "ogg")


@dataclass(frozen=True)
class VideoLimits:
  """`bytes` of the file, `frames` in it, and `pixels` of a frame."""

  bytes: int = 256 << 20
  frames: int = 1 << 18
  pixels: int = 1 << 24


@dataclass(frozen=True)
class Video:
  """A video that is still encoded: only frames that were chosen are kept, and memory is theirs."""

  data: bytes
  total: int
  rate: float
  height: int
  width: int
  limits: VideoLimits

  def frames(self, indices: Sequence[int]) -> "Iterator[Image]":
    """The frames with these rising numbers, in RGB; the last there is in place of those that are damaged at the end."""
    wanted, image = list(indices), None
    with _opened(self.data) as container:
      stream = _bounded(container.streams.video[0], self.limits)
      for number, frame in enumerate(container.decode(stream)):
        if not wanted:
          return
        if number == wanted[0]:
          image = frame.to_image()
          yield image
          wanted.pop(0)
    if image is None:
      raise MediaError("The video has no frame that can be decoded.")
    yield from [image] * len(wanted)

  def sound(self, rate: int = 16_000, limits: SoundLimits | None = None) -> np.ndarray | None:
    """The first sound track as float32 [S] at `rate`: the mean of its channels, resampled. None: there is none."""
    limits = limits or SoundLimits()
    blocks: list[np.ndarray] = []
    samples = 0
    with _opened(self.data) as container:
      if not container.streams.audio:
        return None
      stream = _decodable(container.streams.audio[0])
      own_rate = check_rate(stream.rate, rate)
      planar = optional("av", "video").AudioResampler(format="fltp", rate=own_rate)
      for frame in (part for whole in (*container.decode(stream), None) for part in planar.resample(whole)):
        blocks.append(frame.to_ndarray().mean(0))
        samples += frame.samples
        check_samples(samples, own_rate, limits)
    return joined(blocks, own_rate, rate)


def load_video(source: bytes | str | os.PathLike[str], limits: VideoLimits | None = None) -> Video:
  """A video, its frames counted: headers may lie, and some formats do not say."""
  limits = limits or VideoLimits()
  data = read_bytes(source, limits.bytes)
  with _opened(data) as container:
    if not container.streams.video:
      raise MediaError("The file has no video in it.")
    stream = _bounded(container.streams.video[0], limits)
    total, rate, height, width = 0, float(stream.average_rate or 0), stream.height, stream.width
    for packet in container.demux(stream):
      total += packet.size > 0
      if total > limits.frames:
        raise MediaError(f"The video has more than {limits.frames:,} frames.")
  if not (total and rate > 0 and height and width):
    raise MediaError("The video does not say how large it is, or how fast.")
  return Video(data, total, rate, height, width, limits)


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
  av = optional("av", "video")
  options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"}
  try:
    with av.open(io.BytesIO(data), options=options, metadata_errors="replace") as container:
      yield container
  except av.FFmpegError as error:
    raise MediaError(f"The file is no video of a known format ({', '.join(FORMATS)}): {error.strerror}.") from error


def _bounded(stream: Any, limits: VideoLimits) -> Any:
  """The stream, if its frames are within the limits; the decoder refuses those that are not as the header says."""
  if _decodable(stream).width * stream.height > limits.pixels:
    raise MediaError(f"The video has {stream.width} x {stream.height} pixels; the limit is {limits.pixels:,} pixels.")
  stream.codec_context.options = {"max_pixels": str(limits.pixels)}
  return stream


def _decodable(stream: Any) -> Any:
  if not stream.codec_context:
    raise MediaError("The video is coded in a way that is not known.")
  return stream


@dataclass(frozen=True)
class Sampling:
  """Which frames of a video are looked at: `count` of them, or `fps` per second.

  multiple: their number is one, where there are as many.
  to_end: from the first frame to the last, instead of the first of each of as many equal parts.
  """

  count: int | None = None
  fps: float = 2.0
  min_frames: int = 4
  max_frames: int = 768
  multiple: int = 1
  to_end: bool = False

  def __call__(self, total: int, rate: float) -> list[int]:
    wanted = self.count or min(max(total / rate * self.fps, self.min_frames), self.max_frames)
    frames = max(1, math.floor(min(wanted, total) / self.multiple) * self.multiple)
    if self.to_end:
      return np.linspace(0, total - 1, frames).round().astype(int).tolist()
    return (np.arange(frames) * total // frames).tolist()


@dataclass(frozen=True)
class Videos:
  """Frames of one size in the video's proportions, each group of `patches.frames` in a slot of its own.

  stamp: the format of the text before a group, of the time at its middle: `seconds`, or whole `minute` and `second`;
    empty: the whole video is one text.
  """

  patches: Patches
  budget: PixelBudget | FeatureBudget
  sampling: Sampling
  text: FeatureText
  stamp: str = ""
  between: str = ""
  how: Filter = "bicubic"

  @property
  def token(self) -> str:
    return self.text.token

  @property
  def seconds(self) -> float:
    """What a slot lasts."""
    return self.patches.frames / self.sampling.fps

  @property
  def slot(self) -> SlotShape:
    return self.patches.slot(self.budget.most_features)

  def standing_for(self, total: int, rate: float, height: int, width: int) -> str:
    indices = self.sampling(total, rate)
    filled = indices + indices[-1:] * (-len(indices) % self.patches.frames)
    return self._text(filled, rate, self.features(total, rate, height, width))

  def features(self, total: int, rate: float, height: int, width: int) -> int:
    frames = len(self.sampling(total, rate))
    return math.ceil(frames / self.patches.frames) * self._each(*self.budget.size(height, width, frames))

  def __call__(self, video: Video) -> Processed:
    indices = self.sampling(video.total, video.rate)
    size = self.budget.size(video.height, video.width, len(indices))
    frames = [resized(image, *size, self.how) for image in video.frames(indices)]
    missing = -len(frames) % self.patches.frames
    inputs, grid = self.patches(np.stack(frames + frames[-1:] * missing))
    features = len(inputs) * self._each(*size)
    text = self.standing_for(video.total, video.rate, video.height, video.width)
    return Processed(inputs, grid, text, features)

  def _each(self, height: int, width: int) -> int:
    return height * width // self.budget.multiple**2

  def _text(self, indices: list[int], rate: float, features: int) -> str:
    if not self.stamp:
      return self.text(features)
    step = self.patches.frames
    middles = [(a / rate + b / rate) / 2 for a, b in zip(indices[::step], indices[step - 1 :: step], strict=True)]
    each = self.text(features // len(middles))
    stamps = [self.stamp.format(seconds=at, minute=int(at // 60), second=int(at % 60)) for at in middles]
    return self.between.join(stamp + each for stamp in stamps)


@dataclass(frozen=True)
class VideosWithSound:
  """Videos whose text has the features of their sound, if they have any, between those of the frames.

  around: the token of sound, between what introduces sound and what ends it.
  per_second: features of sound in a second.
  """

  videos: Videos
  sounds: MelSounds
  around: FeatureText
  per_second: float

  @property
  def token(self) -> str:
    return self.videos.token

  @property
  def slot(self) -> SlotShape:
    return self.videos.slot

  def features(self, total: int, rate: float, height: int, width: int) -> int:
    return self.videos.features(total, rate, height, width)

  def standing_for(self, total: int, rate: float, height: int, width: int) -> str:
    """Without sound, whose length no header of a video tells."""
    return self.videos.standing_for(total, rate, height, width)

  def __call__(self, video: Video) -> Processed:
    track = video.sound(self.sounds.rate, self.sounds.limits)
    found = self.videos(video)
    if track is None:
      return found
    sound = self.sounds(track)
    text = interleaved(found, sound, self.token, self.sounds.token, self.videos.seconds, self.per_second)
    return replace(found, text=self.around.start + text + self.around.end, sound=sound)


def interleaved(
  video: Processed, sound: Processed, video_token: str, sound_token: str, seconds: float, per_second: float
) -> str:
  """The text of a video with its sound, in the order of time.

  A slot of the video lasts `seconds`, with `per_second` features of sound each. At the same time the video is first.
  """
  slots = np.repeat(np.arange(len(video.inputs)), video.features // len(video.inputs))
  times = np.concatenate([slots * seconds * per_second, np.arange(sound.features)])
  return "".join(video_token if i < video.features else sound_token for i in np.argsort(times, kind="stable"))
