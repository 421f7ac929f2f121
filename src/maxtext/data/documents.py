"""The interface of data sources: numbered documents with random access."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxtext.data.order import ShuffleWindow

WEIGHTED = np.dtype([("token", np.int64), ("weight", np.float32)])
"""Of a document that brings a loss weight for each token: 0 for a token that is not to be learned, such as those of a
prompt. It is cut, shuffled and packed like one that is tokens alone. Fields with other names than those here are values
of targets that an objective asks for (`Batch.extra`)."""


SEGMENTED = np.dtype([*WEIGHTED.descr, ("sequence", np.int32)])
"""Of a document of several sequences, numbered from 0, such as one for each answer of a conversation. Each is attended
to alone, and is never cut: it must fit in a row."""

PAIRED = np.dtype([*WEIGHTED.descr, ("side", np.int32)])
"""Of a preference pair: two sequences, chosen (side 0) and rejected (side 1), each with its prompt. One row has both,
side by side."""

MEDIUM = "medium"
"""The field of the medium that a token stands for a feature of: a `PlannedMedium` for each of its tokens, else None."""

LABEL = "label"
"""The extra value of targets of an answer that is labelled, in place of a pair: 1 at the last token of a desirable
answer (side 0), -1 at that of another, 0 elsewhere. Side 1 is the answer of another row to the same prompt."""


def tokens_of(document: np.ndarray) -> np.ndarray:
  """The tokens of a document, with weights or without."""
  return document["token"] if document.dtype.names else document


class TokenCounts(NamedTuple):
  """Token counts that a source knows without reading its documents; None is unknown.

  Attributes:
    total: tokens of all documents.
    longest: for each shard, an upper bound of the tokens of its documents that are not `listed`.
    listed: number and tokens of documents, by number.
    whole: documents must not be cut into spans.
  """

  total: int | None
  longest: Sequence[int] | None
  listed: Sequence[tuple[int, int]] = ()
  whole: bool = False


class Documents(Protocol):
  """A source with random access: numbered documents, in shards."""

  @property
  def sizes(self) -> Sequence[int]:
    """Documents in each shard."""
    ...

  @property
  def window(self) -> ShuffleWindow:
    """How much is shuffled together."""
    ...

  @property
  def identity(self) -> dict[str, Any]:
    """What must not change when a run is resumed, wherever the files are."""
    ...

  @property
  def counts(self) -> TokenCounts:
    """Token counts that are known without reading."""
    ...

  def read(self, numbers: Sequence[int]) -> Sequence[Any]:
    """The records of these documents."""
    ...

  def tokens(self, record: Any) -> np.ndarray:
    """The tokens of a record: integers, or with loss weights (`WEIGHTED`), or several sequences (`SEGMENTED`,
    `PAIRED`)."""
    ...

  def where(self, number: int) -> str:
    """Where a document is, for error messages."""
    ...


@dataclass(frozen=True)
class DocumentSpans:
  """How long documents are split into spans, see `spans`; by default none is.

  Attributes:
    inputs: tokens of a span that are inputs; its last token is only a target.
    long: number and tokens of every document that is split, by number.
  """

  inputs: int = 0
  long: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class DataSource:
  """A source of documents and its weight relative to others."""

  documents: Documents
  weight: float = 1.0
  spans: DocumentSpans = field(default_factory=DocumentSpans)
