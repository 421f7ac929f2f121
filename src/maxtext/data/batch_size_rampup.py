"""How many rows each batch has: the same for all, or growing at the beginning of a run."""

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil, lcm

from maxtext.configs import ConfigError
from maxtext.data.options import RampupOptions


@dataclass(frozen=True)
class BatchSizeSchedule:
  """Rows of the batches from `starts[i]` on, which are counted from 0."""

  starts: tuple[int, ...]
  rows: tuple[int, ...]

  def of(self, batch: int) -> int:
    """Rows of one batch."""
    return self.rows[bisect_right(self.starts, batch) - 1]

  @property
  def streams(self) -> int:
    """The fewest streams that every batch can take its rows from in turn."""
    return lcm(*self.rows)


def batch_size_schedule(rampup: RampupOptions | None, rows: int) -> BatchSizeSchedule:
  """The sizes up to `rows`, or that alone without a ramp-up; each stage but the last has its share of the samples."""
  if rampup is None:
    return BatchSizeSchedule((0,), (rows,))
  first, step, last = rampup.start, rampup.increment, rampup.last
  stages = ceil((last - first) / step)
  sizes = [rows * (first + i * step) / last for i in range(stages)]
  if wrong := [size for size in sizes if size != int(size)]:
    raise ConfigError(
      f"per_device_batch_size_start={first:g} and per_device_batch_size_increment={step:g} make a batch of "
      f"{wrong[0]:g} rows on the way to {rows}: choose them so that every stage has a whole number."
    )
  starts = [0]
  for size in sizes:
    starts.append(starts[-1] + ceil(rampup.samples / stages / size))
  return BatchSizeSchedule(tuple(starts), (*(int(size) for size in sizes), rows))
