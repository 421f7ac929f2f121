"""`maxtext quantize`: weights at rest in few bits."""

import argparse
import os
from contextlib import closing
from typing import Any

from maxtext.cli.config import add_strict
from maxtext.cli.display import open_display
from maxtext.configs.loader import parse_assignments


def add_command(commands: Any) -> None:
  """Adds `quantize` to the parser."""
  parser = commands.add_parser(
    "quantize",
    help="weights at rest in few bits, from a run or a Hugging Face folder",
    description="Write a checkpoint whose linear and expert weights are rounded to nearest, or by GPTQ: for maxtext "
    "serve, decode and LLM, and below LoRA adapters (QLoRA). Embedding, head, routers and norms stay as they are. "
    "Started again, it resumes.",
  )
  parser.add_argument("source", metavar="RUN|FOLDER", help="a run, a checkpoint, or a Hugging Face folder")
  parser.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
  parser.add_argument(
    "--format", required=True, choices=["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"], help="what is stored"
  )
  parser.add_argument("--block", type=int, metavar="N", help="inputs that share a scale; -1 is all of them")
  parser.add_argument(
    "--embedding",
    action="store_true",
    help="rounds the embedding and the head too: adds 'embedding' and 'head' to weight_format_targets",
  )
  parser.add_argument(
    "--gptq",
    metavar="TEXT",
    help="a text file for calibration: values are chosen by GPTQ instead of rounded to nearest",
  )
  parser.add_argument("overrides", nargs="*", metavar="key=value")
  add_strict(parser)
  parser.set_defaults(run=_quantize)


def _quantize(arguments: argparse.Namespace) -> int:
  os.environ["JAX_PLATFORMS"] = "cpu"  # whatever accelerator is here may be busy, and is not needed
  from maxtext.weights.quantize import quantize

  keys: dict[str, Any] = dict(parse_assignments(arguments.overrides))
  if arguments.block is not None:
    keys["weight_block_size"] = arguments.block
  with closing(open_display("part")) as display:
    quantize(
      arguments.source,
      arguments.out,
      weight_format=arguments.format,
      calibration=arguments.gptq,
      embedding=arguments.embedding,
      progress=display.progress,
      strict=arguments.strict,
      **keys,
    )
  return 0
