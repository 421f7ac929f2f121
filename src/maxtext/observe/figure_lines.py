"""The lines of a metrics file: a JSON object per step. Written by sinks, read by a resumed run and by the report.

Whoever reads skips what is no such object: a process may be killed, and a disk may fill up, in the middle of a line.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def format_line(step: int, figures: Mapping[str, float]) -> str:
  """What is not a number is null."""
  finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
  return json.dumps({"step": step, **finite}) + "\n"


def parse_line(line: str) -> dict[str, float | None] | None:
  """The step and its figures, or None if this is no line of a step."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(row, dict) or not isinstance(row.get("step"), int):
    return None
  return {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}


def lines_until(text: str, step: int) -> str:
  """The whole lines of steps up to that one."""
  rows = ((line, parse_line(line)) for line in text.splitlines(keepends=True) if line.endswith("\n"))
  return "".join(line for line, row in rows if row is not None and (row["step"] or 0) <= step)


def cut_after(path: Path, step: int) -> None:
  """Ends a file before its first line of a later step, or before a last line that is not whole.

  In place: that needs no room on a full disk.
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
