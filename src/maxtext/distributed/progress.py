"""How far a run has come, told to whoever supervises it: a restart that comes no further is not worth many more."""

import os
from contextlib import suppress
from pathlib import Path

VARIABLE = "MAXTEXT_PROGRESS_FILE"


def tell_progress(step: int) -> None:
  """Notes the last step that is safely saved, where a supervisor has asked for it."""
  if path := os.environ.get(VARIABLE):
    with suppress(OSError):
      Path(path).write_text(str(step))


def told_progress(path: Path) -> int:
  """The last step that was noted; -1 where there is none."""
  try:
    return int(path.read_text())
  except (OSError, ValueError):
    return -1
