"""`maxtext convert`: weights from Hugging Face folders, and to them."""

import argparse
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from maxtext.cli.config import add_strict
from maxtext.cli.display import open_display
from maxtext.configs.loader import parse_assignments, values_and_origins
from maxtext.weights.resolve import resolve_keys


def add_commands(commands: Any) -> None:
  """Adds `convert from-hf` and `convert to-hf` to the parser."""
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
  for action, run in ((come, _from_hf), (go, _to_hf)):
    action.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    action.add_argument("overrides", nargs="*", metavar="key=value")
    add_strict(action)
    action.set_defaults(run=run)


def _from_hf(arguments: argparse.Namespace) -> int:
  os.environ["JAX_PLATFORMS"] = "cpu"  # whatever accelerator is here may be busy, and is not needed
  from maxtext.models.build import abstract_model
  from maxtext.weights.config_json import keys_of_folder
  from maxtext.weights.from_hugging_face import convert_from_hugging_face
  from maxtext.weights.hugging_face_folder import HuggingFaceFolder

  folder, given, keys = HuggingFaceFolder(arguments.folder), parse_assignments(arguments.overrides), dict[str, Any]()
  values = {"dataset_type": "synthetic"} | given
  with closing(open_display("part")) as display:
    if not values.keys() & {"model_name", "decoder_block"}:
      keys = keys_of_folder(folder)
      values = keys | values
      display.message(
        f"{folder.path} is {keys.get('model_name') or folder.config['model_type'] + ' of sizes of its own'}"
      )
    resolved = resolve_keys(values, arguments.strict, recorded=keys.keys() - given.keys())
    record = values_and_origins(resolved.config, resolved.origins)
    model, out = abstract_model(resolved.config), Path(arguments.out)
    path = convert_from_hugging_face(resolved.config, model, folder, out, record, display.progress)
  print(f"{path}: {model.size:,} parameters, for load_parameters_path")
  return 0


def _to_hf(arguments: argparse.Namespace) -> int:
  os.environ["JAX_PLATFORMS"] = "cpu"
  from maxtext.checkpoint.inspect import chosen_keys
  from maxtext.checkpoint.location import locate
  from maxtext.checkpoint.tokenizer import kind_of
  from maxtext.models.build import abstract_model
  from maxtext.weights.to_hugging_face import convert_to_hugging_face

  given = parse_assignments(arguments.overrides)
  keys = chosen_keys(arguments.folder, given)
  config = resolve_keys(keys, arguments.strict, recorded=keys.keys() - given.keys()).config
  model, most = abstract_model(config), int(arguments.shard_gigabytes * 10**9)
  with closing(open_display("shard")) as display:
    path = convert_to_hugging_face(config, model, locate(arguments.folder), Path(arguments.out), display.progress, most)
  print(f"{path}: {model.size:,} parameters, for transformers")
  if kind_of(path) is None:
    print("without a tokenizer, as none is kept with them: tokenizer_path=... puts one beside the weights")
  return 0
