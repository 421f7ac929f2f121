"""Long documents are cut into spans of whole rows, so that a single text fills every row of a batch.

A document that one stream reads alone keeps it busy while the others have ended. So streams are dealt items: documents,
and spans of those that are longer than a 64th of what a stream reads in an epoch. The token between two spans is the
last target of one and the first input of the next, so that an epoch has every pair of an input and its target once. The
cut is a function of the data, the rows' length and the number of streams; where no document is long, items are
documents.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.conversation_media import located
from maxtext.data.documents import MEDIUM, DataSource, Documents, DocumentSpans, tokens_of

SPANS_PER_STREAM = 64
"""Streams end at most one span apart, a 64th of an epoch."""
MEASURED_PER_STREAM = 4
"""A source that does not know its lengths is read through once where it has fewer documents than this for a stream."""
_CACHE_BYTES = 64 << 20
_READ_AT_ONCE = 1024


def cut_long_documents(sources: Sequence[DataSource], streams: int, length: int) -> list[DataSource]:
  """The sources with the spans that so many streams of rows of this length take."""
  return [replace(source, spans=_spans(source.documents, streams, length)) for source in sources]


def count_tokens(documents: Documents) -> int:
  """Of all documents, which are read where the source does not know."""
  total = documents.counts.total
  return sum(tokens for _, tokens in _measure(documents, range(len(documents.sizes)))) if total is None else total


def check_token_ids(document: np.ndarray, vocab_size: int) -> None:
  """A lookup in the embedding would take the nearest row, silently."""
  tokens = tokens_of(document)
  if not tokens.size or (int(tokens.max()) < vocab_size and (tokens.dtype.kind == "u" or int(tokens.min()) >= 0)):
    return
  place = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
  raise ConfigError(
    f"token {int(tokens[place])} at place {place} is outside of vocab_size={vocab_size}: the data was made for another "
    f"vocabulary, or is damaged."
  )


class Items:
  """What streams are dealt of a source, numbered in the order of its documents."""

  def __init__(self, source: DataSource, vocab_size: int | None = None) -> None:
    """With `vocab_size`, a record with any other token is refused."""
    self._documents, self._spans, self._vocab_size = source.documents, source.spans, vocab_size
    numbers = np.array([number for number, _ in source.spans.long], np.int64)
    more = np.array([-(-(tokens - 1) // source.spans.inputs) - 1 for _, tokens in source.spans.long], np.int64)
    before = np.cumsum(more) - more
    self._first = (numbers + before).tolist()  # items that begin a document that is cut
    self._last = (numbers + before + more).tolist()
    self._long = [(number, tokens) for number, tokens in source.spans.long]
    self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
    sizes = np.array(source.documents.sizes, np.int64)
    np.add.at(sizes, np.searchsorted(np.cumsum(sizes), numbers, side="right"), more)
    self.sizes: list[int] = sizes.tolist()
    self.count = sum(self.sizes)

  def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
    """The tokens of these items; a document is read once, however many of its spans are asked for."""
    places = [self._locate(item) for item in numbers]
    wanted = list(dict.fromkeys(document for document, _ in places if document not in self._cache))
    found = {document: self._tokens(document, record) for document, record in self._read(wanted)}
    items, step = [], self._spans.inputs
    for document, span in places:
      tokens = found[document] if document in found else self._cache[document]
      # A copy, because a view would keep all of a long document.
      items.append(tokens if span is None else tokens[span * step : (span + 1) * step + 1].copy())
    self._keep({document: found[document] for document, span in places if span is not None and document in found})
    return items

  def _locate(self, item: int) -> tuple[int, int | None]:
    """The document of an item, and which of its spans; None is a document that is whole."""
    place = bisect_right(self._first, item) - 1
    if place < 0:
      return item, None
    if item <= self._last[place]:
      return self._long[place][0], item - self._first[place]
    return self._long[place][0] + item - self._last[place], None

  def _read(self, wanted: list[int]) -> Iterator[tuple[int, object]]:
    return zip(wanted, self._documents.read(wanted) if wanted else (), strict=True)

  def _tokens(self, document: int, record: object) -> np.ndarray:
    try:
      tokens = self._documents.tokens(record)
      if self._vocab_size is not None:
        check_token_ids(tokens, self._vocab_size)
      if MEDIUM in (tokens.dtype.names or ()):
        tokens[MEDIUM] = located(tokens[MEDIUM], self._documents.where(document))
      return tokens
    except (ConfigError, RunError) as error:
      raise type(error)(f"{self._documents.where(document)}: {error}") from None

  def _keep(self, documents: dict[int, np.ndarray]) -> None:
    """Spans of a document are spread over an epoch, and to read one means to read the document."""
    self._cache |= documents
    while len(self._cache) > 1 and sum(tokens.nbytes for tokens in self._cache.values()) > _CACHE_BYTES:
      self._cache.popitem(last=False)


def _spans(documents: Documents, streams: int, length: int) -> DocumentSpans:
  total, longest, listed, whole = documents.counts
  if whole:
    return DocumentSpans()
  shards = range(len(documents.sizes))
  lengths = dict(listed)
  if longest is None:
    if sum(documents.sizes) >= MEASURED_PER_STREAM * streams:
      return DocumentSpans()
    lengths |= _measure(documents, shards)
    total, longest = sum(lengths.values()), [0] * len(shards)
  inputs = length * max(1, (total or 0) // (length * streams * SPANS_PER_STREAM))
  # Lists of long documents end where spans are shorter than what they list, in a corpus that is small for its batch.
  lengths |= _measure(documents, [i for i in shards if longest[i] - 1 > inputs])
  long = tuple((number, tokens) for number, tokens in sorted(lengths.items()) if tokens - 1 > inputs)
  return DocumentSpans(inputs, long) if long else DocumentSpans()


def _measure(documents: Documents, shards: Sequence[int]) -> Iterator[tuple[int, int]]:
  """Number and tokens of the documents of some shards."""
  ends = np.cumsum(documents.sizes)
  for shard in shards:
    for begin in range(int(ends[shard]) - documents.sizes[shard], int(ends[shard]), _READ_AT_ONCE):
      numbers = range(begin, min(begin + _READ_AT_ONCE, int(ends[shard])))
      for number, record in zip(numbers, documents.read(numbers), strict=True):
        try:
          yield number, len(documents.tokens(record))
        except (ConfigError, RunError) as error:
          raise type(error)(f"{documents.where(number)}: {error}") from None
