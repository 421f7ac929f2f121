"""A batch row is a stream: packed rows that do not depend on the number of hosts.

The data is S streams, S fixed for the life of a run. Stream s reads items s, s+S, s+2S, ... of an endless order, which
are documents or spans of long ones (see `spans`; packing knows no difference), and packs its own rows, so its whole
state is three int32 (see `packing`), and that of the run an int32[S, 3] that knows no hosts. A process makes the
streams of the rows that its devices hold; processes that hold the same rows make the same ones. Rows come with the
state after them, so how far ahead they are made does not matter.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxtext.data.conversation_media import MediaOptions, used_slots
from maxtext.data.documents import MEDIUM, tokens_of
from maxtext.data.media_rows import MediaRows
from maxtext.data.packing import Packing, TokenSpan, fit


class StreamDocuments(Protocol):
  """The documents that streams read."""

  def read(self, wanted: Sequence[tuple[int, int]]) -> list[np.ndarray | None]:
    """Documents (stream, k), each the k-th of its stream, see `Documents.tokens`; None after the last."""
    ...


class Rows(NamedTuple):
  """Rows of some streams, and the state of all streams of this worker after them.

  Segments are 0 in padding. Weights are those of the targets in the loss; None where no document of these rows brings
  any, and then all but padding counts alike. Extra values of targets are there by name if a document brings them.
  Media are None where data has none by its options.
  """

  inputs: np.ndarray
  targets: np.ndarray
  positions: np.ndarray
  segments: np.ndarray
  after: np.ndarray
  weights: np.ndarray | None = None
  extra: Mapping[str, np.ndarray] = {}
  media: MediaRows | None = None

  @property
  def loss_weights(self) -> np.ndarray:
    """The weight of every target: float32."""
    return (self.segments > 0).astype(np.float32) if self.weights is None else self.weights

  @staticmethod
  def join(parts: Sequence["Rows"]) -> "Rows":
    """The rows of several makers, one after the other."""
    inputs, targets, positions, segments, after = map(np.concatenate, zip(*(part[:5] for part in parts), strict=True))
    weighted = any(part.weights is not None for part in parts)
    weights = np.concatenate([part.loss_weights for part in parts]) if weighted else None
    examples = {name: values for part in parts for name, values in part.extra.items()}
    extra = {
      name: np.concatenate([part.extra_values(name, values) for part in parts]) for name, values in examples.items()
    }
    media = [part.media for part in parts if part.media is not None]
    joined = MediaRows.join(media) if media else None
    return Rows(inputs, targets, positions, segments, after, weights, extra, joined)

  def extra_values(self, name: str, like: Any) -> np.ndarray:
    """Extra values of these rows' targets; zeros, shaped like those of other rows, where no document brings any."""
    if name in self.extra:
      return self.extra[name]
    return np.zeros((*self.inputs.shape, *like.shape[2:]), like.dtype)


class PackedStreams:
  """Packs the rows of some of the streams."""

  def __init__(
    self,
    documents: StreamDocuments,
    packing: Packing,
    streams: Sequence[int],
    state: np.ndarray | None = None,
    read_ahead: int = 16,
    media: MediaOptions | None = None,
  ) -> None:
    """Reads nothing yet.

    Args:
      streams: their numbers.
      state: int32[len(streams), 3]; None is the beginning.
      read_ahead: documents per stream read beyond those that packing looks at.
      media: of rows that have room for them.
    """
    self._documents, self._packing, self._streams = documents, packing, [int(s) for s in streams]
    self._state = np.zeros((len(streams), 3), np.int32) if state is None else np.array(state, np.int32)
    assert self._state.shape == (len(streams), 3), self._state.shape
    self._read_ahead, self._media = read_ahead, media
    self._towers = () if media is None else tuple(media.rooms)
    self._counting = np.arange(packing.length, dtype=np.int32)
    self._held: list[dict[int, _Document]] = [{} for _ in streams]
    self._sizes = [_Sizes(partial(self._read, s)) for s in range(len(streams))]
    self._ends = self._state[:, 0].tolist()  # per stream, the first document that was not requested yet

  def rows(self, chosen: Sequence[int]) -> Rows:
    """The next row of each of the chosen streams, which are counted from 0 among this worker's."""
    shape = len(chosen), self._packing.length
    inputs, targets, positions, segments = (np.zeros(shape, np.int32) for _ in range(4))
    weights: np.ndarray | None = None
    extra: dict[str, np.ndarray] = {}
    media = None if self._media is None else MediaRows.empty(self._media, *shape)
    for row, stream in enumerate(chosen):
      end, number, held = 0, 0, self._held[stream]
      for k, start, n in self._advance(stream):
        document, whole = held[k], slice(end, end + n)
        inputs[row, whole] = document.inputs[start : start + n]
        targets[row, whole] = document.targets[start : start + n]
        for size in document.sequence_sizes(start, n):
          number, here, end, first = number + 1, slice(end, end + size), end + size, start + end - whole.start
          positions[row, here] = self._counting[:size]
          segments[row, here] = number
          if media is not None and self._media is not None:
            media.add(self._media, row, here, None if document.media is None else document.media[first : first + size])
        if document.weights is not None and weights is None:
          weights = (segments > 0).astype(np.float32)  # documents before it count wholly
        if weights is not None:
          weights[row, whole] = 1.0 if document.weights is None else document.weights[start : start + n]
        for name, values in document.extra.items():
          if name not in extra:
            extra[name] = np.zeros((*shape, *values.shape[1:]), values.dtype)
          extra[name][row, whole] = values[start : start + n]
      self._forget(stream)
    return Rows(inputs, targets, positions, segments, self._state.copy(), weights, extra, media)

  def _advance(self, stream: int) -> list[TokenSpan]:
    first, offset, taken = self._state[stream].tolist()
    held = self._held[stream]
    spans, self._state[stream] = self._packing.row(
      (first, offset, taken),
      self._sizes[stream],
      lambda k, start, room, slots: held[k].cut(start, room, slots),
      lambda k, start, n: held[k].slots(start, n),
    )
    return spans

  def _forget(self, stream: int) -> None:
    """Drops the documents that are completely used."""
    (first, _, taken), held, sizes = self._state[stream].tolist(), self._held[stream], self._sizes[stream]
    for k in [k for k in held if k < first or taken >> (k - first) & 1]:
      del held[k], sizes[k]

  def _read(self, stream: int, k: int) -> None:
    """Reads a document, and those that all streams will need soon, since reading in bulk is fast."""
    wanted = []
    for s, (first, _, taken) in enumerate(self._state.tolist()):
      needed = max(first + self._packing.look_ahead, k + 1 if s == stream else 0)
      end = max(self._ends[s], needed + self._read_ahead)
      wanted += [(s, j) for j in range(self._ends[s], end) if not taken >> (j - first) & 1]
      self._ends[s] = end
    found = self._documents.read([(self._streams[s], j) for s, j in wanted])
    for (s, j), tokens in zip(wanted, found, strict=True):
      self._held[s][j] = document = _NONE if tokens is None else _Document.of(tokens, self._towers)
      self._sizes[s][j] = -1 if tokens is None else len(document.inputs)


class _Document(NamedTuple):
  """A document as inputs and targets: each token of a sequence but the last is an input, whose target is the next."""

  inputs: np.ndarray
  targets: np.ndarray
  weights: np.ndarray | None = None  # of the targets
  ends: tuple[int, ...] | None = None  # of its sequences, in inputs; None is one sequence that may be cut anywhere
  cuts: tuple[int, ...] = ()  # where a document of several sequences may be cut, in inputs
  extra: Mapping[str, np.ndarray] = {}
  media: np.ndarray | None = None  # of inputs, see `MEDIUM`
  used: np.ndarray | None = None  # slots of towers, see `used_slots`

  @staticmethod
  def of(tokens: np.ndarray, towers: Sequence[str]) -> "_Document":
    names = tokens.dtype.names or ()
    numbering = next((name for name in ("sequence", "side") if name in names), None)
    values, others = tokens_of(tokens), [name for name in names if name not in ("token", "weight", MEDIUM, numbering)]
    if numbering is None:
      weights = tokens["weight"][1:] if names else None
      return _Document(values[:-1], values[1:], weights, extra={name: tokens[name][1:] for name in others})
    first = np.flatnonzero(np.diff(tokens[numbering], prepend=-1))
    targets = np.delete(np.arange(len(tokens)), first)  # the first token of a sequence is no target
    ends = tuple(np.cumsum(np.diff(first, append=len(tokens)) - 1).tolist())
    cuts = ends if numbering == "sequence" else ends[-1:]
    extra = {name: tokens[name][targets] for name in others}
    weights, found = tokens["weight"][targets], _Document(values[targets - 1], values[targets])
    if MEDIUM not in names:
      return found._replace(weights=weights, ends=ends, cuts=cuts, extra=extra)
    media = tokens[MEDIUM][targets - 1]
    used = used_slots(media, ends, towers)
    return found._replace(weights=weights, ends=ends, cuts=cuts, extra=extra, media=media, used=used)

  def slots(self, start: int, n: int) -> tuple[int, ...]:
    """The slots of each tower that the media of so many inputs take."""
    return () if self.used is None else tuple((self.used[start + n] - self.used[start]).tolist())

  def cut(self, start: int, room: int, slots: Sequence[int]) -> int:
    """How many inputs from `start` go into less room than all of them take: whole sequences, or any number."""
    if self.ends is None:
      return room
    sizes = [end - start for end in self.cuts[: bisect_right(self.cuts, start + room)] if end > start]
    return next((size for size in reversed(sizes) if fit(self.slots(start, size), slots)), 0)

  def sequence_sizes(self, start: int, n: int) -> Iterator[int]:
    """Sizes of the sequences, or parts of one, among so many inputs."""
    for end in (start + n,) if self.ends is None else self.ends:
      if start < end <= start + n:
        yield end - start
        start, n = end, start + n - end


_NONE = _Document(np.zeros(0, np.int32), np.zeros(0, np.int32))


class _Sizes(dict[int, int]):
  """Sizes of a stream's documents, read on first use; a dict, because packing looks them up often."""

  def __init__(self, read: Callable[[int], None]) -> None:
    super().__init__()
    self._read = read

  def __missing__(self, k: int) -> int:
    self._read(k)
    return self[k]
