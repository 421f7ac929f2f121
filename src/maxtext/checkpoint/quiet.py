"""What Orbax and TensorStore print of a save that failed, beside what they raise: hundreds of lines around our one."""

import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def quiet_failed_saves() -> None:
  """Leaves it out from now on; what is raised is not touched, and whoever saves says it in a line."""
  logging.getLogger("absl").addFilter(_not_raised_too)
  logging.getLogger("asyncio").addFilter(_retrieved)
  before = sys.unraisablehook

  def hook(unraisable: Any) -> None:
    if not _came_too_late(unraisable.exc_value):
      before(unraisable)

  sys.unraisablehook = hook


def _not_raised_too(record: logging.LogRecord) -> bool:
  """Orbax logs an exception in each thread that it passes on its way to the caller."""
  return record.exc_info is None or "orbax" not in Path(record.pathname).parts


def _retrieved(record: logging.LogRecord) -> bool:
  """The first write that fails is raised; of the others nobody asks."""
  return "exception was never retrieved" not in record.getMessage()


def _came_too_late(error: BaseException | None) -> bool:
  """With the first write that fails Orbax's event loop ends, and TensorStore's threads cannot tell it of the others."""
  return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
