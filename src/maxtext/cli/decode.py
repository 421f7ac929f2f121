"""`maxtext decode`: a trained model continues text, answers a file of prompts, or talks."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.cli.config import add_strict
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.loader import parse_assignments
from maxtext.inference.source import resolve_draft, resolve_model
from maxtext.weights.detect import is_hugging_face

if TYPE_CHECKING:
  from maxtext.inference.loading import Loaded


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "decode",
    help="let a trained model write",
    description="Continue a prompt (prompt=...), answer a file of prompts, or talk. A run's folder brings its own "
    "configuration, parameters and tokenizer, and so does a folder of safetensors with its config.json; anything else "
    "needs load_parameters_path.",
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
    "overrides",
    nargs="*",
    metavar="[RUN | HF_FOLDER | FILE.yml | RECIPE | MODEL] key=value",
    help="a run's folder or checkpoint, a folder of safetensors, or where a configuration starts from; then keys",
  )
  add_strict(parser)
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
  return Loaded.of(config, arguments.ahead, resolve_draft(arguments.draft, "--draft") if arguments.draft else None)


def resolve_run(words: Sequence[str], strict: bool = False) -> MaxTextConfig:
  """The configuration of a trained model that those words and the environment describe."""
  words = _with_folder(words)
  source = words[0] if words and "=" not in words[0] else None
  return resolve_model(source, parse_assignments(words[1:] if source else words), strict)


def _with_folder(words: Sequence[str]) -> Sequence[str]:
  """`inference.yml run_name=first`, by the file that comes with this package, as the folder of that run, if there is
  one."""
  source, given = words[:1] if words and "=" not in words[0] else [], [word for word in words if "=" in word]
  keys = parse_assignments(given)
  if any(Path(word).name != "inference.yml" or Path(word).exists() for word in source) or not keys.get("run_name"):
    return words
  folder = Path(keys.get("base_output_directory") or "runs").expanduser() / str(keys["run_name"])
  if "load_parameters_path" in keys or not folder.is_dir():
    return words
  return [str(folder), *(word for word in given if not word.startswith("run_name="))]


def folder_name(config: MaxTextConfig) -> str:
  """What a model that has no name goes by, where it is a folder of safetensors."""
  nameless = config.model_name == "default" and is_hugging_face(config.load_parameters_path)
  return Path(config.load_parameters_path).expanduser().resolve().name if nameless else ""


def _decode(arguments: argparse.Namespace) -> int:
  if arguments.max_tokens is not None and arguments.max_tokens < 1:
    raise ConfigError(f"--max-tokens {arguments.max_tokens}: at least 1.")
  config = resolve_run(arguments.overrides, arguments.strict)
  from maxtext.inference.decode import chat, decode, decode_file
  from maxtext.inference.llm import LLM

  llm = LLM.of(load_run(arguments, config))
  sampling_params = replace(
    llm.sampling_params, max_tokens=arguments.max_tokens, seed=arguments.seed, stop=tuple(arguments.stop)
  )
  if arguments.prompts:
    decode_file(llm, arguments.prompts, sampling_params, _show)
  elif arguments.chat:
    chat(llm, _lines(), sampling_params, _show)
  else:
    decode(llm, sampling_params, _show)
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
