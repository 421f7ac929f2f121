"""Positions of three components (mRoPE) of tokens that stand for media."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from maxtext.media.processed import Processed


@dataclass(frozen=True)
class RotaryAxes:
  """The axes of media in positions.

  Attributes:
    merged: rows, and columns, of patches that become one feature.
    interval: time positions between the slots of a video.
  """

  merged: int
  interval: int = 1

  def __call__(self, kind: str, medium: Processed) -> np.ndarray:
    """[F,3] time, row and column of the features of a medium; sound has three equal ones."""
    if kind == "audio":
      return np.repeat(np.arange(medium.features)[:, None], 3, axis=1)
    places = medium.grid.reshape(-1, 3)[:: self.merged**2]
    return places * (self.interval, 1, 1) // (1, self.merged, self.merged)


def prompt_rotary_positions(length: int, media: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
  """`rotary_positions` [S,3] (time, row, column) of the tokens of a prompt or sequence.

  Text has three equal components. Tokens of an image count from the position after the text before it: time by frame,
  and the other two by row and column. A run of tokens without text in it begins at time 0. The text behind it continues
  after the largest position of the run's last tower.

  Args:
    length: tokens of the prompt.
    media: of each medium, in order, its tokens, their (time, row, column) [L,3], and a number for the tower of each.
  """
  found = np.repeat(np.arange(length, dtype=np.int32)[:, None], 3, axis=1)
  for places, axes, towers in media:
    for run in np.split(np.arange(len(places)), np.flatnonzero(np.diff(places) > 1) + 1):
      own, first, behind = axes[run] - (axes[run[0], 0], 0, 0), places[run[0]], places[run[-1]] + 1
      last = own[np.flatnonzero(towers[run] != towers[run[-1]]).max(initial=-1) + 1 :]
      found[behind:] += last.max() + 1 - len(run)
      found[places[run]] = found[first] + own
  return found
