"""`maxtext doctor`: what this machine has for a run."""

import argparse
from pathlib import Path
from typing import Any


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser("doctor", help="what this machine has: devices, extras, memory, disk, speed of a matmul")
  parser.add_argument("--folder", type=Path, default=Path("runs"), help="where runs would be written (default: runs)")
  parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
  from maxtext.observe.doctor import examine

  wrong = 0
  for finding in examine(arguments.folder):
    print(f"{finding.subject:<16}  {finding.text}", flush=True)
    if finding.advice:
      wrong += 1
      print(f"{'':<16}  -> {finding.advice}", flush=True)
  return 1 if wrong else 0
