"""`maxtext convert`: weights from Hugging Face folders, and to them."""

import argparse
import os
from contextlib import closing
from typing import Any, Literal

from maxtext.cli.config import add_strict
from maxtext.cli.display import open_display
from maxtext.configs.loader import parse_assignments


def add_commands(commands: Any) -> None:
  """Adds `convert from-hf`, `convert to-hf` and `convert to-peft` to the parser."""
  parser = commands.add_parser("convert", help="weights from Hugging Face folders, and to them")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  come = actions.add_parser(
    "from-hf",
    help="a checkpoint of parameters from a folder of safetensors",
    description="Write a checkpoint for load_parameters_path. The model is told by the folder's config.json; a folder "
    "without one needs model_name=..., or decoder_block=... and its sizes. weight_dtype is what is written. Started "
    "again, it resumes.",
  )
  come.add_argument("folder", metavar="HF_FOLDER", help="with config.json and safetensors")
  go = actions.add_parser(
    "to-hf",
    help="a folder of safetensors from a checkpoint",
    description="Write a folder that transformers loads. The run's own keys hold, with what is changed on the command "
    "line: weight_dtype=bfloat16, tokenizer_path=FOLDER for another tokenizer than the run's own. Started again, it "
    "resumes.",
  )
  go.add_argument("folder", metavar="CHECKPOINT", help="a run's folder, its checkpoints, one step, or parameters")
  go.add_argument("--shard-gigabytes", type=float, default=5, metavar="GB", help="most in one file (default 5)")
  adapters = actions.add_parser(
    "to-peft",
    help="a PEFT folder from the LoRA adapters of a run",
    description="Write adapter_config.json and adapter_model.safetensors, for PEFT, vLLM and lora_input_adapters_path. "
    "to-hf writes the weights with the adapters merged into them.",
  )
  adapters.add_argument("folder", metavar="CHECKPOINT", help="a run's folder, its checkpoints, one step, or parameters")
  for action, run in ((come, _from_hf), (go, _to_hf), (adapters, _to_peft)):
    action.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    action.add_argument("overrides", nargs="*", metavar="key=value")
    add_strict(action)
    action.set_defaults(run=run)


def _from_hf(arguments: argparse.Namespace) -> int:
  return _convert(arguments, "part", "maxtext")


def _to_hf(arguments: argparse.Namespace) -> int:
  return _convert(arguments, "shard", "huggingface", shard_gigabytes=arguments.shard_gigabytes)


def _to_peft(arguments: argparse.Namespace) -> int:
  return _convert(arguments, "shard", "peft")


def _convert(
  arguments: argparse.Namespace, unit: str, to: Literal["maxtext", "huggingface", "peft"], **options: Any
) -> int:
  os.environ["JAX_PLATFORMS"] = "cpu"  # whatever accelerator is here may be busy, and is not needed
  from maxtext.weights.convert import convert

  keys = parse_assignments(arguments.overrides)
  with closing(open_display(unit)) as display:
    convert(
      arguments.folder, arguments.out, to=to, progress=display.progress, strict=arguments.strict, **options, **keys
    )
  return 0
