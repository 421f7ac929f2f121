"""`maxtext checkpoint`: what a checkpoint holds, and its parameters alone."""

import argparse
from typing import Any

from maxtext.cli.config import add_strict
from maxtext.configs.loader import parse_assignments
from maxtext.weights.resolve import resolve_keys


def add_commands(commands: Any) -> None:
  """Adds `checkpoint inspect` and `checkpoint export-params` to the parser."""
  parser = commands.add_parser("checkpoint", help="look into a checkpoint, export its parameters")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  inspect = actions.add_parser("inspect", help="step, schema, and every array with its shape and size")
  inspect.add_argument("path", metavar="PATH", help="a run's folder, its checkpoints, or one step")
  inspect.set_defaults(run=_inspect)
  export = actions.add_parser(
    "export-params",
    help="parameters alone, for load_parameters_path",
    description="Write parameters alone. The run's own configuration holds, with what is changed on the command line: "
    "force_unroll=true writes each layer apart, param_scan_axis=N puts the layers' dimension there.",
  )
  export.add_argument("path", metavar="PATH", help="a run's folder, its checkpoints, or one step")
  export.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
  export.add_argument("overrides", nargs="*", metavar="key=value")
  add_strict(export)
  export.set_defaults(run=_export)


def _inspect(arguments: argparse.Namespace) -> int:
  from maxtext.checkpoint.inspect import describe

  print(describe(arguments.path))
  return 0


def _export(arguments: argparse.Namespace) -> int:
  from maxtext.checkpoint.inspect import chosen_keys

  given = parse_assignments(arguments.overrides)
  keys = chosen_keys(arguments.path, given)
  config = resolve_keys(keys, arguments.strict, recorded=keys.keys() - given.keys()).config
  from maxtext.checkpoint.export import export_parameters
  from maxtext.checkpoint.options import array_storage, exported_dimension

  print(export_parameters(array_storage(config), arguments.path, arguments.out, exported_dimension(config)))
  return 0
