"""The flags of some commands as a golden file, so that a rename is deliberate.

After a change of the flags, write the file again and review its diff:

  python -m tests.test_cli_flags
"""

import argparse
from pathlib import Path

from maxtext.cli.main import _parser

GOLDEN = Path(__file__).parent / "data" / "cli_flags.txt"
COMMANDS = (("train",), ("decode",), ("serve",), ("bench", "serve"), ("report",))


def subparser(parser, name):
  (action,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
  return action.choices[name]


def lines():
  """One line per flag: command, flag, value and default."""
  for command in COMMANDS:
    parser = _parser()
    for name in command:
      parser = subparser(parser, name)
    for action in parser._actions:
      for flag in action.option_strings:
        if flag not in ("-h", "--help"):
          value = f" {action.metavar}" if action.metavar else ""
          default = "" if action.default in (None, False, []) else f" (default {action.default})"
          yield f"{' '.join(command)} {flag}{value}{default}\n"


def test_flags_are_those_of_the_golden_file():
  assert GOLDEN.read_text().splitlines() == "".join(lines()).splitlines()


if __name__ == "__main__":
  GOLDEN.write_text("".join(lines()))
