"""`maxtext launch --to`: what starts a run on a cluster, from the words of its command."""

import argparse
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from maxtext.cli.config import METHODS, given_values, resolve_overrides
from maxtext.configs import ConfigError
from maxtext.configs.loader import Resolved, is_bundled, parse_assignments
from maxtext.configs.secrets import SECRET_KEYS

_CLUSTERS = ("jobset", "slurm", "skypilot", "tpu-vm")


def add_flags(group: Any) -> None:
  """Adds the flags that describe a cluster."""
  group.add_argument("--to", choices=_CLUSTERS, help="print a manifest or script instead, for compile_topology's chips")
  group.add_argument("--image", metavar="IMAGE", help="of the containers of a JobSet (default maxtext:latest)")
  group.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for each process; repeatable")


def refuse_flags(arguments: argparse.Namespace) -> None:
  """Raises `ConfigError` for flags that mean nothing on this machine."""
  if arguments.image or arguments.env:
    raise ConfigError("--image and --env describe a cluster: add --to, or leave them out.")


def text_for(arguments: argparse.Namespace, command: Sequence[str], processes: int | None) -> str:
  """The manifest or script; `processes` is None where the chips say how many."""
  if arguments.devices or math.isfinite(arguments.stall_timeout) or arguments.host is not None:
    raise ConfigError("--devices, --stall-timeout and --host are of one machine: leave them out with --to.")
  for pair in arguments.env:
    if not re.match(r"[A-Za-z_]\w*=", pair, re.ASCII):
      raise ConfigError(f"--env {pair}: write NAME=VALUE.")
  name, *words = command if command[0] in METHODS else ["train", *command]
  if flags := [word for word in words if word.startswith("-")]:
    raise ConfigError(f"{flags[0]}: flags of launch stand before the recipe, and the run has keys alone.")
  resolved = resolve_overrides([*words, *METHODS[name]])

  own = [word for word in words if not word.startswith("compile_topology")]
  if _is_file(words):
    own = _own_words(resolved) if arguments.to == "jobset" else [*own, "compile_topology="]  # the file may have it
  from_here = [key for key in SECRET_KEYS if resolved.origins.get(key) == "environment"]  # which stay here

  from maxtext.distributed.manifests import IMAGE, WRITERS, make_job

  job = make_job(
    [name, *own],
    resolved.config.model_copy(update=dict.fromkeys(from_here)),
    processes=processes,
    restarts=arguments.restarts,
    image=arguments.image or IMAGE,
    environment=dict(pair.split("=", 1) for pair in arguments.env),
  )
  return WRITERS[arguments.to](job)


def _is_file(words: Sequence[str]) -> bool:
  """Whether the run starts from a file or folder of this machine, which an image does not have."""
  return bool(words) and "=" not in words[0] and not is_bundled(words[0])


def _own_words(resolved: Resolved) -> list[str]:
  """All that the user said of a run, as keys."""
  values = given_values(resolved)
  return [_word(key, value) for key, value in values.items()]


def _word(key: str, value: Any) -> str:
  """A key and its value as they are read back: a text in quotes where it would be read as something else."""
  quoted = f"{key}={json.dumps(value, ensure_ascii=False)}"
  plain = f"{key}={value}" if isinstance(value, str) else quoted
  return plain if parse_assignments([plain])[key] == value else quoted
