"""`maxtext plan`: what a run would need and how fast it would be, before any hardware is rented."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from maxtext.cli import config


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "plan",
    help="compile the step for hardware that is not here: does it fit, how fast is it",
    description="Compile the real train step for compile_topology on this machine and read what the compiler says.",
  )
  config.add_words(parser)
  parser.add_argument("--json", action="store_true", help="as a JSON object")
  parser.add_argument("--html", type=Path, metavar="FILE.html", help="also draw it")
  parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
  resolved = config.resolve_words(arguments.words)
  os.environ["JAX_PLATFORMS"] = "cpu"  # the compiler is asked by name; no accelerator of this machine is touched
  from maxtext.plan.picture import as_page
  from maxtext.plan.plan import make_plan
  from maxtext.plan.text import as_text

  plan = make_plan(resolved.config)
  print(json.dumps(plan.as_json(), indent=1) if arguments.json else as_text(plan))
  if arguments.html:
    arguments.html.write_text(as_page(plan), encoding="utf-8")
    if not arguments.json:
      print(f"drawn in {arguments.html}")
  return 0
