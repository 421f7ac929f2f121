"""Rows of a run's data for a person: taken from its dataloader, as the model sees them, with text for tokens."""

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from maxtext.configs.errors import plural
from maxtext.data.batch import Batch
from maxtext.data.conversations import join_sequences
from maxtext.data.dataloader import make_dataloader, open_data
from maxtext.data.documents import DataSource
from maxtext.data.images import ImageOptions
from maxtext.data.media import VISION
from maxtext.data.options import DataOptions
from maxtext.data.sources.columns import ColumnDocuments
from maxtext.data.sources.conversation_encoding import ConversationEncoding
from maxtext.data.tokenizers import TextTokenizer

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
    image: what these tokens stand for, as a PNG file of what the encoder sees; empty for text.
  """

  text: str
  tokens: int
  weight: float
  role: str = ""
  special: bool = False
  image: bytes = b""


@dataclass(frozen=True)
class RowView:
  """A row: the runs of its sequences, each of which attention sees alone, and positions without a token; inputs of the
  encoder of images that tokens stand for, and those it has room for."""

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
    rows += _rows(fed.batch, _Describer(tokenizer, roles, options.images), count - len(rows))
    if len(rows) >= count:
      break
  return rows


def _rows(batch: Batch, describer: "_Describer", count: int) -> list[RowView]:
  inputs, targets, weights = (np.asarray(array) for array in (batch.inputs, batch.targets, batch.weights))
  segments = np.ones_like(inputs) if batch.segments is None else np.asarray(batch.segments)
  media = batch.media.get(VISION)
  slots = np.full_like(inputs, -1) if media is None else describer.slots(np.asarray(media.indices))
  rows = []
  for row in range(min(count, len(inputs))):
    numbers = [int(number) for number in np.unique(segments[row]) if number]
    sequences = []
    for here in (segments[row] == number for number in numbers):
      tokens = [*inputs[row][here][:1].tolist(), *targets[row][here].tolist()]
      own = describer.images(tokens, [*slots[row][here].tolist(), -1], None if media is None else media.inputs[row])
      sequences.append(tuple(describer.runs(tokens, [0.0, *weights[row][here].tolist()], own)))
    room = 0 if media is None else media.inputs.shape[1]
    rows.append(RowView(tuple(sequences), int((segments[row] == 0).sum()), (int(slots[row].max()) + 1, room)))
  return rows


class _Describer:
  """Makes runs of the tokens of a sequence. `roles` are those of the tokens of known sequences, by their bytes."""

  def __init__(
    self, tokenizer: TextTokenizer | None, roles: Mapping[bytes, list[str]], images: ImageOptions | None
  ) -> None:
    self._tokenizer, self._roles, self._images = tokenizer, roles, images
    self._anchor = [] if tokenizer is None else list(tokenizer.vocabulary.encode(_ANCHOR, special=False))

  def slots(self, indices: np.ndarray) -> np.ndarray:
    """The encoder's input that each token stands for a feature of; -1 for text."""
    assert self._images is not None, "media come from images"
    return indices // self._images.shape.features

  def images(self, tokens: Sequence[int], slots: Sequence[int], inputs: Any) -> list[TokenRun | None]:
    """The run of the image that each token stands for a feature of; None for text."""
    found: list[TokenRun | None] = [None] * len(tokens)
    for slot in {slot for slot in slots if slot >= 0}:
      places = [place for place, own in enumerate(slots) if own == slot]
      run = self._image_run(np.asarray(inputs[slot]), len(places))
      for place in places:
        found[place] = run
    return found

  def _image_run(self, inputs: np.ndarray, tokens: int) -> TokenRun:
    assert self._images is not None, "media come from images"
    from PIL import Image

    pixels, file = self._images.processor.patches.pixels(inputs), io.BytesIO()
    image = Image.fromarray(pixels)
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
