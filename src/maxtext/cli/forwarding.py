"""The modules that the specification runs with `python -m`, and the command that each is."""

import sys
from typing import NoReturn

FORWARDED = {
  "maxtext.decode": ("decode",),
  "maxtext.inference.decode": ("decode",),
  "maxtext.sft_trainer": ("sft",),
  "maxtext.standalone_dataloader": ("data", "bench"),
  "maxtext.train": ("train",),
  "maxtext.train_compile": ("plan",),
  "maxtext.trainers.pre_train.train": ("train",),
}


def forward(module: str) -> NoReturn:
  """Runs the command with the arguments of this process."""
  from maxtext.cli.main import main

  sys.exit(main([*FORWARDED[module], *sys.argv[1:]]))
