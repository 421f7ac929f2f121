"""The lines of a metrics file: a JSON object per step. Metric writers write them; resumed runs and the report
read them.

Readers skip lines that are no such object: a process may be killed, or a disk fill up, in the middle of a line.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

STARTED = "started"
"""In the first line after each start of a run: when that was, in seconds since the epoch."""


def format_line(step: int, metrics: Mapping[str, float], started: float | None = None) -> str:
  """The line of one step; values that are not finite are null. `started` is for the first step after a start."""
  if started is not None:
    metrics = {STARTED: started, **metrics}
  finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
  return json.dumps({"step": step, **finite}) + "\n"


def parse_line(line: str) -> dict[str, float | None] | None:
  """The step and its metrics, or None if the line is not that of a step."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(row, dict) or not isinstance(row.get("step"), int):
    return None
  return {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}


def lines_up_to(text: str, step: int) -> str:
  """The complete lines of steps up to `step`."""
  rows = ((line, parse_line(line)) for line in text.splitlines(keepends=True) if line.endswith("\n"))
  return "".join(line for line, row in rows if row is not None and (row["step"] or 0) <= step)


def truncate_after(path: Path, step: int) -> None:
  """Truncates a file before its first line of a later step, or before an incomplete last line.

  In place, so that it works on a full disk.
  """
  with suppress(FileNotFoundError), open(path, "rb+") as file:
    end = 0
    for line in file:
      row = parse_line(line.decode(errors="replace"))
      if not line.endswith(b"\n") or (row is not None and (row["step"] or 0) > step):
        break
      end += len(line)
    if end < os.fstat(file.fileno()).st_size:
      file.truncate(end)
