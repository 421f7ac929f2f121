"""`maxtext convert`: weights from Hugging Face folders, and to them."""

import argparse
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from maxtext.cli.display import open_display
from maxtext.configs.loader import parse_assignments, resolve, values_and_origins


def add_commands(commands: Any) -> None:
  """Adds `convert from-hf` and `convert to-hf` to the parser."""
  parser = commands.add_parser("convert", help="weights from Hugging Face folders, and to them")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  come = actions.add_parser(
    "from-hf",
    help="a checkpoint of parameters from a folder of safetensors",
    description="Write a checkpoint for load_parameters_path. The model is told by the folder's config.json, or by "
    "keys: model_name=..., or decoder_block=... and its sizes. weight_dtype is what is written. Started again, it goes "
    "on where it was.",
  )
  come.add_argument("folder", metavar="HF_FOLDER", help="with config.json and safetensors")
  go = actions.add_parser(
    "to-hf",
    help="a folder of safetensors from a checkpoint",
    description="Write a folder that transformers loads. The run's own keys hold, with what is changed on the command "
    "line: weight_dtype=bfloat16, tokenizer_path=FOLDER for a tokenizer to put beside the weights. Started again, it "
    "goes on where it was.",
  )
  go.add_argument("folder", metavar="CHECKPOINT", help="a run's folder, its checkpoints, one step, or parameters")
  go.add_argument("--shard-gigabytes", type=float, default=5, metavar="GB", help="most in one file (default 5)")
  for action, run in ((come, _from_hf), (go, _to_hf)):
    action.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    action.add_argument("words", nargs="*", metavar="key=value")
    action.set_defaults(run=run)


def _from_hf(arguments: argparse.Namespace) -> int:
  os.environ["JAX_PLATFORMS"] = "cpu"  # whatever accelerator is here may be busy, and is not needed
  from maxtext.models.build import abstract_model
  from maxtext.weights.description import find_model
  from maxtext.weights.folder import Folder
  from maxtext.weights.incoming import convert_in

  folder, words = Folder(arguments.folder), {"dataset_type": "synthetic"} | parse_assignments(arguments.words)
  with closing(open_display("piece")) as display:
    if not words.keys() & {"model_name", "decoder_block"}:
      words["model_name"] = find_model(folder)
      display.say(f"{folder.path} is {words['model_name']}")
    resolved = resolve(None, os.environ, words)
    keys = values_and_origins(resolved.config, resolved.origins)
    model, out = abstract_model(resolved.config), Path(arguments.out)
    path = convert_in(resolved.config, model, folder, out, keys, display.progress)
  print(f"{path}: {model.size:,} parameters, for load_parameters_path")
  return 0


def _to_hf(arguments: argparse.Namespace) -> int:
  os.environ["JAX_PLATFORMS"] = "cpu"
  from maxtext.checkpoint.inspect import chosen_keys
  from maxtext.checkpoint.location import locate
  from maxtext.models.build import abstract_model
  from maxtext.weights.outgoing import convert_out

  config = resolve(None, os.environ, chosen_keys(arguments.folder, parse_assignments(arguments.words))).config
  model, most = abstract_model(config), int(arguments.shard_gigabytes * 10**9)
  with closing(open_display("shard")) as display:
    path = convert_out(config, model, locate(arguments.folder), Path(arguments.out), display.progress, most)
  print(f"{path}: {model.size:,} parameters, for transformers")
  return 0
