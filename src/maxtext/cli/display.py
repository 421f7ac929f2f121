"""Progress of long work: a bar on a terminal, lines elsewhere."""

import sys
import time

from maxtext.logs import readable_size
from maxtext.status_line import StatusLine


def open_display(unit: str) -> "Terminal | Lines":
  """The one for this output; `unit` names the parts of the work."""
  return Terminal() if sys.stdout.isatty() else Lines(unit)


class Terminal:
  """The status line, with bytes, their rate and the time left."""

  def __init__(self) -> None:
    self._line, self._start = StatusLine(sys.stdout), time.monotonic()

  def message(self, line: str) -> None:
    """Writes a line."""
    print(line, flush=True)

  def progress(self, count: int, all_count: int, size: int, all_size: int) -> None:
    """What is done, in units and in bytes."""
    from maxtext.observe.metric_writers import fill, short_duration  # brings storage libraries, which start-up need not

    rate = size / max(1e-3, time.monotonic() - self._start)
    parts = [
      (0, f"{readable_size(size)} of {readable_size(all_size)}"),
      (2, f"{readable_size(rate)}/s"),
      (1, f"{short_duration((all_size - size) / rate)} left" if rate else ""),
    ]
    self._line.show(lambda width: fill(parts, size / max(1, all_size), width))

  def close(self) -> None:
    """Leaves the terminal as it was."""
    self._line.close()


class Lines:
  """A line for every tenth of the bytes."""

  def __init__(self, unit: str) -> None:
    self._unit, self._tenths = unit, 0

  def message(self, line: str) -> None:
    """A line."""
    print(line, flush=True)

  def progress(self, count: int, all_count: int, size: int, all_size: int) -> None:
    """What is done, in units and in bytes."""
    tenths = 10 * size // all_size
    if tenths > self._tenths:
      self._tenths = tenths
      self.message(f"{self._unit} {count}/{all_count}  {size / 1e6:.1f} of {all_size / 1e6:.1f} MB")

  def close(self) -> None:
    """Nothing is open."""
