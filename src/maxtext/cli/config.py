"""`maxtext config`: what a run would be, and what a key is. Imports no JAX."""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from maxtext.configs.explain import explain
from maxtext.configs.loader import Resolved, parse_assignments, resolve, values_and_origins
from maxtext.configs.refusals import default_of


def add_commands(commands: Any) -> None:
  """Adds `config show` and `config explain` to the parser."""
  parser = commands.add_parser("config", help="show a configuration, explain a key")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  show = actions.add_parser("show", help="the resolved run, with where each value came from")
  add_words(show)
  show.add_argument("--changed", action="store_true", help="only what is not at its default")
  show.add_argument("--json", action="store_true", help="as a JSON object")
  show.set_defaults(run=_show)
  explained = actions.add_parser("explain", help="type, default, meaning and readers of a key")
  explained.add_argument("key", metavar="KEY")
  explained.set_defaults(run=_explain)


def add_words(parser: argparse.ArgumentParser) -> None:
  """Adds the words that describe a run."""
  parser.add_argument(
    "words",
    nargs="*",
    metavar="[FILE.yml | RECIPE | MODEL] key=value",
    help="where the configuration starts from, then single keys",
  )


def resolve_words(words: Sequence[str]) -> Resolved:
  """The configuration that those words and the environment describe."""
  source = words[0] if words and "=" not in words[0] else None
  return resolve(source, os.environ, parse_assignments(words[1:] if source else words))


def _show(arguments: argparse.Namespace) -> int:
  resolved = resolve_words(arguments.words)
  rows = dict(sorted(values_and_origins(resolved.config, resolved.origins).items()))
  if arguments.changed:
    rows = {key: row for key, row in rows.items() if getattr(resolved.config, key) != default_of(key)}
  if arguments.json:
    print(json.dumps(rows, indent=1, default=str))
    return 0
  width = max(map(len, rows), default=0)
  for key, row in rows.items():
    print(f"{key:<{width}}  {json.dumps(row['value'], default=str)}  ({row['from']})")
  return 0


def _explain(arguments: argparse.Namespace) -> int:
  print(explain(arguments.key))
  return 0
