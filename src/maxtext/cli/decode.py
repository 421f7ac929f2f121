"""`maxtext decode`: generate text with a trained model from one prompt, a file of prompts, or a chat."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.cli.config import add_strict
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.loader import parse_assignments
from maxtext.inference.resolve import resolve_draft_model, resolve_model
from maxtext.weights.detect import is_hugging_face

if TYPE_CHECKING:
  from maxtext.inference.adapter_options import AdapterOptions
  from maxtext.inference.inference_model import InferenceModel


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "decode",
    help="generate text with a trained model",
    description="Complete a prompt (prompt=...), a file of prompts, or chat. A run folder provides the configuration, "
    "the parameters and the tokenizer, and so does a Hugging Face folder of safetensors; anything else needs "
    "load_parameters_path.",
  )
  add_model_arguments(parser)
  mode = parser.add_mutually_exclusive_group()
  mode.add_argument("--prompts-file", metavar="FILE", help="one prompt per line; prints one line of JSON for each")
  mode.add_argument("--chat", action="store_true", help="chat in the terminal, with the tokenizer's chat template")
  parser.add_argument("--max-tokens", type=int, metavar="N", help="most output tokens (default: as many as fit)")
  parser.add_argument("--seed", type=int, default=0, metavar="N", help="sampling seed (default 0)")
  parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
  parser.set_defaults(run=_decode)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments that describe a trained model."""
  parser.add_argument(
    "overrides",
    nargs="*",
    metavar="[RUN | HF_FOLDER | FILE.yml | RECIPE | MODEL] key=value",
    help="a run folder or checkpoint, a folder of safetensors, or a configuration, recipe or model name; then keys",
  )
  add_strict(parser)
  parser.add_argument(
    "--num-speculative-tokens",
    type=int,
    default=0,
    metavar="N",
    help="speculative decoding: draft tokens of each step, by prompt lookup (n-gram) unless --draft-model is given; "
    "the output stays the same (default 0)",
  )
  parser.add_argument(
    "--draft-model",
    metavar="RUN",
    help="run folder or checkpoint of a smaller model with the same vocabulary that proposes the draft tokens; needs "
    "--num-speculative-tokens",
  )


def load_model(
  arguments: argparse.Namespace, config: MaxTextConfig, adapter_options: "AdapterOptions | None" = None
) -> "InferenceModel":
  """Loads the model of a configuration, with speculative decoding if the flags ask for it, and adapters."""
  from maxtext.inference.inference_model import InferenceModel

  num_speculative_tokens, draft_model = arguments.num_speculative_tokens, arguments.draft_model
  if num_speculative_tokens < 0:
    raise ConfigError(f"--num-speculative-tokens {num_speculative_tokens}: it must be at least 0.")
  if draft_model and not num_speculative_tokens:
    raise ConfigError(
      f"--draft-model {draft_model}: set --num-speculative-tokens too, such as --num-speculative-tokens 4."
    )
  draft_config = resolve_draft_model(draft_model, "--draft-model") if draft_model else None
  return InferenceModel.load(config, num_speculative_tokens, draft_config, adapter_options)


def resolve_model_config(words: Sequence[str], strict: bool = False) -> MaxTextConfig:
  """The configuration of a trained model from the command line and the environment."""
  words = _with_folder(words)
  source = words[0] if words and "=" not in words[0] else None
  return resolve_model(source, parse_assignments(words[1:] if source else words), strict)


def _with_folder(words: Sequence[str]) -> Sequence[str]:
  """Replaces `inference.yml run_name=first`, with the file of this package, by the folder of that run if it exists."""
  source, given = words[:1] if words and "=" not in words[0] else [], [word for word in words if "=" in word]
  keys = parse_assignments(given)
  if any(Path(word).name != "inference.yml" or Path(word).exists() for word in source) or not keys.get("run_name"):
    return words
  folder = Path(keys.get("base_output_directory") or "runs").expanduser() / str(keys["run_name"])
  if "load_parameters_path" in keys or not folder.is_dir():
    return words
  return [str(folder), *(word for word in given if not word.startswith("run_name="))]


def folder_name(config: MaxTextConfig) -> str:
  """The name of a Hugging Face folder whose configuration names no model; empty for anything else."""
  nameless = config.model_name == "default" and is_hugging_face(config.load_parameters_path)
  return Path(config.load_parameters_path).expanduser().resolve().name if nameless else ""


def _decode(arguments: argparse.Namespace) -> int:
  if arguments.max_tokens is not None and arguments.max_tokens < 1:
    raise ConfigError(f"--max-tokens {arguments.max_tokens}: it must be at least 1.")
  config = resolve_model_config(arguments.overrides, arguments.strict)
  from maxtext.inference.decode import chat, decode, decode_file
  from maxtext.inference.llm import LLM

  llm = LLM.of(load_model(arguments, config))
  sampling_params = replace(
    llm.sampling_params, max_tokens=arguments.max_tokens, seed=arguments.seed, stop=tuple(arguments.stop)
  )
  if arguments.prompts_file:
    decode_file(llm, arguments.prompts_file, sampling_params, _show)
  elif arguments.chat:
    chat(llm, _lines(), sampling_params, _show)
  else:
    decode(llm, sampling_params, _show)
  return 0


def _show(text: str) -> None:
  print(text, end="", flush=True)


def _lines() -> Any:
  """Lines of standard input, with a prompt on a terminal."""
  while True:
    if sys.stdin.isatty():
      _show("> ")
    line = sys.stdin.readline()
    if not line:
      return
    yield line
