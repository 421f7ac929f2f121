"""`maxtext runs`: lists the runs of a folder, and removes those that came to nothing."""

import argparse
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.logs import readable_size
from maxtext.observe.runs import RunSummary, list_runs

_STARTING_SECONDS = 3600.0  # a large model takes that long to load and compile


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser("runs", help="list runs, remove those that came to nothing")
  parser.add_argument("action", nargs="?", choices=("list", "clean"), default="list", metavar="list | clean")
  parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the runs are (default: runs)")
  parser.add_argument("--yes", action="store_true", help="with clean: remove them, instead of only naming them")
  parser.set_defaults(run=_runs)


def _runs(arguments: argparse.Namespace) -> int:
  if not arguments.folder.is_dir():
    raise ConfigError(f"--folder {arguments.folder} is not a folder: train something, or name another one.")
  runs = list_runs(arguments.folder)
  return (_clean if arguments.action == "clean" else _list)(runs, arguments)


def _list(runs: list[RunSummary], arguments: argparse.Namespace) -> int:
  rows = [
    [
      run.path.name,
      run.state,
      f"{run.step:,} of {run.steps:,}" if run.steps else f"{run.step:,}",
      "" if run.loss is None else f"{run.loss:.4f}",
      _best(run.path),
      readable_size(run.bytes),
      run.started[:16],
    ]
    for run in runs
  ]
  rows = [["run", "state", "steps", "loss", "best", "size", "started"], *rows]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
  return 0


def _best(path: Path) -> str:
  """The step of the best checkpoint, with what its evaluation found; empty where none was evaluated."""
  from etils import epath

  from maxtext.checkpoint.best import best_step, scores_in
  from maxtext.checkpoint.location import FOLDER
  from maxtext.checkpoint.metadata import Score

  scores: dict[int, Score] = {}
  with suppress(RunError):  # a folder that cannot be read
    scores = scores_in(epath.Path(path / FOLDER))
  step = best_step(scores)
  return "" if step is None else f"{step:,} ({scores[step].value:.4f})"


def _clean(runs: list[RunSummary], arguments: argparse.Namespace) -> int:
  """Only runs without a finished step and without a checkpoint: there is nothing in them that could be missed."""
  nothing = [run for run in runs if run.state == "failed"]
  failed = [run.path for run in nothing if time.time() - run.changed > _STARTING_SECONDS]
  for run in nothing:
    if run.path not in failed:
      print(f"left {run.path}: it changed in the last hour, and may be starting")
  for path in failed:
    if arguments.yes:
      _remove(path)
    print(f"{'removed' if arguments.yes else 'would remove'} {path}")
  if failed and not arguments.yes:
    print("Add --yes to remove them.")
  if not nothing:
    print(f"Every run in {arguments.folder} has a finished step or a checkpoint.")
  return 0


def _remove(path: Path) -> None:
  try:
    path.unlink() if path.is_symlink() else shutil.rmtree(path)
  except OSError as error:
    raise ConfigError(f"{path} cannot be removed: {error.strerror}.") from None
