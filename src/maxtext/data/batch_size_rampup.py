"""Batch sizes: constant, or ramped up at the beginning of a run."""

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil, lcm

from maxtext.configs import ConfigError
from maxtext.data.options import RampupOptions


@dataclass(frozen=True)
class BatchSizeSchedule:
  """Batches from index `starts[i]` on have `rows[i]` rows."""

  starts: tuple[int, ...]
  rows: tuple[int, ...]

  def of(self, batch: int) -> int:
    """Rows of one batch."""
    return self.rows[bisect_right(self.starts, batch) - 1]

  @property
  def streams(self) -> int:
    """The smallest number of streams that is a multiple of every batch size."""
    return lcm(*self.rows)


def batch_size_schedule(rampup: RampupOptions | None, rows: int) -> BatchSizeSchedule:
  """The schedule up to `rows`; constant without a ramp-up. Stages but the last have equal numbers of samples."""
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
