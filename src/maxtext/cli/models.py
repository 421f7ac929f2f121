"""`maxtext models`: the named models, and the layers of one."""

import argparse
import dataclasses
import json
from typing import Any


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser("models", help="list the named models, or draw one")
  parser.add_argument("name", nargs="?", metavar="NAME", help="draw the layers of this model, recipe or FILE.yml")
  parser.add_argument("--json", action="store_true", help="as JSON")
  parser.set_defaults(run=_models)


def _models(arguments: argparse.Namespace) -> int:
  from maxtext.models.catalogue import Entry, catalogue, entry, picture

  if arguments.name and not arguments.json:
    print(picture(arguments.name))
    return 0
  entries = [entry(arguments.name)] if arguments.name else catalogue()
  rows = [dataclasses.asdict(e) for e in entries]
  if arguments.json:
    print(json.dumps(rows, indent=1))
    return 0
  columns = [field.name for field in dataclasses.fields(Entry)]
  cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
  for row in cells:
    columns_text = (
      cell.rjust(w) if i in _NUMBERS else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    )
    print("  ".join(columns_text).rstrip())
  return 0


_NUMBERS = (2, 3, 4)


def _cell(value: Any) -> str:
  if isinstance(value, bool):
    return "yes" if value else "no"
  return f"{value:,}" if isinstance(value, int) else value
