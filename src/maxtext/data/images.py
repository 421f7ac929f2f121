"""Images of conversations that train: counted by their headers, decoded when a row is made."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxtext.configs import ConfigError
from maxtext.data.chat_messages import media_kind, media_sources
from maxtext.data.media import expand_placeholders, feature_places, media_file, naming_medium
from maxtext.media.images import image_size, load_image
from maxtext.media.processed import ImageProcessor, SlotShape
from maxtext.media.sources import MediaError

if TYPE_CHECKING:
  from maxtext.data.tokenizers import TextTokenizer

_KIND = "image"


@dataclass(frozen=True)
class ImageOptions:
  """How images train.

  Attributes:
    processor: makes inputs of the tower.
    shape: of an input.
    placeholder: what the chat template writes where an image stands.
    slots: inputs that a row has room for.
    most: images of a sequence; -1 is no limit.
  """

  processor: ImageProcessor
  shape: SlotShape
  placeholder: str
  slots: int
  most: int

  @property
  def features(self) -> int:
    """Features that a row has room for."""
    return self.slots * self.shape.features


@dataclass(frozen=True, eq=False)
class PlannedImage:
  """An image whose file has been found and whose size is known.

  Attributes:
    source: path, bytes or PIL image.
    text: stands for it in the prompt.
    features: tokens in this text that stand for one feature each.
    where: its row in the data, for messages.
  """

  source: Any
  text: str
  features: int
  where: str = ""

  def inputs(self, options: ImageOptions) -> np.ndarray:
    """The tower's inputs [N,T,P]."""
    with naming_medium(f"{self.where or 'the data'}: {self.source if isinstance(self.source, str) else 'an image'}"):
      found = options.processor(load_image(self.source)).inputs
    assert len(found) * options.shape.features == self.features, "an image has another size than its header says"
    return found


@dataclass(frozen=True)
class ConversationImages:
  """Finds the images of a conversation, and puts their tokens in place of placeholders.

  Attributes:
    options: how images train.
    tokenizer: of the conversation.
    folder: that paths are relative to; None where the data has several.
  """

  options: ImageOptions
  tokenizer: "TextTokenizer"
  folder: str | None = ""

  def planned(self, messages: Sequence[Mapping[str, Any]]) -> list[list[PlannedImage]]:
    """The images of each message."""
    found, number = list[list[PlannedImage]](), 0
    for message in messages:
      found.append([])
      for kind, source in media_sources([message]):
        with naming_medium(f"{kind} {number}"):
          found[-1].append(self._plan(kind, source))
        number += 1
    return found

  def opened(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[PlannedImage]]:
    """The messages with the files of their images, wherever they are read, and these images."""
    images = [image for own in self.planned(messages) for image in own]
    left = iter(images)

    def found(part: Any) -> Any:
      return {"type": _KIND, _KIND: next(left).source} if media_kind(part) else part

    parts = [
      {**message, "content": list(map(found, message["content"]))}
      if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
      else message
      for message in messages
    ]
    return parts, images

  def expanded(self, text: str, images: Sequence[PlannedImage]) -> str:
    """A rendered text with the tokens of images in place of their placeholders."""
    return expand_placeholders(text, {_KIND: self.options.placeholder}, [(_KIND, image.text) for image in images])[0]

  def of_tokens(self, tokens: np.ndarray, images: Sequence[PlannedImage]) -> list[PlannedImage | None]:
    """The image of each token that stands for a feature."""
    found: list[PlannedImage | None] = [None] * len(tokens)
    features = sum(image.features for image in images)
    places = feature_places(self.tokenizer, _KIND, self.options.processor.token, tokens, features)
    owners = [image for image in images for _ in range(image.features)]
    for place, owner in zip(places, owners, strict=True):
      found[place] = owner
    return found

  def fit(self, *sequences: Sequence[PlannedImage | None]) -> bool:
    """Whether a row has room for the images of sequences, which are given for each of their tokens."""
    features = sum(image is not None for images in sequences for image in images)
    counts, most = [len(distinct(images)) for images in sequences], self.options.most
    return features <= self.options.features and (most < 0 or max(counts, default=0) <= most)

  def _plan(self, kind: str, source: Any) -> PlannedImage:
    if kind != _KIND:
      raise MediaError("models are trained on images and text: leave the part out.")
    file = self._file(source)
    size = image_size(file)
    return PlannedImage(file, self.options.processor.standing_for(*size), self.options.processor.features(*size))

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


class ImageRows(NamedTuple):
  """Images of R rows of S tokens.

  Attributes:
    inputs: [R,M,T,P] of the tower; those that no token refers to are zeros.
    indices: [R,S] the feature of each token, counted over the inputs of its row; -1 for text.
  """

  inputs: np.ndarray
  indices: np.ndarray

  @staticmethod
  def empty(options: ImageOptions, rows: int, length: int) -> "ImageRows":
    """Rows of text."""
    shape = rows, options.slots, options.shape.patches, options.shape.values
    return ImageRows(np.zeros(shape, np.float32), np.full((rows, length), -1, np.int32))

  def add(self, options: ImageOptions, row: int, start: int, images: np.ndarray) -> None:
    """Adds the images of tokens that begin at `start`; see `IMAGE` in `documents`."""
    places = start + np.flatnonzero(images.astype(bool))
    used, found = int(self.indices[row].max()) + 1, distinct(images)
    assert sum(image.features for image in found) == len(places), "an image was cut from its text"
    self.indices[row, places] = used + np.arange(len(places))
    slot = used // options.shape.features
    for image in found:
      inputs = image.inputs(options)
      self.inputs[row, slot : slot + len(inputs)] = inputs
      slot += len(inputs)


def distinct(images: Sequence[PlannedImage | None] | np.ndarray) -> list[PlannedImage]:
  """The images, from those of tokens; one that stands in several sequences in turn is there once for each."""
  groups = ((image, len(list(same))) for image, same in groupby(image for image in images if image))
  return [image for image, tokens in groups for _ in range(tokens // image.features)]


def located(images: np.ndarray, where: str) -> np.ndarray:
  """The images of tokens, see `IMAGE` in `documents`, which know their row."""
  there = {image: replace(image, where=where) for image in set(images[images.astype(bool)])}
  return np.array([there.get(image) for image in images], object)


def images_of_columns(values: Sequence[Any]) -> list[Any]:
  """The images in the values of columns, of which each may hold several, or none."""
  found = list[Any]()
  for value in values:
    several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object)
    found += [] if value is None else value if several else [value]
  return found


def with_column_images(messages: Sequence[Any], images: Sequence[Any]) -> list[Any]:
  """Messages in which images of a data column have their places: parts of images that name none take them in turn; what
  is left comes before the text of the first message of a user."""
  left = list(images)

  def filled(part: Any) -> Any:
    if media_kind(part) != _KIND or part.get(part["type"]) is not None:
      return part
    if not left:
      raise ConfigError(f"messages have more parts of images than the {len(images)} images in the columns.")
    return {"type": "image", "image": left.pop(0)}

  found = [
    {**message, "content": list(map(filled, message["content"]))}
    if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
    else message
    for message in messages
  ]
  first = next((i for i, m in enumerate(found) if isinstance(m, Mapping) and m.get("role") == "user"), None)
  if left and first is None:
    raise ConfigError("a row has images, and no message of a user to put them in.")
  if left and first is not None:
    content = found[first].get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    found[first] = {**found[first], "content": [*({"type": "image", "image": image} for image in left), *parts]}
  return found
