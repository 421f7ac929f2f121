"""`maxtext launch`: one run of several processes on this machine."""

import argparse
import math
import sys
from typing import Any

from maxtext.configs import ConfigError


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "launch",
    help="run a command as several processes on this machine",
    description="Start a run of several processes on this machine; logs are tagged with the process.",
  )
  parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes to start (default 1)")
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
  parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="such as: -- train my.yml")
  parser.set_defaults(run=_launch)


def _launch(arguments: argparse.Namespace) -> int:
  from maxtext.distributed.supervisor import supervise

  command = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
  if not command:
    raise ConfigError("launch needs a command after --, such as: maxtext launch --processes 2 -- train my.yml")
  if arguments.processes < 1 or arguments.restarts < 0:
    raise ConfigError(f"--processes {arguments.processes} --restarts {arguments.restarts}: at least 1 and 0.")
  if not arguments.stall_timeout > 0:
    raise ConfigError(
      f"--stall-timeout {arguments.stall_timeout:g}: more seconds than compiling or log_period steps take."
    )
  flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={arguments.devices}"} if arguments.devices else {}
  return supervise(
    [sys.executable, "-m", "maxtext.cli", *command],
    arguments.processes,
    arguments.restarts,
    arguments.stall_timeout,
    flags,
  )
