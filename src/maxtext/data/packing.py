"""Sequence packing: which documents go into a row, from their sizes alone.

The state of a stream is three numbers, and packing a row advances it:

  next    the first document that is not completely used
  offset  how much of it is used
  taken   bit i: document next+i is used already, because the packer looked ahead (bit 0 is never set)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import le, sub
from typing import Literal, NamedTuple

LOOK_AHEAD = 31  # bits of an int32 without its sign


class TokenSpan(NamedTuple):
  """Consecutive tokens of a document."""

  document: int
  start: int
  size: int


StreamState = tuple[int, int, int]
Sizes = Mapping[int, int]  # of the k-th document of the stream; negative after the last
Slots = Sequence[int]  # of each tower; () is none of any
Cut = Callable[[int, int, int, Slots], int]
"""How much of document k, from an offset on, goes into this much room, and these slots, where not all of it does;
0 ends the row."""
UsedSlots = Callable[[int, int, int], Slots]
"""The slots that the media in so much of document k take, from an offset on."""


def cut_anywhere(k: int, offset: int, room: int, slots: Slots) -> int:
  """Of a document that may be cut after any token."""
  return room


def no_slots(k: int, offset: int, size: int) -> Slots:
  """Of text."""
  return ()


def fit(used: Slots, free: Slots) -> bool:
  """Whether media that take slots go into those that are free."""
  return all(map(le, used, free))


@dataclass(frozen=True)
class Packing:
  """How rows are filled.

  Attributes:
    length: tokens in a row.
    kind: `concat_then_split` cuts documents wherever a row ends. The others keep them whole, look ahead, and take what
      fits: `first_fit` the first, `best_fit` the largest; only one that is longer than a row is cut.
    max_segments: most documents in a row; 0 is no limit.
    look_ahead: documents, from the first unused one on, that are considered; a packer that cuts needs only one.
    slots: for media, of each tower, in a row.
  """

  length: int
  kind: Literal["concat_then_split", "first_fit", "best_fit"]
  max_segments: int = 0
  look_ahead: int = LOOK_AHEAD
  slots: Slots = ()

  def __post_init__(self) -> None:
    assert 1 <= self.look_ahead <= LOOK_AHEAD

  def row(
    self, state: StreamState, sizes: Sizes, cut: Cut = cut_anywhere, used: UsedSlots = no_slots
  ) -> tuple[list[TokenSpan], StreamState]:
    """The spans of the next row, and the state after it. No spans: the documents have ended."""
    (first, offset, taken), room, free, k = state, self.length, self.slots, state[0]
    spans: list[TokenSpan] = []
    while room and (len(spans) < self.max_segments or not self.max_segments):
      # The oldest document always starts a row, so that none waits for ever.
      opening = not spans or self.kind == "concat_then_split"
      k = first if opening else self._fitting(k, first, taken, room, free, sizes, used)
      left = sizes[k] - (offset if k == first else 0) if k >= 0 else -1
      if left < 0:
        break
      start = offset if k == first else 0
      n = left if left <= room and fit(used(k, start, left), free) else cut(k, start, room, free)
      assert n or spans or not left, "a sequence is longer than a row"
      if n:
        spans.append(TokenSpan(k, start, n))
        room, free = room - n, tuple(map(sub, free, used(k, start, n) or (0,) * len(free)))
      if n < left:
        offset += n
        break
      offset = 0 if k == first else offset
      taken |= 1 << (k - first)
      while taken & 1:
        taken, first = taken >> 1, first + 1
    return spans, (first, offset, taken)

  def _fitting(self, k: int, first: int, taken: int, room: int, free: Slots, sizes: Sizes, used: UsedSlots) -> int:
    """The document to add to a row that took k last; negative where none fits.

    Documents before k did not fit and will not fit now, so first_fit searches after k only.
    """
    best, most = -1, -1
    for j in range(max(k, first) if self.kind == "first_fit" else first, first + self.look_ahead):
      if not taken >> (j - first) & 1 and most < (n := sizes[j]) <= room and fit(used(j, 0, n), free):
        if self.kind == "first_fit":
          return j
        best, most = j, n
    return best
