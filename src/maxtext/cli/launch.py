"""`maxtext launch`: one run of several processes, on this machine, or as text for a cluster."""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext.cli import config
from maxtext.configs import ConfigError
from maxtext.configs.loader import Resolved, is_bundled

_CLUSTERS = ("jobset", "slurm", "skypilot", "tpu-vm")


def add_command(commands: Any, methods: Mapping[str, Sequence[str]]) -> None:
  """Adds the command to the parser; `methods` are the commands that train, with the keys that each sets."""
  parser = commands.add_parser(
    "launch",
    help="run a command as several processes here, or write what starts it on a cluster",
    description="Start a run of several processes on this machine, with logs tagged by the process; or, with --to, "
    "print what starts it on a cluster, from the keys that `maxtext plan` takes.",
  )
  parser.add_argument("--processes", type=int, metavar="N", help="processes to start (default 1)")
  parser.add_argument(
    "--restarts",
    type=int,
    default=0,
    metavar="K",
    help="restarts of all processes when one fails; counted anew after a step is saved",
  )
  parser.add_argument(
    "--stall-timeout",
    type=float,
    default=math.inf,
    metavar="SECONDS",
    help="restart all, with stack traces, when none has written anything for so long: more than compiling, an "
    "evaluation or log_period steps take (default never)",
  )
  parser.add_argument("--devices", type=int, metavar="D", help="CPU devices per process")
  cluster = parser.add_argument_group("on a cluster")
  cluster.add_argument(
    "--to", choices=_CLUSTERS, help="print a manifest or a script instead, for the chips of compile_topology"
  )
  cluster.add_argument("--image", metavar="IMAGE", help="of the containers of a JobSet (default maxtext:latest)")
  cluster.add_argument(
    "--env", action="append", default=[], metavar="NAME=VALUE", help="for each process; may be repeated"
  )
  parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="such as: -- train my.yml")
  parser.set_defaults(run=_launch, methods=methods)


def _launch(arguments: argparse.Namespace) -> int:
  from maxtext.distributed.supervisor import supervise

  command = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
  if not command:
    raise ConfigError("launch needs a command after --, such as: maxtext launch --processes 2 -- train my.yml")
  processes = 1 if arguments.processes is None else arguments.processes
  if processes < 1 or arguments.restarts < 0:
    raise ConfigError(f"--processes {processes} --restarts {arguments.restarts}: at least 1 and 0.")
  if not arguments.stall_timeout > 0:
    raise ConfigError(
      f"--stall-timeout {arguments.stall_timeout:g}: more seconds than compiling or log_period steps take."
    )
  if arguments.to:
    print(_text_for(arguments, command), end="")
    return 0
  if arguments.image or arguments.env:
    raise ConfigError("--image and --env describe a cluster: add --to, or leave them out.")
  flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={arguments.devices}"} if arguments.devices else {}
  return supervise(
    [sys.executable, "-m", "maxtext.cli", *command],
    processes,
    arguments.restarts,
    arguments.stall_timeout,
    flags,
  )


def _text_for(arguments: argparse.Namespace, command: Sequence[str]) -> str:
  if arguments.devices or math.isfinite(arguments.stall_timeout):
    raise ConfigError("--devices and --stall-timeout are of this machine: leave them out with --to.")
  for pair in arguments.env:
    if not re.match(r"[A-Za-z_]\w*=", pair):
      raise ConfigError(f"--env {pair}: write NAME=VALUE.")
  name, *words = command if command[0] in arguments.methods else ["train", *command]
  if flags := [word for word in words if word.startswith("-")]:
    raise ConfigError(f"{flags[0]}: flags of launch stand before the recipe, and the run has keys alone.")
  resolved = config.resolve_overrides([*words, *arguments.methods[name]])

  from maxtext.distributed.manifests import IMAGE, WRITERS, make_job

  job = make_job(
    [name, *(_own_words(resolved) if arguments.to == "jobset" and _is_file(words) else words)],
    resolved.config,
    processes=arguments.processes,
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
  values = config.given_values(resolved)
  return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
