"""`maxtext config`: what a run would be, and what a key is. Imports no JAX."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from maxtext.configs.explain import explain
from maxtext.configs.loader import Resolved, parse_assignments, values_and_origins
from maxtext.configs.refusals import unsupported_keys
from maxtext.configs.types import DerivedValues, MaxTextConfig
from maxtext.configs.values import default_of
from maxtext.weights.resolve import resolve_source


def add_commands(commands: Any) -> None:
  """Adds `config show`, `config explain` and `config unsupported` to the parser."""
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
  unsupported = actions.add_parser("unsupported", help="the keys that are not supported whatever else is set, and why")
  unsupported.add_argument("--count", action="store_true", help="only how many")
  unsupported.set_defaults(run=_unsupported)


def add_words(parser: argparse.ArgumentParser) -> None:
  """Adds the words that describe a run."""
  parser.add_argument(
    "words",
    nargs="*",
    metavar="[FILE.yml | RECIPE | MODEL | HF_FOLDER] key=value",
    help="where the configuration starts from, then single keys",
  )
  add_strict(parser)


def add_strict(parser: argparse.ArgumentParser) -> None:
  """Adds the flag of a command that takes keys."""
  parser.add_argument("--strict", action="store_true", help="refuse keys that have no effect, instead of a warning")


def resolve_words(words: Sequence[str], strict: bool = False) -> Resolved:
  """The configuration that those words and the environment describe."""
  source = words[0] if words and "=" not in words[0] else None
  return resolve_source(source, parse_assignments(words[1:] if source else words), strict)


def _show(arguments: argparse.Namespace) -> int:
  resolved = resolve_words(arguments.words, arguments.strict)
  rows = dict(sorted(values_and_origins(resolved.config, resolved.origins).items()))
  if arguments.changed:
    rows = {key: row for key, row in rows.items() if key in _changed(resolved.config)}
  if arguments.json:
    print(json.dumps(rows, indent=1, default=str))
    return 0
  width = max(map(len, rows), default=0)
  for key, row in rows.items():
    print(f"{key:<{width}}  {json.dumps(row['value'], default=str)}  ({row['from']})")
  return 0


def _changed(config: MaxTextConfig) -> set[str]:
  """The keys that are not at their default; what follows from them is not among them."""
  keys = MaxTextConfig.model_fields.keys() - DerivedValues.model_fields.keys()
  return {key for key in keys if getattr(config, key) != default_of(key)}


def _explain(arguments: argparse.Namespace) -> int:
  print(explain(arguments.key))
  return 0


def _unsupported(arguments: argparse.Namespace) -> int:
  keys = unsupported_keys()
  if not arguments.count:
    width = max(map(len, keys))
    for key, reason in sorted(keys.items()):
      print(f"{key:<{width}}  {reason}")
  print(f"{len(keys)} of {len(MaxTextConfig.model_fields)} keys")
  return 0
