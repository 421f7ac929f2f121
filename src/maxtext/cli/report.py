"""`maxtext report`: one run, or several side by side, as a page."""

import argparse
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser("report", help="draw one run, or compare several", description=_DESCRIPTION)
  parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
  parser.add_argument("--out", type=Path, metavar="FILE.html", help="where to write (default: the first run's folder)")
  parser.add_argument("--serve", action="store_true", help="serve a page that follows the runs, on this machine")
  parser.add_argument("--port", type=int, metavar="PORT", help="with --serve: the port (default: a free one)")
  parser.set_defaults(run=_report)


_DESCRIPTION = (
  "Write a page with the facts, plots and samples of one run, or a comparison of several; or serve it live."
)


def _report(arguments: argparse.Namespace) -> int:
  if arguments.serve:
    return _serve(arguments)
  if arguments.port is not None:
    raise ConfigError("--port goes with --serve.")
  from maxtext.observe.report import write_report

  target = arguments.out or arguments.runs[0] / "report.html"
  try:
    print(write_report(arguments.runs, target))
  except OSError as error:
    raise ConfigError(f"{target} cannot be written: {error.strerror}.") from None
  return 0


def _serve(arguments: argparse.Namespace) -> int:
  if arguments.out:
    raise ConfigError("--out writes a file and --serve serves a page: choose one.")
  from maxtext.observe.report_server import ReportServer

  server = ReportServer(arguments.runs, arguments.port or 0)
  print(f"{server.url} (Ctrl-C ends it)", flush=True)
  try:
    server.serve()
  except KeyboardInterrupt:
    print()
  return 0
