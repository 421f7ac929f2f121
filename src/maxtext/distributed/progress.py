"""The last saved step of a run, reported to its supervisor, which gives up on restarts that make no progress."""

import os
from contextlib import suppress
from pathlib import Path

VARIABLE = "MAXTEXT_PROGRESS_FILE"


def report_progress(step: int) -> None:
  """Writes the last step that is safely saved to the supervisor's file, if there is one."""
  if path := os.environ.get(VARIABLE):
    with suppress(OSError):
      Path(path).write_text(str(step))


def read_progress(path: Path) -> int:
  """The last reported step; -1 if there is none."""
  try:
    return int(path.read_text())
  except (OSError, ValueError):
    return -1
