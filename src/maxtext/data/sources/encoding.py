"""Converts the columns of a record to the tokens of a document: text, tokens, a conversation or a preference pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from maxtext.configs import ConfigError
from maxtext.data.documents import WEIGHTED, TokenCounts
from maxtext.data.options import DataOptions
from maxtext.data.sources.conversation_encoding import ConversationEncoding
from maxtext.data.sources.preference_encoding import PreferenceEncoding
from maxtext.data.splits import Split
from maxtext.data.tokenizers import TextTokenizer, load_tokenizer

MASK = "_mask"
"""Suffix of the name of a column of loss weights."""


class Encoding(Protocol):
  """What makes a document of a record."""

  @property
  def columns(self) -> tuple[str, ...]:
    """The names of the columns that it reads."""
    ...

  @property
  def image_columns(self) -> tuple[str, ...]:
    """The names of columns of images, which data may lack; a value that is not there is None."""
    ...

  @property
  def identity(self) -> dict[str, Any]:
    """What determines the tokens."""
    ...

  def counts(self, shards: int) -> TokenCounts:
    """What is known of the lengths of documents before they are read."""
    ...

  def __call__(self, values: Sequence[Any]) -> np.ndarray:
    """The document, see `Documents.tokens`, from the values of a record's columns."""
    ...


def make_encoding(options: DataOptions, split: Split) -> Encoding:
  """The encoding that the options of a split describe."""
  columns = tuple(split.columns)
  # One token more than the inputs, since the last input needs a target.
  most = options.length + 1
  if options.conversations is not None:
    conversations = ConversationEncoding.of(
      columns,
      load_tokenizer(options.tokenizer),
      most,
      options.truncate,
      options.conversations,
      _image_columns(options, split),
    )
    pairs, labelled = options.conversations.pairs, options.conversations.labelled
    return PreferenceEncoding(conversations, labelled) if pairs else conversations
  if not split.tokenize:
    return TextEncoding(columns, None, None)
  return TextEncoding(columns, load_tokenizer(options.tokenizer), most if options.truncate else None)


def _image_columns(options: DataOptions, split: Split) -> tuple[str, ...]:
  has_images = options.media is not None
  return tuple(split.image_columns) if has_images else ()


@dataclass(frozen=True)
class TextEncoding:
  """Converts values to tokens. Text columns are joined by newlines to one document; token columns are concatenated.

  A column whose name ends in `_mask` holds the loss weight of each token of the column before it.

  Attributes:
    columns: the names of the columns.
    tokenizer: None if the data holds tokens.
    most: maximum number of tokens, to which text is truncated; None does not truncate.
  """

  columns: tuple[str, ...]
  tokenizer: TextTokenizer | None
  most: int | None
  image_columns: tuple[str, ...] = ()

  @property
  def identity(self) -> dict[str, Any]:
    """What determines the tokens."""
    tokenizer = None if self.tokenizer is None else self.tokenizer.identity
    return {"columns": list(self.columns), "tokenizer": tokenizer, "most": self.most}

  def counts(self, shards: int) -> TokenCounts:
    """Truncated text has a known limit."""
    return TokenCounts(None, None if self.most is None else [self.most] * shards)

  def __call__(self, values: Sequence[Any]) -> np.ndarray:
    """The tokens of one document, from the values of its columns; with dtype `WEIGHTED` if one of them is a mask."""
    if self.tokenizer is None:
      if any(map(_is_mask, self.columns)):
        return _weighted(self.columns, values)
      return np.concatenate([_integers(value) for value in values])
    return self.tokenizer.encode("\n".join(_text(value) for value in values))[: self.most]


def _is_mask(column: str) -> bool:
  return column.endswith(MASK)


def _weighted(columns: Sequence[str], values: Sequence[Any]) -> np.ndarray:
  parts: list[np.ndarray] = []
  for column, value in zip(columns, values, strict=True):
    if _is_mask(column):
      weights = np.asarray(value)
      if not parts or weights.shape != parts[-1].shape:
        raise ConfigError(f"'{column}' must follow a column of tokens and hold as many numbers: see *_data_columns.")
      if weights.size and (weights.dtype.kind not in "biuf" or not np.isfinite(weights).all() or weights.min() < 0):
        raise ConfigError(f"'{column}' must hold loss weights, finite numbers from 0 on; 1 counts a token.")
      parts[-1]["weight"] = weights
    else:
      tokens = _integers(value)
      parts.append(np.empty(tokens.shape, WEIGHTED))
      parts[-1]["token"], parts[-1]["weight"] = tokens, 1.0
  return np.concatenate(parts)


def _integers(value: Any) -> np.ndarray:
  """Tokens as int64, so that integers outside the vocabulary do not overflow and are detected later."""
  try:
    found = np.asarray(value)
  except ValueError:
    found = np.asarray(None)
  if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
    raise ConfigError("a column that must hold tokens holds something else: set the *_data_columns keys.")
  return found.astype(np.int64)


def _text(value: Any) -> str:
  if not isinstance(value, str | bytes):
    raise ConfigError("a column that must hold text holds something else: set the *_data_columns keys.")
  return value.decode(errors="replace") if isinstance(value, bytes) else value
