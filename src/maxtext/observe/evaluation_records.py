"""`evaluations.jsonl` of a run's folder: what `maxtext eval` and the run have found, a line for each task of each
evaluation."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maxtext.storage.atomic import write_atomically

EVALUATIONS = "evaluations.jsonl"
_MAX_BYTES, _MAX_RECORDS, _MAX_METRICS = 2**21, 1000, 50


@dataclass(frozen=True)
class EvaluationRecord:
  """The metrics of one task.

  Attributes:
    task: its name.
    metrics: by name.
    stderr: the standard errors of those metrics that have one.
    samples: how many were scored.
    step: of the checkpoint; None where the model is not of a run.
    date: when, as text.
    while_training: whether the run found it, rather than `maxtext eval`.
  """

  task: str
  metrics: Mapping[str, float]
  stderr: Mapping[str, float] = field(default_factory=dict)
  samples: int = 0
  step: int | None = None
  date: str = ""
  while_training: bool = False


def metric_name(text: str) -> str:
  """A name that every metric writer takes."""
  return re.sub(r"\W+", "_", text)


def append_evaluations(folder: Path, records: Sequence[EvaluationRecord]) -> None:
  """Appends lines to the file of a run's folder, after the end of one that was torn; raises `OSError` if they cannot be
  written."""
  lines = "".join(json.dumps(asdict(record)) + "\n" for record in records)
  with (folder / EVALUATIONS).open("ab+") as file:
    file.seek(max(0, file.seek(0, 2) - 1))
    file.write((b"" if file.read(1) in (b"", b"\n") else b"\n") + lines.encode())


def forget_after(folder: Path, step: int) -> None:
  """Removes what the run itself found at later steps, which it writes again; raises `OSError` if that fails."""
  with suppress(FileNotFoundError):
    lines = (folder / EVALUATIONS).read_bytes().splitlines(keepends=True)
    kept = [
      line for line in lines if (found := _record(line)) is None or not found.while_training or _at(found) <= step
    ]
    if len(kept) < len(lines):
      write_atomically(folder / EVALUATIONS, b"".join(kept))


def _at(record: EvaluationRecord) -> int:
  return record.step or 0


def read_evaluations(folder: Path) -> list[EvaluationRecord]:
  """The last lines of the file; what is no record is left out."""
  try:
    with (folder / EVALUATIONS).open("rb") as file:
      file.seek(max(0, file.seek(0, 2) - _MAX_BYTES))
      lines = file.read().splitlines()[-_MAX_RECORDS:]
  except OSError:
    return []
  return [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> EvaluationRecord | None:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(row, dict) or not isinstance(row.get("task"), str):
    return None
  samples, step, date = row.get("samples"), row.get("step"), row.get("date")
  return EvaluationRecord(
    row["task"],
    _numbers(row.get("metrics")),
    _numbers(row.get("stderr")),
    samples if isinstance(samples, int) else 0,
    step if isinstance(step, int) else None,
    date if isinstance(date, str) else "",
    row.get("while_training") is True,
  )


def _numbers(found: Any) -> dict[str, float]:
  """The finite numbers of an object."""
  items = list(found.items())[:_MAX_METRICS] if isinstance(found, dict) else []
  return {name: value for name, value in items if isinstance(value, int | float) and abs(value) < 1e300}
