"""What every source of data is to the rest: numbered documents, read at random."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxtext.data.order import Window

WEIGHTED = np.dtype([("token", np.int64), ("weight", np.float32)])
"""Of a document that brings a loss weight for each token: 0 for a token that is not to be learned, such as those of a
prompt. It is cut, shuffled and packed like one that is tokens alone."""


def tokens_of(document: np.ndarray) -> np.ndarray:
  """The tokens of a document, with weights or without."""
  return document["token"] if document.dtype.names else document


class TokenCounts(NamedTuple):
  """What a source knows of its tokens without reading them; None is what it does not.

  Attributes:
    total: tokens of all documents.
    longest: for each shard, tokens that no document of it exceeds but those that are `listed`.
    listed: number and tokens of documents, by number.
  """

  total: int | None
  longest: Sequence[int] | None
  listed: Sequence[tuple[int, int]] = ()


class Documents(Protocol):
  """A source with random access: numbered documents, in shards."""

  @property
  def sizes(self) -> Sequence[int]:
    """Documents in each shard."""
    ...

  @property
  def window(self) -> Window:
    """How much of it is shuffled together."""
    ...

  @property
  def identity(self) -> dict[str, Any]:
    """What must not change between a run's beginning and its resumption, wherever the files are."""
    ...

  @property
  def counts(self) -> TokenCounts:
    """What is known of lengths."""
    ...

  def read(self, numbers: Sequence[int]) -> Sequence[Any]:
    """The records of these documents."""
    ...

  def tokens(self, record: Any) -> np.ndarray:
    """The tokens of a record: integers, or `WEIGHTED` pairs of a token and its loss weight."""
    ...

  def where(self, number: int) -> str:
    """Where a document is, for whoever must mend it."""
    ...


@dataclass(frozen=True)
class DocumentSpans:
  """How long documents are cut, see `spans`; by default none is.

  Attributes:
    inputs: tokens of a span that are inputs; its last token is only a target.
    long: number and tokens of every document that is cut, by number.
  """

  inputs: int = 0
  long: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Source:
  """A part of a corpus, and how many of the documents it gives, relative to the others."""

  documents: Documents
  weight: float = 1.0
  spans: DocumentSpans = field(default_factory=DocumentSpans)
