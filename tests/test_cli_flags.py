"""The flags of some commands as a golden file, so that a rename is deliberate.

After a change of the flags, write the file again and review its diff:

  python -m tests.test_cli_flags
"""

import argparse
from pathlib import Path

import pytest

from maxtext.cli.decode import key_overrides
from maxtext.cli.main import _parse, _parser
from maxtext.configs import ConfigError

GOLDEN = Path(__file__).parent / "data" / "cli_flags.txt"
COMMANDS = (("train",), ("decode",), ("chat",), ("serve",), ("eval",), ("bench", "serve"), ("report",))


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


@pytest.mark.parametrize(
  ("words", "keys"),
  [
    ([], {}),
    (["--temperature=0"], {"decode_sampling_strategy": "greedy"}),
    (["--temperature", "0.5"], {"decode_sampling_temperature": "0.5", "decode_sampling_strategy": "weighted"}),
    (["--top-p=0.9"], {"decode_sampling_nucleus_p": "0.9", "decode_sampling_strategy": "nucleus"}),
    (["--top-k=3"], {"decode_sampling_top_k": "3", "decode_sampling_strategy": "topk"}),
    (["--top-k=3", "decode_sampling_strategy=composite"],
     {"decode_sampling_top_k": "3", "decode_sampling_strategy": "composite"}),
    (["--max-model-len=64"], {"max_target_length": "64", "max_prefill_predict_length": "63"}),
    (["--max-model-len=64", "max_prefill_predict_length=9"],
     {"max_target_length": "64", "max_prefill_predict_length": "9"}),
    (["--max-num-seqs=3", "--enable-prefix-caching"], {"per_device_batch_size": "3", "enable_prefix_caching": "true"}),
  ],
)  # fmt: skip
def test_flags_are_names_of_keys(words, keys):
  for command in ("serve", "decode", "chat"):
    found = key_overrides(_parse([command, "run", *words]))
    assert found[0] == "run"
    assert dict(word.split("=") for word in found[1:]) == keys


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--temperature=1", "decode_sampling_temperature=2"], "--temperature 1.0: decode_sampling_temperature is given"),
    (["--max-model-len=1"], "--max-model-len 1: a prompt and an output"),
  ],
)
def test_flags_that_contradict_keys_are_named(words, message):
  with pytest.raises(ConfigError, match=message):
    key_overrides(_parse(["serve", "run", *words]))


if __name__ == "__main__":
  GOLDEN.write_text("".join(lines()))
