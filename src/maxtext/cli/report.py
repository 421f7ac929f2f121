"""`maxtext report`: pictures of one run, or of several side by side."""

import argparse
from pathlib import Path
from typing import Any


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser("report", help="draw one run, or compare several")
  parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
  parser.add_argument("--out", type=Path, metavar="FILE.html", help="where to write (default: the first run's folder)")
  parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
  from maxtext.observe.report import write_report

  print(write_report(arguments.runs, arguments.out or arguments.runs[0] / "report.html"))
  return 0
