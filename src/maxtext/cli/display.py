"""Progress of long work: a bar on a terminal, lines elsewhere."""

import sys


def open_display(unit: str) -> "Terminal | Lines":
  """The one for this output; `unit` names the parts of the work."""
  return Terminal() if sys.stdout.isatty() else Lines(unit)


class Terminal:
  """A bar."""

  def __init__(self) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    self._bar = Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), "left")
    self._bar.add_task("", total=None)

  def message(self, line: str) -> None:
    """Writes a line."""
    self._bar.console.print(line, highlight=False)

  def progress(self, count: int, all_count: int, size: int, all_size: int) -> None:
    """What is done, in units and in bytes."""
    self._bar.start()
    self._bar.update(self._bar.task_ids[0], total=all_size, completed=size)

  def close(self) -> None:
    """Leaves the terminal as it was."""
    self._bar.stop()


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
