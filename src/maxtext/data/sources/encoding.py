"""From the columns of a record to the tokens of a document."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext.configs import ConfigError
from maxtext.data.options import DataOptions
from maxtext.data.splits import Split
from maxtext.data.tokenizers import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Encoding:
  """How values become tokens: several columns of text are one document, a line each; tokens are taken as they are.

  Attributes:
    columns: the names of the values.
    tokenizer: None where the data holds tokens.
    most: tokens after which text is cut; None cuts nothing.
  """

  columns: tuple[str, ...]
  tokenizer: TextTokenizer | None
  most: int | None

  @staticmethod
  def of(options: DataOptions, split: Split) -> "Encoding":
    """As the keys of the split say."""
    if not split.tokenize:
      return Encoding(tuple(split.columns), None, None)
    # A row of inputs has one more token, the last one's target.
    most = options.length + 1 if options.truncate else None
    return Encoding(tuple(split.columns), load_tokenizer(options.tokenizer), most)

  @property
  def identity(self) -> dict[str, Any]:
    """What decides the tokens."""
    tokenizer = None if self.tokenizer is None else self.tokenizer.identity
    return {"columns": list(self.columns), "tokenizer": tokenizer, "most": self.most}

  def __call__(self, values: Sequence[Any]) -> np.ndarray:
    """The tokens of one document, from the values of its columns."""
    if self.tokenizer is None:
      return np.concatenate([_integers(value) for value in values])
    return self.tokenizer.encode("\n".join(_text(value) for value in values))[: self.most]


def _integers(value: Any) -> np.ndarray:
  """Wide enough for any integer of a file, so that one outside the vocabulary stays what it is."""
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
