"""Entry point. Each command imports what it needs when it runs, so that `--help` is instant."""

import argparse
import sys
from collections.abc import Sequence

from maxtext.configs import ConfigError, load_config
from maxtext.configs.loader import parse_assignments
from maxtext.configs.types import MaxTextConfig


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command and returns its exit code: 2 for a user's mistake, 130 for Ctrl-C."""
  arguments = _parser().parse_args(argv)
  try:
    return arguments.run(arguments)
  except ConfigError as error:
    print(f"maxtext: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("maxtext: stopped.", file=sys.stderr)
    return 130


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="maxtext", description="Train large language models with JAX.")
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  train = commands.add_parser("train", help="train a model", description="Train a model.")
  train.add_argument(
    "words",
    nargs="*",
    metavar="[FILE.yml | RECIPE | MODEL] key=value",
    help="where the configuration starts from, then single keys",
  )
  train.set_defaults(run=_train)
  return parser


def _train(arguments: argparse.Namespace) -> int:
  config = _config(arguments.words)
  from maxtext.train.run import train

  train(config)
  return 0


def _config(words: Sequence[str]) -> MaxTextConfig:
  source = words[0] if words and "=" not in words[0] else None
  return load_config(source, **parse_assignments(words[1:] if source else words))
