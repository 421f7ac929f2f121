"""`maxtext decode` and `maxtext chat`: text from a trained model, by one prompt, a file of prompts, or a chat."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
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
  from maxtext.inference.llm import LLM
  from maxtext.inference.sampling import SamplingParams


_SOURCES = (
  "A run folder provides the configuration, the parameters and the tokenizer, and so does a Hugging Face folder of "
  "safetensors; anything else needs load_parameters_path."
)
# The flags of other tools, by the keys that they set.
_KEY_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
  "--temperature": (
    "decode_sampling_temperature",
    {"type": float, "metavar": "T", "help": "default temperature of sampling; 0 is greedy (default greedy)"},
  ),
  "--top-p": ("decode_sampling_nucleus_p", {"type": float, "metavar": "P", "help": "default top-p of sampling"}),
  "--top-k": ("decode_sampling_top_k", {"type": int, "metavar": "K", "help": "default top-k of sampling"}),
  "--max-model-len": (
    "max_target_length",
    {
      "type": int,
      "metavar": "N",
      "help": "longest sequence, prompt and output together; prompts may have one token less, unless "
      "max_prefill_predict_length is given",
    },
  ),
  "--max-num-seqs": (
    "per_device_batch_size",
    {"type": int, "metavar": "N", "help": "sequences that are decoded at once on each device"},
  ),
  "--enable-prefix-caching": (
    "enable_prefix_caching",
    {"action": "store_const", "const": "true", "help": "keep the KV cache of prompts for later ones"},
  ),
}
_SAMPLING_FLAGS = ("--temperature", "--top-p", "--top-k")
_STRATEGIES = {(False, False): "weighted", (True, False): "nucleus", (False, True): "topk", (True, True): "composite"}


def add_commands(commands: Any) -> None:
  """Adds the commands to the parser."""
  parser = commands.add_parser(
    "decode",
    help="generate text with a trained model",
    description=f"Complete a prompt (prompt=...), or a file of prompts. {_SOURCES}",
  )
  _add_arguments(parser, _decode)
  parser.add_argument("--prompts-file", metavar="FILE", help="one prompt per line; prints one line of JSON for each")
  parser = commands.add_parser(
    "chat",
    help="chat with a trained model in the terminal",
    description=f"Chat by the tokenizer's chat template. Ctrl-C ends an answer, and then the chat. {_SOURCES}",
  )
  _add_arguments(parser, _chat)


def _add_arguments(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
  add_model_arguments(parser)
  parser.add_argument("--max-tokens", type=int, metavar="N", help="most output tokens (default: as many as fit)")
  parser.add_argument("--seed", type=int, default=0, metavar="N", help="sampling seed (default 0)")
  parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
  parser.set_defaults(run=run)


def add_model_arguments(parser: argparse.ArgumentParser, sampling: bool = True) -> None:
  """Adds the arguments that describe a trained model, and the defaults of `sampling`."""
  parser.add_argument(
    "overrides",
    nargs="*",
    metavar="[RUN | HF_FOLDER | FILE.yml | RECIPE | MODEL] key=value",
    help="a run folder or checkpoint, a folder of safetensors, or a configuration, recipe or model name; then keys",
  )
  add_strict(parser)
  for flag, (_, options) in _KEY_FLAGS.items():
    if sampling or flag not in _SAMPLING_FLAGS:
      parser.add_argument(flag, **options)
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


def key_overrides(arguments: argparse.Namespace) -> list[str]:
  """The words of a command, with the keys that its flags are names for."""
  words = list(arguments.overrides)
  keys = {word.partition("=")[0] for word in words if "=" in word}
  given = {flag: getattr(arguments, flag[2:].replace("-", "_"), None) for flag in _KEY_FLAGS}
  for flag, value in given.items():
    key = _KEY_FLAGS[flag][0]
    if value is not None and key in keys:
      raise ConfigError(f"{flag} {value}: {key} is given too, which is the same: leave one of them out.")
  found = {_KEY_FLAGS[flag][0]: value for flag, value in given.items() if value is not None}
  if (longest := given["--max-model-len"]) is not None:
    if longest < 2:
      raise ConfigError(f"--max-model-len {longest}: a prompt and an output have at least 2 tokens.")
    found |= {} if "max_prefill_predict_length" in keys else {"max_prefill_predict_length": longest - 1}
  sampling = [given[flag] for flag in _SAMPLING_FLAGS]
  if sampling != [None] * 3 and "decode_sampling_strategy" not in keys:
    greedy = sampling[0] == 0
    found["decode_sampling_strategy"] = (
      "greedy" if greedy else _STRATEGIES[sampling[1] is not None, sampling[2] is not None]
    )
    if greedy:
      del found["decode_sampling_temperature"]
  return [*words, *(f"{key}={value}" for key, value in found.items())]


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
  llm, sampling_params = _load(arguments)
  from maxtext.inference.decode import decode, decode_file

  if arguments.prompts_file:
    decode_file(llm, arguments.prompts_file, sampling_params, _show)
  else:
    decode(llm, sampling_params, _show)
  return 0


def _chat(arguments: argparse.Namespace) -> int:
  llm, sampling_params = _load(arguments)
  from maxtext.inference.decode import chat

  chat(llm, _lines(), sampling_params, _show, _dim)
  return 0


def _load(arguments: argparse.Namespace) -> "tuple[LLM, SamplingParams]":
  """The model of a command, and its sampling parameters."""
  if arguments.max_tokens is not None and arguments.max_tokens < 1:
    raise ConfigError(f"--max-tokens {arguments.max_tokens}: it must be at least 1.")
  config = resolve_model_config(key_overrides(arguments), arguments.strict)
  from maxtext.inference.llm import LLM

  llm = LLM.of(load_model(arguments, config))
  stop = tuple(arguments.stop)
  return llm, replace(llm.sampling_params, max_tokens=arguments.max_tokens, seed=arguments.seed, stop=stop)


def _show(text: str) -> None:
  print(text, end="", flush=True)


def _dim(text: str) -> str:
  return f"\x1b[2m{text}\x1b[22m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def _lines() -> Any:
  """Lines of standard input, with a prompt on a terminal."""
  while True:
    if sys.stdin.isatty():
      _show("> ")
    line = sys.stdin.readline()
    if not line:
      return
    yield line
