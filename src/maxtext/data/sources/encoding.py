"""From the columns of a record to the tokens of a document."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext.configs import MaxTextConfig
from maxtext.data.splits import Split
from maxtext.data.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Encoding:
  """How values become tokens: several columns of text are one document, a line each; tokens are taken as they are.

  Attributes:
    columns: the names of the values.
    tokenizer: None where the data holds tokens.
    most: tokens after which text is cut; None cuts nothing.
  """

  columns: tuple[str, ...]
  tokenizer: Tokenizer | None
  most: int | None

  @staticmethod
  def of(config: MaxTextConfig, split: Split) -> "Encoding":
    """As the keys of the split say."""
    if not split.tokenize:
      return Encoding(tuple(split.columns), None, None)
    # A row of inputs has one more token, the last one's target.
    most = config.max_target_length + 1 if config.use_truncation else None
    return Encoding(tuple(split.columns), load_tokenizer(config), most)

  @property
  def identity(self) -> dict[str, Any]:
    """What decides the tokens."""
    tokenizer = None if self.tokenizer is None else self.tokenizer.identity
    return {"columns": list(self.columns), "tokenizer": tokenizer, "most": self.most}

  def __call__(self, values: Sequence[Any]) -> np.ndarray:
    """The tokens of one document, from the values of its columns."""
    if self.tokenizer is None:
      return np.concatenate([np.asarray(value, np.int32) for value in values])
    return self.tokenizer.encode("\n".join(_text(value) for value in values))[: self.most]


def _text(value: str | bytes) -> str:
  return value.decode(errors="replace") if isinstance(value, bytes) else value
