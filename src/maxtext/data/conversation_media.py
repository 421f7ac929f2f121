"""Media of conversations that train: counted by their headers, decoded when a row is made."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext.data.chat_messages import media_kind, media_sources
from maxtext.data.media import TOWERS, expand_placeholders, feature_places, media_file, naming_medium
from maxtext.media.audio import load_sound, sound_samples
from maxtext.media.images import image_size, load_image
from maxtext.media.positions import RotaryAxes
from maxtext.media.processed import MediaProcessor, Processed, SlotShape
from maxtext.media.sources import MediaError
from maxtext.media.video import load_video

if TYPE_CHECKING:
  from maxtext.data.tokenizers import TextTokenizer


@dataclass(frozen=True)
class TowerRoom:
  """What a row has room for: so many `slots` of this shape in the inputs of one tower."""

  shape: SlotShape
  slots: int


@dataclass(frozen=True)
class MediaOptions:
  """How media train.

  Attributes:
    processors: make inputs of the towers, for each kind of media.
    placeholders: what the chat template writes where a medium of each kind stands.
    rooms: for the inputs of each tower.
    most: images of a sequence; -1 is no limit.
    axes: of positions of three components; None where positions are numbers.
  """

  processors: Mapping[str, MediaProcessor]
  placeholders: Mapping[str, str]
  rooms: Mapping[str, TowerRoom]
  most: int
  axes: RotaryAxes | None = None

  @property
  def slots(self) -> tuple[int, ...]:
    """Slots of each tower in a row."""
    return tuple(room.slots for room in self.rooms.values())


@dataclass(frozen=True, eq=False)
class PlannedMedium:
  """A medium whose file has been found and whose size is known.

  Attributes:
    kind: image, video or audio.
    source: path, bytes or PIL image.
    text: stands for it in the prompt.
    features: tokens in this text that stand for one feature each.
    slots: that it takes in the inputs of its tower.
    where: its row in the data, for messages.
  """

  kind: str
  source: Any
  text: str
  features: int
  slots: int
  where: str = ""

  def process(self, options: MediaOptions) -> Processed:
    """What its tower takes."""
    name = self.source if isinstance(self.source, str) else f"{self.kind} in the row"
    with naming_medium(f"{self.where or 'the data'}: {name}"):
      found = _LOAD[self.kind](self.source, options.processors[self.kind])
      if found.features != self.features:
        raise MediaError(f"it has {found.features} features, and its header promised {self.features}.")
    return found


@dataclass(frozen=True)
class ConversationMedia:
  """Finds the media of a conversation, and puts their tokens in place of placeholders.

  Attributes:
    options: how media train.
    tokenizer: of the conversation.
    folder: that paths are relative to; None where the data has several.
  """

  options: MediaOptions
  tokenizer: "TextTokenizer"
  folder: str | None = ""

  def planned(self, messages: Sequence[Mapping[str, Any]]) -> list[list[PlannedMedium]]:
    """The media of each message."""
    found, number = list[list[PlannedMedium]](), 0
    for message in messages:
      found.append([])
      for kind, source in media_sources([message]):
        with naming_medium(f"{kind} {number}"):
          found[-1].append(self._plan(kind, source))
        number += 1
    return found

  def opened(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[PlannedMedium]]:
    """The messages with the files of their media, wherever they are read, and these media."""
    media = [medium for own in self.planned(messages) for medium in own]
    left = iter(media)

    def found(part: Any) -> Any:
      kind = media_kind(part)
      return {"type": kind, kind: next(left).source} if kind else part

    parts = [
      {**message, "content": list(map(found, message["content"]))}
      if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
      else message
      for message in messages
    ]
    return parts, media

  def expanded(self, text: str, media: Sequence[PlannedMedium]) -> str:
    """A rendered text with the tokens of media in place of their placeholders."""
    return expand_placeholders(text, self.options.placeholders, [(medium.kind, medium.text) for medium in media])[0]

  def of_tokens(self, tokens: np.ndarray, media: Sequence[PlannedMedium]) -> list[PlannedMedium | None]:
    """The medium of each token that stands for a feature."""
    found: list[PlannedMedium | None] = [None] * len(tokens)
    for kind in dict.fromkeys(medium.kind for medium in media):
      owners = [medium for medium in media if medium.kind == kind for _ in range(medium.features)]
      name = self.options.processors[kind].token
      places = feature_places(self.tokenizer, kind, name, tokens, len(owners))
      for place, owner in zip(places, owners, strict=True):
        found[place] = owner
    return found

  def fit(self, *sequences: Sequence[PlannedMedium | None]) -> bool:
    """Whether a row has room for the media of sequences, which are given for each of their tokens."""
    used, options = np.zeros(len(self.options.rooms), int), self.options
    for sequence in sequences:
      media = [medium for medium, _ in media_places(sequence)]
      if 0 <= options.most < sum(medium.kind == "image" for medium in media):
        return False
      used += [sum(medium.slots for medium in media if TOWERS[medium.kind] == tower) for tower in options.rooms]
    return bool((used <= options.slots).all())

  def _plan(self, kind: str, source: Any) -> PlannedMedium:
    processor = self.options.processors.get(kind)
    if processor is None:
      known = " and ".join(self.options.processors)
      raise MediaError(f"models are trained on {known} parts and text here: leave the part out.")
    file = self._file(source)
    text, features = _PLAN[kind](file, processor)
    return PlannedMedium(kind, file, text, features, -(-features // self.options.rooms[TOWERS[kind]].shape.features))

  def _file(self, source: Any) -> Any:
    """Path, bytes or PIL image, from what data sets hold."""
    source = media_file(source)
    if isinstance(source, str):
      if "://" in source:
        raise MediaError("nothing is fetched from the network: write paths, bytes or data URLs.")
      if self.folder is None and not os.path.isabs(source):
        raise MediaError(f"the files are in several folders, so that {source!r} is in none: write absolute paths.")
      return os.path.join(self.folder or "", source)
    if not isinstance(source, bytes) and not hasattr(source, "getexif"):
      raise MediaError(f"it must be a path, bytes, a data URL or a PIL image, not {type(source).__name__}.")
    return source


def media_places(media: Sequence[PlannedMedium | None] | np.ndarray) -> list[tuple[PlannedMedium, np.ndarray]]:
  """The media of one sequence in their order, each with the places of its tokens, from those of all tokens."""
  found = dict[PlannedMedium, list[int]]()
  for place, medium in enumerate(media):
    if medium is not None:
      found.setdefault(medium, []).append(place)
  return [(medium, np.array(places)) for medium, places in found.items()]


def used_slots(media: np.ndarray, ends: Sequence[int], towers: Sequence[str]) -> np.ndarray:
  """[S+1, towers] the slots that so many first tokens of a document take, whose sequences end at `ends`."""
  used, begin = np.zeros((len(media) + 1, len(towers)), np.int64), 0
  for end in ends:
    for medium, places in media_places(media[begin:end]):
      used[begin + places[0] + 1, towers.index(TOWERS[medium.kind])] += medium.slots
    begin = end
  return used.cumsum(0)


def located(media: np.ndarray, where: str) -> np.ndarray:
  """The media of tokens, see `MEDIUM` in `documents`, which know their row."""
  there = {medium: replace(medium, where=where) for medium in set(media[media.astype(bool)])}
  return np.array([there.get(medium) for medium in media], object)


def _plan_image(file: Any, processor: Any) -> tuple[str, int]:
  size = image_size(file)
  return processor.standing_for(*size), processor.features(*size)


def _plan_video(file: Any, processor: Any) -> tuple[str, int]:
  video = load_video(file)
  about = video.total, video.rate, video.height, video.width
  return processor.standing_for(*about), processor.features(*about)


def _plan_sound(file: Any, processor: Any) -> tuple[str, int]:
  samples = sound_samples(file, processor.rate, processor.limits)
  if samples < processor.chunk * processor.hop:  # convolutions see the end of a short sound, which rows pad
    raise MediaError("the sound is less than a second long, and rows are made of whole seconds: pad it with silence.")
  return processor.standing_for(samples), processor.features(samples)


_PLAN: Mapping[str, Callable[[Any, Any], tuple[str, int]]] = {
  "image": _plan_image, "video": _plan_video, "audio": _plan_sound,
}  # fmt: skip
"""The text that stands for a medium, and its features, from the header."""
_LOAD: Mapping[str, Callable[[Any, Any], Processed]] = {
  "image": lambda file, processor: processor(load_image(file)),
  "video": lambda file, processor: processor(load_video(file)),
  "audio": lambda file, processor: processor(load_sound(file, processor.rate, processor.limits)),
}
