"""How long work shows how far it is: a bar on a terminal, a line now and then elsewhere."""

import sys


def open_display(piece: str) -> "Terminal | Lines":
  """The one for this output; `piece` is what the work is made of."""
  return Terminal() if sys.stdout.isatty() else Lines(piece)


class Terminal:
  """A bar."""

  def __init__(self) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    self._bar = Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), "left")
    self._bar.add_task("", total=None)

  def say(self, line: str) -> None:
    """What begins now, where it takes a while."""
    self._bar.console.print(line, highlight=False)

  def progress(self, count: int, all_count: int, size: int, all_size: int) -> None:
    """What is done, in pieces and in bytes."""
    self._bar.start()
    self._bar.update(self._bar.task_ids[0], total=all_size, completed=size)

  def close(self) -> None:
    """Leaves the terminal as it was."""
    self._bar.stop()


class Lines:
  """A line for every tenth of the bytes."""

  def __init__(self, piece: str) -> None:
    self._piece, self._tenths = piece, 0

  def say(self, line: str) -> None:
    """A line."""
    print(line, flush=True)

  def progress(self, count: int, all_count: int, size: int, all_size: int) -> None:
    """What is done, in pieces and in bytes."""
    tenths = 10 * size // all_size
    if tenths > self._tenths:
      self._tenths = tenths
      self.say(f"{self._piece} {count}/{all_count}  {size / 1e6:.1f} of {all_size / 1e6:.1f} MB")

  def close(self) -> None:
    """Nothing is open."""
