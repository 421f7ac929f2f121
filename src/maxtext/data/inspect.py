"""Rows of a run's data for a person: taken from its dataloader, as the model sees them, with text for tokens."""

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from maxtext.configs.errors import plural
from maxtext.data.batch import Batch
from maxtext.data.conversation_media import MediaOptions
from maxtext.data.conversations import join_sequences
from maxtext.data.dataloader import make_dataloader, open_data
from maxtext.data.documents import DataSource
from maxtext.data.media import VISION
from maxtext.data.options import DataOptions
from maxtext.data.sources.columns import ColumnDocuments
from maxtext.data.sources.conversation_encoding import ConversationEncoding
from maxtext.data.tokenizers import TextTokenizer
from maxtext.models.media import TowerInputs

if TYPE_CHECKING:
  from maxtext.media.processed import ImageProcessor

_ANCHOR = "\u263a"  # decoded before a text, since some vocabularies drop the first space of all that they decode

_LARGEST = 128
"""Pixels along a side of a picture in the page."""


@dataclass(frozen=True)
class TokenRun:
  """Neighbouring tokens that are alike in all but their text; a special token is always alone.

  Attributes:
    text: of the tokens, or the name of the special token; without a tokenizer, their ids.
    tokens: how many.
    weight: of each in the loss, as a target; 0 is context only.
    role: whose turn it is in; empty where the data has no roles.
    special: whether it is a special token.
    image: what these tokens stand for, as a PNG file of what the encoder sees; empty for text and sound.
  """

  text: str
  tokens: int
  weight: float
  role: str = ""
  special: bool = False
  image: bytes = b""


@dataclass(frozen=True)
class RowView:
  """A row: the runs of its sequences, each of which attention sees alone, and positions without a token; slots of
  the encoder of images that are used, and those there are."""

  sequences: tuple[tuple[TokenRun, ...], ...]
  padding: int
  slots: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class RowCounts:
  """Counts of rows, with those of the tokens of each role: all, and those that train."""

  rows: int
  sequences: int
  tokens: int
  trained: int
  padding: int
  roles: Mapping[str, tuple[int, int]]
  slots: tuple[int, int] = (0, 0)

  @staticmethod
  def of(rows: Sequence[RowView]) -> "RowCounts":
    """Counts rows."""
    runs = [run for row in rows for sequence in row.sequences for run in sequence]
    tokens, trained = Counter[str](), Counter[str]()
    for run in runs:
      tokens[run.role] += run.tokens
      trained[run.role] += run.tokens if run.weight > 0 else 0
    roles = {role: (count, trained[role]) for role, count in tokens.most_common() if role}
    return RowCounts(
      len(rows),
      sum(len(row.sequences) for row in rows),
      tokens.total(),
      trained.total(),
      sum(row.padding for row in rows),
      roles,
      (sum(row.slots[0] for row in rows), sum(row.slots[1] for row in rows)),
    )


def read_rows(options: DataOptions, batch: Batch, tokenizer: TextTokenizer | None, count: int) -> list[RowView]:
  """The first rows of the training data, fewer if it ends; made in this process, whatever `grain_worker_count` is.

  Args:
    options: the data.
    batch: an abstract batch, see `make_dataloader`. The rows are those of a run with this number of them.
    tokenizer: of the data; None shows the ids of tokens.
    count: of rows.
  """
  options = replace(options, train=replace(options.train, workers=0, buffer=1))
  roles = dict[bytes, list[str]]()
  opened = open_data(options, batch)
  sources = tuple(_with_roles(source, roles) for source in opened.sources)
  rows = list[RowView]()
  for fed in make_dataloader(options, batch, data=opened._replace(sources=sources)):
    rows += _rows(fed.batch, _Describer(tokenizer, roles, options.media), count - len(rows))
    if len(rows) >= count:
      break
  return rows


def _rows(batch: Batch, describer: "_Describer", count: int) -> list[RowView]:
  inputs, targets, weights = (np.asarray(array) for array in (batch.inputs, batch.targets, batch.weights))
  segments = np.ones_like(inputs) if batch.segments is None else np.asarray(batch.segments)
  rows = []
  for row in range(min(count, len(inputs))):
    numbers = [int(number) for number in np.unique(segments[row]) if number]
    sequences, media = [], describer.media(batch, row)
    for here in (segments[row] == number for number in numbers):
      tokens = [*inputs[row][here][:1].tolist(), *targets[row][here].tolist()]
      own = [*(run for run, inside in zip(media, here, strict=True) if inside), None]
      sequences.append(tuple(describer.runs(tokens, [0.0, *weights[row][here].tolist()], own)))
    rows.append(RowView(tuple(sequences), int((segments[row] == 0).sum()), describer.slots(batch, row)))
  return rows


class _Describer:
  """Makes runs of the tokens of a sequence. `roles` are those of the tokens of known sequences, by their bytes."""

  def __init__(
    self, tokenizer: TextTokenizer | None, roles: Mapping[bytes, list[str]], media: MediaOptions | None
  ) -> None:
    self._tokenizer, self._roles, self._media = tokenizer, roles, media
    self._anchor = [] if tokenizer is None else list(tokenizer.vocabulary.encode(_ANCHOR, special=False))

  def slots(self, batch: Batch, row: int) -> tuple[int, int]:
    """Slots of the encoder of images that a row uses, and those it has."""
    if self._media is None or VISION not in batch.media:
      return 0, 0
    room = self._media.rooms[VISION]
    return -(-(int(np.asarray(batch.media[VISION].indices[row]).max()) + 1) // room.shape.features), room.slots

  def media(self, batch: Batch, row: int) -> list[TokenRun | None]:
    """The run of the image, frame or window of sound that each token stands for a feature of; None for text."""
    found: list[TokenRun | None] = [None] * batch.inputs.shape[1]
    for tower, media in batch.media.items():
      assert self._media is not None, "media come with options"
      room = self._media.rooms[tower]
      each = room.shape.features * (1 if media.segments is None else room.slots)
      numbers = np.asarray(media.spans(each)[row])
      for number in np.unique(numbers[numbers > 0]).tolist():
        places = np.flatnonzero(numbers == number)
        run = self._image(media, row, number, len(places)) if tower == VISION else _sound(len(places))
        for place in places:
          found[place] = run
    return found

  def _image(self, media: TowerInputs, row: int, number: int, tokens: int) -> TokenRun:
    """The run of the image with this number in a row."""
    assert self._media is not None, "media come with options"
    from PIL import Image

    patches = cast("ImageProcessor", self._media.processors["image"]).patches
    if media.segments is None or media.positions is None:
      pixels = patches.pixels(np.asarray(media.inputs[row, number - 1]))
    else:
      own = np.asarray(media.segments[row, 0]) == number
      pixels = patches.pixels(np.asarray(media.inputs[row, 0])[own], np.asarray(media.positions[row, 0])[own])
    image, file = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((_LARGEST, _LARGEST))
    image.save(file, "PNG")
    text = f"[image {pixels.shape[1]}x{pixels.shape[0]}, {plural(tokens, 'token')}]"
    return TokenRun(text, tokens, 0.0, image=file.getvalue())

  def runs(
    self, tokens: Sequence[int], weights: Sequence[float], images: Sequence[TokenRun | None]
  ) -> Iterator[TokenRun]:
    """The runs of a sequence, of which some tokens stand for `images`."""
    roles = self._roles.get(_key(tokens)) or [""] * len(tokens)

    def kind(place: int) -> tuple[float, str, int | None, TokenRun | None]:
      special = self._is_special(tokens[place]) and images[place] is None
      return weights[place], roles[place], place if special else None, images[place]

    for (weight, role, special, image), places in groupby(range(len(tokens)), kind):
      some = [tokens[place] for place in places]
      if image is not None:
        yield replace(image, weight=weight, role=role)
        continue
      text = self._text(some) if special is None else self._name(some[0])
      yield TokenRun(text, len(some), weight, role, special is not None)

  def _is_special(self, token: int) -> bool:
    known = self._tokenizer
    return known is not None and (token in known.special_ids or token >= known.vocab_size)

  def _name(self, token: int) -> str:
    assert self._tokenizer is not None, "only a tokenizer has special tokens"
    return self._tokenizer.vocabulary.name(token) if token < self._tokenizer.vocab_size else f"<{token}>"

  def _text(self, tokens: list[int]) -> str:
    if self._tokenizer is None:
      return "".join(f"{token} " for token in tokens)
    anchor, text = self._tokenizer.decode(self._anchor), self._tokenizer.decode([*self._anchor, *tokens])
    return text.removeprefix(anchor) if text.startswith(anchor) else self._tokenizer.decode(tokens)


def _sound(tokens: int) -> TokenRun:
  return TokenRun(f"[sound, {plural(tokens, 'token')}]", tokens, 0.0)


def _with_roles(source: DataSource, roles: dict[bytes, list[str]]) -> DataSource:
  """The source; one of conversations adds the roles of the sequences that it makes."""
  documents = source.documents
  if isinstance(documents, ColumnDocuments) and isinstance(documents.encoding, ConversationEncoding):
    return replace(source, documents=_ConversationsWithRoles(documents, documents.encoding, roles))
  return source


class _ConversationsWithRoles:
  """Documents of conversations that note the roles of their tokens when they are read."""

  def __init__(self, documents: ColumnDocuments, encoding: ConversationEncoding, roles: dict[bytes, list[str]]) -> None:
    self.sizes, self.window, self.identity = documents.sizes, documents.window, documents.identity
    self.counts, self.read, self.where = documents.counts, documents.read, documents.where
    self._values, self._encoding, self._roles = documents.values, replace(encoding, with_roles=True), roles

  def tokens(self, record: Any) -> np.ndarray:
    sequences = self._encoding.fitting(self._encoding.sequences(self._values(record)))
    self._roles.update((_key(one.tokens), one.roles) for one in sequences)
    return join_sequences(sequences)


def _key(tokens: Sequence[int]) -> bytes:
  return np.array(tokens, np.int64).tobytes()
