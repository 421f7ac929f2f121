"""Fewer points for a plot, with the same extremes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 2000


@dataclass(frozen=True)
class Points:
  """Points of a line, in the order of the steps.

  Attributes:
    mean_steps: the middle of each stretch; empty if no point was left out.
    mean_values: the mean of each stretch, for smoothing.
  """

  steps: Sequence[int]
  values: Sequence[float]
  mean_steps: Sequence[int] = ()
  mean_values: Sequence[float] = ()


def downsample(steps: Sequence[int], values: Sequence[float], most: int = MAX_POINTS) -> Points:
  """At most `most` points of a series: the least and the greatest of each of `most // 2` stretches of equal length,
  and the first and the last point of all. A series that is short enough stays as it is."""
  count = len(steps)
  if count <= most:
    return Points(steps, values)
  stretches = max(1, (most - 2) // 2)
  kept, mean_steps, mean_values = {0, count - 1}, [], []
  for i in range(stretches):
    begin, end = i * count // stretches, (i + 1) * count // stretches
    part = values[begin:end]
    kept |= {begin + part.index(min(part)), begin + part.index(max(part))}
    mean_steps.append(steps[(begin + end - 1) // 2])
    mean_values.append(_mean(part))
  chosen = sorted(kept)
  return Points([steps[i] for i in chosen], [values[i] for i in chosen], mean_steps, mean_values)


def _mean(values: Sequence[float]) -> float:
  """The mean of finite values, whose sum may not be finite."""
  mean = sum(values) / len(values)
  return mean if math.isfinite(mean) else sum(value / len(values) for value in values)
