"""Prompts with images, sound and video: the tokens that stand for them, and the inputs of the model's towers."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.chat_messages import media_sources, template_messages
from maxtext.data.media import TOWERS, expand_placeholders, feature_places, media_file, naming_medium
from maxtext.data.options import rotary_axes
from maxtext.data.tokenizers import TextTokenizer
from maxtext.media.audio import load_sound
from maxtext.media.images import image_size, load_image
from maxtext.media.positions import RotaryAxes, prompt_rotary_positions
from maxtext.media.processed import MediaProcessor, Processed
from maxtext.media.sources import optional
from maxtext.media.video import load_video
from maxtext.models.build import media_processors

MOST_PIXELS = 1 << 25
"""Of all images of a prompt: half a second of decoding."""

Sources = Sequence[tuple[str, Any]]
"""Media of a prompt in their order, each with its kind: paths, bytes, data URLs, or images of Pillow."""


@dataclass(frozen=True, eq=False)
class PromptMedia:
  """What the towers encode for a prompt of S tokens.

  Attributes:
    media: the tower and the inputs of each medium, in the order of the prompt.
    indices: [S] the feature of each token, counted over all media; -1 for tokens of text.
    spans: [S] the number from 1 of the image or frame of each token; 0 for text and sound.
    keys: [S] the tokens, and negative numbers made of the content where they stand for media. Prompts with equal keys
      have equal KV caches.
    rotary_positions: [S,3]; None without mRoPE.
  """

  media: tuple[tuple[str, Processed], ...]
  indices: np.ndarray
  spans: np.ndarray
  keys: np.ndarray
  rotary_positions: np.ndarray | None

  @property
  def rotary_offset(self) -> int:
    """What is added to the positions of tokens behind the prompt for RoPE."""
    return 0 if self.rotary_positions is None else int(self.rotary_positions[-1, 0]) + 1 - len(self.keys)

  @property
  def nbytes(self) -> int:
    """Bytes of what the towers take."""
    return sum(one.inputs.nbytes + one.grid.nbytes for _, one in self.media)

  @property
  def tokens(self) -> Counter[str]:
    """The number of tokens of each tower's media."""
    found = Counter[str]()
    for tower, one in self.media:
      found[tower] += one.features
    return found


EncodedPrompt = tuple[list[int], PromptMedia | None]
"""The tokens of a prompt, and its media if any."""


@dataclass(frozen=True)
class PromptEncoder:
  """Encodes prompts that may have media.

  Attributes:
    tokenizer: of the model.
    processors: makes inputs of the towers, for each kind of media that the model takes.
    placeholders: what the chat template, or the user in a plain prompt, writes where a medium of each kind stands.
    longest: most tokens of a prompt; media are not read further where theirs alone are more.
    axes: of media in positions; None without mRoPE.
    video_pixels: most pixels of all frames of a prompt's videos, which are decoded up to the last that is looked at;
      None for videos of one's own.
  """

  tokenizer: TextTokenizer
  processors: Mapping[str, MediaProcessor]
  placeholders: Mapping[str, str]
  longest: int
  axes: RotaryAxes | None = None
  video_pixels: int | None = None

  @staticmethod
  def of(config: MaxTextConfig, tokenizer: TextTokenizer, longest: int) -> "PromptEncoder":
    """The encoder of a model."""
    c, processors = config, media_processors(config)
    with naming_medium("Prompts with media"):  # now, rather than when the first of them comes
      for module in (_DECODERS[kind] for kind in _DECODERS if kind in processors):
        optional(module, "multimodal")
    placeholders = {"image": c.image_placeholder, "video": c.video_placeholder, "audio": c.audio_placeholder}
    return PromptEncoder(tokenizer, processors, placeholders, longest, rotary_axes(c, processors))

  def chat(self, messages: Any, values: Mapping[str, Any]) -> EncodedPrompt:
    """The tokens that are prefilled for the assistant's answer to messages, and their media.

    Raises:
      ConfigError: the messages, or a medium among them, cannot be read.
    """
    sources = media_sources(messages)
    if not sources:
      return self.tokenizer.chat(template_messages(messages), answer=True, **values).tolist(), None
    media = self._process(sources)
    parts = template_messages(messages, media=True)
    tokens = self.tokenizer.chat(parts, answer=True, expand=lambda text: self._expanded(text, media), **values)
    return self._placed(tokens, media)

  def plain(self, prompt: str, sources: Sources) -> EncodedPrompt:
    """The tokens of a text and its media, which come first unless the text has their placeholders."""
    if not sources:
      return self.tokenizer.encode(prompt).tolist(), None
    media = self._process(sources)
    counts = Counter(kind for kind, _ in sources)
    first = "".join(
      self.placeholders[kind] * max(0, counts[kind] - prompt.count(self.placeholders[kind])) for kind in counts
    )
    return self._placed(self.tokenizer.encode(self._expanded(first + prompt, media), special=True), media)

  def _process(self, sources: Sources) -> "list[_Medium]":
    """What the towers take, in the order of the sources."""
    numbers, opened = Counter[str](), list[tuple[str, _OpenedMedium]]()
    total, pixels = 0, Counter[str]()
    for kind, source in sources:  # headers first, since decoding is what costs
      if kind not in self.processors:
        raise ConfigError(
          f"Prompts with {kind} parts need {_KEYS[kind]}, and a model for which they are supported: docs/multimodal.md."
        )
      name = f"{kind} {numbers[kind]}"
      numbers[kind] += 1
      with naming_medium(name):
        opened.append((name, _OPEN[kind](media_file(source), self.processors[kind])))
      total += opened[-1][1].features
      pixels[kind] += opened[-1][1].pixels
      if total >= self.longest:
        raise ConfigError(
          f"The media have {total} tokens or more, and a prompt has fewer than "
          f"max_prefill_predict_length={self.longest}."
        )
      for counted, most in (("image", MOST_PIXELS), ("video", self.video_pixels)):
        if most is not None and pixels[counted] > most:
          raise ConfigError(f"The {counted}s have {pixels[counted]:,} pixels, and those of a prompt may have {most:,}.")
    found = []
    for (kind, _), (name, one) in zip(sources, opened, strict=True):
      with naming_medium(name):
        found.append(_Medium(kind, one.process()))
    return found

  def _expanded(self, text: str, media: "list[_Medium]") -> str:
    """The text with what stands for each medium in place of its placeholder; sorts the media as the text has them."""
    pairs = [(one.kind, one.processed.text) for one in media]
    text, order = expand_placeholders(text, self.placeholders, pairs)
    media[:] = [media[number] for number in order]
    return text

  def _placed(self, tokens: np.ndarray, media: "Sequence[_Medium]") -> tuple[list[int], PromptMedia]:
    """Finds the tokens of each medium, whose features come in the order of the prompt."""
    wanted = Counter[str]()
    for one in media:
      for kind, processed in one.parts:
        wanted[kind] += processed.features
    left = {
      kind: feature_places(self.tokenizer, kind, self.processors[kind].token, tokens, count)
      for kind, count in wanted.items()
    }
    parts, keys = list[tuple[str, Processed]](), tokens.astype(np.int64)
    indices, spans = np.full(len(tokens), -1, np.int32), np.zeros(len(tokens), np.int32)
    runs, first, slots = list[tuple[np.ndarray, np.ndarray, np.ndarray]](), 0, 0
    for one in media:
      places, axes, numbers = [], [], []
      for kind, processed in one.parts:
        own, left[kind] = np.split(left[kind], [processed.features])
        indices[own] = first + np.arange(processed.features)
        keys[own] = one.key
        if kind != "audio":
          spans[own] = slots + 1 + np.arange(processed.features) // (processed.features // len(processed.inputs))
          slots += len(processed.inputs)
        first += processed.features
        parts.append((TOWERS[kind], processed))
        places.append(own)
        if self.axes is not None:
          axes.append(self.axes(kind, processed))
        numbers.append(np.full(len(own), len(places)))
      if axes:
        order = np.argsort(np.concatenate(places))
        runs.append((np.concatenate(places)[order], np.concatenate(axes)[order], np.concatenate(numbers)[order]))
    rotary = None if self.axes is None else prompt_rotary_positions(len(tokens), runs)
    return tokens.tolist(), PromptMedia(tuple(parts), indices, spans, keys, rotary)


@dataclass(frozen=True)
class _Medium:
  """What stands for one placeholder."""

  kind: str
  processed: Processed

  @property
  def parts(self) -> list[tuple[str, Processed]]:
    """The medium, and the sound of a video."""
    sound = self.processed.sound
    return [(self.kind, self.processed), *([] if sound is None else [("audio", sound)])]

  @property
  def key(self) -> int:
    """A negative number made of all that the towers and the positions depend on."""
    digest = hashlib.sha256(self.kind.encode())
    for _, one in self.parts:
      for array in (one.inputs, one.grid):
        digest.update(repr(array.shape).encode() + array.tobytes())
    return -1 - int.from_bytes(digest.digest()[:7], "big")


@dataclass(frozen=True)
class _OpenedMedium:
  """A medium of which the header was read: how many features and pixels it has at least, and what decodes it."""

  features: int
  pixels: int
  process: Callable[[], Processed]


def _open_image(source: Any, processor: Any) -> _OpenedMedium:
  height, width = image_size(source)
  return _OpenedMedium(processor.features(height, width), height * width, lambda: processor(load_image(source)))


def _open_sound(source: Any, processor: Any) -> _OpenedMedium:
  return _OpenedMedium(1, 0, lambda: processor(load_sound(source, processor.rate, processor.limits)))


def _open_video(source: Any, processor: Any) -> _OpenedMedium:
  video = load_video(source)
  features = processor.features(video.total, video.rate, video.height, video.width)
  return _OpenedMedium(features, video.total * video.height * video.width, lambda: processor(video))


_DECODERS = {"image": "PIL.Image", "audio": "soundfile"}
_OPEN = {"image": _open_image, "audio": _open_sound, "video": _open_video}
_KEYS = {"image": "use_multimodal=true", "video": "use_multimodal=true", "audio": "use_audio=true"}
