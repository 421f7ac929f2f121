"""The runs of a folder: what each has come to, by the files that it left. Imports no JAX."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["running", "finished", "stopped", "failed"]

_LEASE = "lease.json"  # `distributed.lease.FILE`, without its imports: its heartbeat changes the file
_STALE_SECONDS = 60.0
_TAIL_BYTES = 65536  # more than the last line of metrics


@dataclass(frozen=True)
class RunSummary:
  """What a run has come to.

  Attributes:
    state: `running` holds its lease, which a run without checkpointing never does; `finished` has done all its steps;
      `stopped` has not; `failed` has finished no step and has no checkpoint.
    step: the last finished step; 0 if there is none.
    steps: how many were asked for; None if that is not known.
    loss: of the last step.
    started: of the last start, as local time.
    bytes: of all files in the folder.
    changed: when a file in it last changed, in seconds since the epoch.
  """

  path: Path
  state: State
  step: int
  steps: int | None
  loss: float | None
  started: str
  bytes: int
  changed: float


def list_runs(folder: Path) -> list[RunSummary]:
  """The runs in a folder, the latest start first. A folder without a run's files is none."""
  paths = [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
  runs = [_summarize(path) for path in paths if _is_run(path)]
  return sorted(runs, key=lambda run: run.started, reverse=True)


def _is_run(path: Path) -> bool:
  return any((path / name).exists() for name in ("run.json", "config.json", "metrics.jsonl", "checkpoints", _LEASE))


def _summarize(path: Path) -> RunSummary:
  last = _last_metrics(path / "metrics.jsonl")
  config = _read_json(path / "config.json")
  step = _number(last.get("step")) or 0
  steps = _value(config, "steps")
  if steps == -1:
    steps = _value(config, "learning_rate_schedule_steps")
  checkpoints = path / "checkpoints"
  saved = checkpoints.is_dir() and any(entry.name.isdecimal() for entry in checkpoints.iterdir())
  found = [_stat(Path(root) / name) for root, _, names in os.walk(path) for name in names]
  files = [stat for stat in found if stat is not None]
  return RunSummary(
    path,
    _state(path, step, steps, saved),
    step,
    steps,
    float(loss) if isinstance(loss := last.get("loss"), int | float) else None,
    str(_read_json(path / "run.json").get("started", "")),
    sum(file.st_size for file in files),
    max([path.stat().st_mtime, *(file.st_mtime for file in files)]),
  )


def _state(path: Path, step: int, steps: int | None, saved: bool) -> State:
  try:
    if time.time() - (path / _LEASE).stat().st_mtime < _STALE_SECONDS:
      return "running"
  except OSError:
    pass
  if steps is not None and 0 < steps <= step:
    return "finished"
  return "stopped" if step or saved else "failed"


def _last_metrics(path: Path) -> dict[str, Any]:
  """The last whole line; a run may be writing the next one."""
  try:
    with path.open("rb") as file:
      file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
      lines = file.read().split(b"\n")
  except OSError:
    return {}
  for line in reversed(lines):
    try:
      found = json.loads(line)
    except ValueError:
      continue
    if isinstance(found, dict) and "step" in found:
      return found
  return {}


def _read_json(path: Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}


def _value(config: dict[str, Any], key: str) -> int | None:
  entry = config.get(key)
  return _number(entry.get("value")) if isinstance(entry, dict) else None


def _number(value: Any) -> int | None:
  return value if isinstance(value, int) else None


def _stat(path: Path) -> os.stat_result | None:
  try:
    return path.lstat()
  except OSError:
    return None  # it was removed meanwhile
