"""Which documents go into a row. Pure arithmetic on sizes; no token is touched here.

A stream's place in its documents is three numbers, and packing a row moves it on:

  next    the first document that is not wholly used
  offset  how much of it is used
  taken   bit i: document next+i is used already, because a packer that looks ahead took it early (bit 0 is never set)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

LOOK_AHEAD = 31  # as many as an int32 has bits that are not its sign


class TokenSpan(NamedTuple):
  """A stretch of a document."""

  document: int
  start: int
  size: int


StreamState = tuple[int, int, int]
Sizes = Mapping[int, int]  # of the stream's k-th document; negative after the last


@dataclass(frozen=True)
class Packing:
  """How rows are filled.

  Attributes:
    length: tokens in a row.
    kind: `concat_then_split` cuts documents wherever a row ends. The others keep them whole, look ahead, and take what
      fits: `first_fit` the first, `best_fit` the largest; only one that is longer than a row is cut.
    max_segments: most documents in a row; 0 is no limit.
    look_ahead: documents, from the first unused one on, that are considered; a packer that cuts needs only one.
  """

  length: int
  kind: Literal["concat_then_split", "first_fit", "best_fit"]
  max_segments: int = 0
  look_ahead: int = LOOK_AHEAD

  def __post_init__(self) -> None:
    assert 1 <= self.look_ahead <= LOOK_AHEAD

  def row(self, place: StreamState, sizes: Sizes) -> tuple[list[TokenSpan], StreamState]:
    """The pieces of the next row, and the place after it. No pieces: the documents have ended."""
    (first, offset, taken), room, k = place, self.length, place[0]
    pieces: list[TokenSpan] = []
    while room and (len(pieces) < self.max_segments or not self.max_segments):
      # The oldest document always opens a row, so none waits for ever.
      opening = not pieces or self.kind == "concat_then_split"
      k = first if opening else self._fitting(k, first, taken, room, sizes)
      left = sizes[k] - (offset if k == first else 0) if k >= 0 else -1
      if left < 0:
        break
      n = min(left, room)
      if n:
        pieces.append(TokenSpan(k, offset if k == first else 0, n))
        room -= n
      if n < left:
        offset += n
        break
      offset = 0 if k == first else offset
      taken |= 1 << (k - first)
      while taken & 1:
        taken, first = taken >> 1, first + 1
    return pieces, (first, offset, taken)

  def _fitting(self, k: int, first: int, taken: int, room: int, sizes: Sizes) -> int:
    """The document to add to a row that took k last; negative where none fits.

    What did not fit before k will not fit now, so the first fit is looked for after k only.
    """
    best, most = -1, -1
    for j in range(max(k, first) if self.kind == "first_fit" else first, first + self.look_ahead):
      if not taken >> (j - first) & 1 and most < (n := sizes[j]) <= room:
        if self.kind == "first_fit":
          return j
        best, most = j, n
    return best
