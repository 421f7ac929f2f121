"""Sound from bytes and files as one channel at one rate, and as the spectrogram that an audio tower takes."""

import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from maxtext.media.processed import FeatureText, Processed, SlotShape
from maxtext.media.sources import MediaError, optional, read_bytes

FORMATS = ("FLAC", "MP3", "OGG", "WAV", "WAVEX")
RATES = range(1_000, 192_001)
MOST_PHASES = 1_000  # 640 are those of 11,025 to 16,000 samples per second
FINE = 4096


@dataclass(frozen=True)
class SoundLimits:
  """`bytes` of the file, and of one channel before resampling `samples` and `seconds`."""

  bytes: int = 64 << 20
  samples: int = 1 << 26
  seconds: float = math.inf


def load_sound(
  source: bytes | str | os.PathLike[str], rate: int = 16_000, limits: SoundLimits | None = None
) -> np.ndarray:
  """A sound as float32 [S] at `rate`: the mean of its channels, resampled."""
  limits = limits or SoundLimits()
  blocks, samples = [], 0
  with _opened(source, limits) as file:
    own_rate = check_rate(file.samplerate, rate)
    while len(block := file.read((1 << 20) // file.channels, dtype="float32", always_2d=True)):
      blocks.append(block.mean(1))
      samples += len(block)
      check_samples(samples, own_rate, limits)
  return joined(blocks, own_rate, rate)


def sound_samples(source: bytes | str | os.PathLike[str], rate: int = 16_000, limits: SoundLimits | None = None) -> int:
  """How many samples `load_sound` would return, from the header of a file."""
  limits = limits or SoundLimits()
  with _opened(source, limits) as file:
    own_rate, samples = check_rate(file.samplerate, rate), file.frames
  check_samples(samples, own_rate, limits)
  return resampled_length(samples, own_rate, rate)


@contextmanager
def _opened(source: bytes | str | os.PathLike[str], limits: SoundLimits) -> Iterator[Any]:
  """The sound with its header read; whatever is wrong with it is a MediaError."""
  soundfile = optional("soundfile", "multimodal")
  try:
    with soundfile.SoundFile(io.BytesIO(read_bytes(source, limits.bytes))) as file:
      if file.format not in FORMATS:
        raise MediaError(f"The sound is {file.format}; it can be {', '.join(FORMATS)}.")
      yield file
  except soundfile.LibsndfileError as error:
    raise MediaError(f"The file is no sound of a known format ({', '.join(FORMATS)}): {error.error_string}") from error


def check_rate(own_rate: int, rate: int) -> int:
  """The rate of a sound, if resampling from it does not take long: nobody records at others."""
  if own_rate not in RATES:
    raise MediaError(f"The sound has {own_rate} samples per second; it can have {RATES[0]} to {RATES[-1]}.")
  if rate // math.gcd(own_rate, rate) > MOST_PHASES:
    raise MediaError(f"The sound has {own_rate} samples per second, which is no usual rate: give it {rate}, or 44100.")
  return own_rate


def check_samples(samples: int, rate: int, limits: SoundLimits) -> None:
  if samples > limits.samples:
    raise MediaError(f"The sound is longer than the limit of {limits.samples:,} samples.")
  if samples > limits.seconds * rate:
    raise MediaError(f"The sound is longer than the limit of {limits.seconds:.6g} seconds.")


def joined(blocks: list[np.ndarray], own_rate: int, rate: int) -> np.ndarray:
  """Blocks of one channel as one sound; files of floats may hold what is no number."""
  whole = np.concatenate([np.zeros(0, np.float32), *blocks])
  if not np.isfinite(whole).all():
    raise MediaError("The sound has samples that are not finite numbers.")
  return resample(whole, own_rate, rate)


def resampled_length(samples: int, own_rate: int, rate: int) -> int:
  """Samples of a sound at another rate."""
  return -(-samples * rate // own_rate)


def resample(samples: np.ndarray, own_rate: int, rate: int) -> np.ndarray:
  """float32 [S] at another rate: a sinc over 64 of its zeros under a Kaiser window, as resampy's `kaiser_best`.

  Output k lies at k * down / up samples of the input, so all outputs with the same k modulo `up` have the same weights.
  """
  if own_rate == rate or not len(samples):
    return samples
  divisor = math.gcd(own_rate, rate)
  up, down = rate // divisor, own_rate // divisor
  cutoff = 0.9475937167399596 * min(1, rate / own_rate)
  width = math.ceil(64 / cutoff)
  count = resampled_length(len(samples), own_rate, rate)
  windows = np.lib.stride_tricks.sliding_window_view(np.pad(samples, (width, width + down)), 2 * width + 1)
  sinc = _windowed_sinc()
  found = np.empty(count, np.float32)
  for phase in range(min(up, count)):
    first, rest = divmod(phase * down, up)
    place, part = np.divmod(np.abs(rest / up - np.arange(-width, width + 1)) * cutoff * FINE, 1)
    near = np.minimum(place.astype(int), 64 * FINE)
    weights = (cutoff * ((1 - part) * sinc[near] + part * sinc[near + 1])).astype(np.float32)
    outputs = len(range(phase, count, up))
    found[phase::up] = np.einsum("ij,j->i", windows[first::down][:outputs], weights)
  return found


@lru_cache
def _windowed_sinc() -> np.ndarray:
  """At every 1/FINE to its last zero, and nothing after it: between two values a line is within 1e-7."""
  at, beta = np.linspace(0, 64, 64 * FINE + 1), 14.769656459379492
  return np.append(np.sinc(at) * np.i0(beta * np.sqrt(1 - (at / 64) ** 2)) / np.i0(beta), 0)


@dataclass(frozen=True)
class MelSounds:
  """Whisper's logarithms of power in `bins` mel bands, in chunks of `chunk` frames that the tower halves a few times.

  The last chunk is padded with zeros to the length of the others. A sound of less than a chunk is not, as in the
  reference, whose convolutions would see the padding. `attended` frames attend to each other; a sound has `longest` at
  most.
  """

  text: FeatureText
  rate: int = 16_000
  window: int = 400
  hop: int = 160
  bins: int = 128
  chunk: int = 100
  attended: int = 800
  longest: int = 30_000
  halvings: int = 3

  @property
  def token(self) -> str:
    return self.text.token

  @property
  def limits(self) -> SoundLimits:
    return SoundLimits(seconds=(self.longest + 1) * self.hop / self.rate)

  @property
  def slot(self) -> SlotShape:
    most = math.ceil(self.longest / self.chunk)
    return SlotShape(self.chunk, self.bins, self.features(self.chunk * self.hop), most, "sound", 2**self.halvings)

  def standing_for(self, samples: int) -> str:
    return self.text(self.features(samples))

  def features(self, samples: int) -> int:
    chunks, rest = divmod(samples // self.hop, self.chunk)
    halved = 2**self.halvings
    return chunks * math.ceil(self.chunk / halved) + math.ceil(rest / halved)

  def __call__(self, sound: np.ndarray) -> Processed:
    """`sound` is [S] at `rate`."""
    frames = len(sound) // self.hop
    if not frames:
      raise MediaError(f"The sound has {len(sound)} samples; it must have {self.hop} at least.")
    if frames > self.longest:
      raise MediaError(f"The sound has {frames} frames of {self.hop} samples; the limit is {self.longest}.")
    count, length = math.ceil(frames / self.chunk), min(frames, self.chunk)
    inputs = np.zeros((count * length, self.bins), np.float32)
    inputs[:frames] = self._spectrogram(sound)
    grid = np.zeros((count * length, 3), np.int32)
    grid[:, 0] = np.arange(count * length) % length
    grid[:, 1] = np.arange(count * length) // self.attended
    grid[frames:] = -1
    features = self.features(len(sound))
    shape = (count, length, -1)
    return Processed(inputs.reshape(shape), grid.reshape(shape), self.text(features), features)

  def _spectrogram(self, sound: np.ndarray) -> np.ndarray:
    """[S // hop, bins]; eight decades below the loudest at most, about 0."""
    padded = np.pad(sound, self.window // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.hop][: len(sound) // self.hop]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
    filters = _mel_filters(self.bins, self.window, self.rate)
    blocks = [windows[i : i + 4096] for i in range(0, len(windows), 4096)]  # float64 of all would be 20 times the sound
    power = np.concatenate([np.abs(np.fft.rfft(block * hann)) ** 2 @ filters for block in blocks])
    log = np.log10(np.maximum(power, 1e-10)).astype(np.float32)
    return (np.maximum(log, log.max() - 8) + 4) / 4


@lru_cache
def _mel_filters(bins: int, window: int, rate: int) -> np.ndarray:
  """[window // 2 + 1, bins] triangles of equal area, even in Slaney's mel: linear to 1 kHz, then logarithmic."""
  step = math.log(6.4) / 27
  top = 15 + math.log(rate / 2 / 1000) / step
  mels = np.linspace(0, top, bins + 2)
  edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
  at = np.linspace(0, rate / 2, window // 2 + 1)[:, None]
  rising, falling = (at - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - at) / np.diff(edges)[1:]
  return np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))
