"""`maxtext config`: shows a configuration and explains keys. Imports no JAX."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from maxtext.configs import ConfigError
from maxtext.configs.explain import explain, search_keys
from maxtext.configs.loader import Resolved, parse_assignments, values_and_origins
from maxtext.configs.secrets import SECRET_KEYS
from maxtext.configs.types import DerivedValues, MaxTextConfig
from maxtext.configs.unsupported import unsupported_keys
from maxtext.configs.values import default_of
from maxtext.weights.resolve import resolve_source

METHODS: dict[str, tuple[str, ...]] = {
  "train": (),
  "sft": ("use_sft=true",),
  "dpo": ("use_dpo=true",),
  "rl": ("use_grpo=true",),
  "distill": (),
}
"""The commands that train, each with the key that chooses its method."""


def add_commands(commands: Any) -> None:
  """Adds the actions of `maxtext config` to the parser."""
  parser = commands.add_parser("config", help="show a configuration, explain a key")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  show = actions.add_parser("show", help="the resolved run, with where each value came from")
  add_overrides(show)
  show.add_argument("--changed", action="store_true", help="only what is not at its default")
  show.add_argument("--json", action="store_true", help="as a JSON object")
  show.set_defaults(run=_show)
  explained = actions.add_parser("explain", help="type, default, meaning and readers of a key")
  explained.add_argument("key", metavar="KEY")
  explained.set_defaults(run=_explain)
  search = actions.add_parser("search", help="the keys whose name or description has these words")
  search.add_argument("words", nargs="+", metavar="WORD")
  search.set_defaults(run=_search)
  schema = actions.add_parser("schema", help="the JSON schema of a configuration file, for editors")
  schema.set_defaults(run=_schema)
  unsupported = actions.add_parser("unsupported", help="the keys that are not supported whatever else is set, and why")
  unsupported.add_argument("--count", action="store_true", help="only how many")
  unsupported.set_defaults(run=_unsupported)


def add_overrides(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments that describe a run: a source, then `key=value` overrides."""
  parser.add_argument(
    "overrides",
    nargs="*",
    metavar="[FILE.yml | RECIPE | MODEL | HF_FOLDER] key=value",
    help="what the configuration starts from, then overrides of single keys",
  )
  add_strict(parser)


def add_strict(parser: argparse.ArgumentParser) -> None:
  """Adds `--strict`, for commands that take overrides."""
  parser.add_argument(
    "--strict", action="store_true", help="keys that have no effect are an error instead of a warning"
  )


def resolve_overrides(overrides: Sequence[str], strict: bool = False) -> Resolved:
  """The configuration of a source, overrides and the environment."""
  source = overrides[0] if overrides and "=" not in overrides[0] else None
  return resolve_source(source, parse_assignments(overrides[1:] if source else overrides), strict)


def given_values(resolved: Resolved) -> dict[str, Any]:
  """What the user said of the run, but for where it is compiled."""
  values = resolved.config.model_dump(mode="json")
  own = [key for key, origin in resolved.origins.items() if origin != "base.yml" and not origin.startswith("model ")]
  return {key: values[key] for key in own if not key.startswith("compile_topology") and key not in SECRET_KEYS}


def _show(arguments: argparse.Namespace) -> int:
  resolved = resolve_overrides(arguments.overrides, arguments.strict)
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
  """The keys that are not at their default, without derived values."""
  keys = MaxTextConfig.model_fields.keys() - DerivedValues.model_fields.keys()
  return {key for key in keys if getattr(config, key) != default_of(key)}


def _explain(arguments: argparse.Namespace) -> int:
  print(explain(arguments.key))
  return 0


def _search(arguments: argparse.Namespace) -> int:
  found = search_keys(arguments.words)
  if not found:
    raise ConfigError(f"No key has '{' '.join(arguments.words)}' in its name or description: try fewer words.")
  width = max(map(len, found))
  for key, description in found.items():
    print(f"{key:<{width}}  {description}")
  return 0


def _schema(arguments: argparse.Namespace) -> int:
  print(json.dumps(MaxTextConfig.model_json_schema(), indent=1, default=str))
  return 0


def _unsupported(arguments: argparse.Namespace) -> int:
  keys = unsupported_keys()
  if not arguments.count:
    width = max(map(len, keys))
    for key, reason in sorted(keys.items()):
      print(f"{key:<{width}}  {reason}")
  print(f"{len(keys)} of {len(MaxTextConfig.model_fields)} keys")
  return 0
