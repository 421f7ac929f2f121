"""`maxtext decode`: a trained model continues text, answers a file of prompts, or talks."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.cli.config import resolve_words
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.loader import parse_assignments, resolve

if TYPE_CHECKING:
  from maxtext.inference.loading import Loaded


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "decode",
    help="let a trained model write",
    description="Continue a prompt (prompt=...), answer a file of prompts, or talk. A run's folder brings its own "
    "configuration, parameters and tokenizer; anything else needs load_parameters_path.",
  )
  add_run_words(parser)
  way = parser.add_mutually_exclusive_group()
  way.add_argument("--prompts", metavar="FILE", help="a prompt per line; answers are lines of JSON")
  way.add_argument("--chat", action="store_true", help="talk, with the tokenizer's chat template")
  parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: all that fit)")
  parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default 0)")
  parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
  parser.set_defaults(run=_decode)


def add_run_words(parser: argparse.ArgumentParser) -> None:
  """Adds the words that describe a trained model."""
  parser.add_argument(
    "words",
    nargs="*",
    metavar="[RUN | FILE.yml | RECIPE | MODEL] key=value",
    help="a run's folder or checkpoint, or where a configuration starts from; then single keys",
  )
  parser.add_argument(
    "--ahead",
    type=int,
    default=0,
    metavar="N",
    help="tokens that are guessed in each step, by what followed the same words before; the text stays the same "
    "(default 0)",
  )
  parser.add_argument(
    "--draft",
    metavar="RUN",
    help="a smaller model of the same vocabulary, as a run's folder or checkpoint, that guesses them instead; needs "
    "--ahead",
  )


def load_run(arguments: argparse.Namespace, config: MaxTextConfig) -> "Loaded":
  """What answers, as the words say."""
  from maxtext.inference.loading import Loaded

  if arguments.ahead < 0:
    raise ConfigError(f"--ahead {arguments.ahead}: at least 0.")
  if arguments.draft and not arguments.ahead:
    raise ConfigError(f"--draft {arguments.draft}: say with --ahead N how many tokens it guesses, such as --ahead 4.")
  return Loaded.of(config, arguments.ahead, _draft(arguments.draft) if arguments.draft else None)


def resolve_run(words: Sequence[str]) -> MaxTextConfig:
  """The configuration of a trained model that those words and the environment describe."""
  if not words or "=" in words[0] or not ("://" in words[0] or Path(words[0]).expanduser().is_dir()):
    return resolve_words(words).config
  from maxtext.checkpoint.inspect import served_keys

  return resolve(None, os.environ, served_keys(words[0], parse_assignments(words[1:]))).config


def _draft(run: str) -> MaxTextConfig:
  if "://" not in run and not Path(run).expanduser().is_dir():
    raise ConfigError(f"--draft {run}: there is no such folder of a run or checkpoint.")
  return resolve_run([run])


def _decode(arguments: argparse.Namespace) -> int:
  if arguments.max_tokens is not None and arguments.max_tokens < 1:
    raise ConfigError(f"--max-tokens {arguments.max_tokens}: at least 1.")
  config = resolve_run(arguments.words)
  from maxtext.inference.decode import chat, decode, decode_file

  loaded = load_run(arguments, config)
  settings = replace(
    loaded.settings, max_tokens=arguments.max_tokens, seed=arguments.seed, stop_texts=tuple(arguments.stop)
  )
  if arguments.prompts:
    decode_file(loaded, arguments.prompts, settings, _show)
  elif arguments.chat:
    chat(loaded, _lines(), settings, _show)
  else:
    decode(loaded, settings, _show)
  return 0


def _show(text: str) -> None:
  print(text, end="", flush=True)


def _lines() -> Any:
  """What is typed; a terminal is asked."""
  while True:
    if sys.stdin.isatty():
      _show("> ")
    line = sys.stdin.readline()
    if not line:
      return
    yield line
