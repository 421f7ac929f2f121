"""`maxtext launch`: one run of several processes, on this machine, or as text for a cluster (`cluster.py`)."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext.cli import cluster
from maxtext.cli.config import METHODS, resolve_overrides
from maxtext.configs import ConfigError, MaxTextConfig


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
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
  parser.add_argument(
    "--host",
    type=int,
    metavar="I",
    help="this is host I of --processes hosts of an elastic run, each with this command; needs --membership",
  )
  parser.add_argument("--membership", metavar="FOLDER", help="where the hosts of an elastic run meet; all see it")
  parser.add_argument("--address", default="127.0.0.1", help="of this host, as the others reach it (default 127.0.0.1)")
  parser.add_argument("--devices", type=int, metavar="D", help="CPU devices per process")
  cluster.add_flags(parser.add_argument_group("on a cluster"))
  parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="such as: -- train my.yml")
  parser.set_defaults(run=_launch)


def _launch(arguments: argparse.Namespace) -> int:
  from maxtext.distributed.supervisor import supervise

  command = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
  if not command:
    raise ConfigError("launch needs a command after --, such as: maxtext launch --processes 2 -- train my.yml")
  given, arguments.processes = arguments.processes, 1 if arguments.processes is None else arguments.processes
  if arguments.processes < 1 or arguments.restarts < 0:
    raise ConfigError(f"--processes {arguments.processes} --restarts {arguments.restarts}: at least 1 and 0.")
  if not arguments.stall_timeout > 0:
    raise ConfigError(
      f"--stall-timeout {arguments.stall_timeout:g}: more seconds than compiling or log_period steps take."
    )
  if arguments.to:
    print(cluster.text_for(arguments, command, given), end="")
    return 0
  cluster.refuse_flags(arguments)
  if arguments.devices:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
  if (config := _elastic_config(command)) is not None:
    return _launch_elastic(arguments, command, config)
  if arguments.host is not None:
    raise ConfigError(f"--host {arguments.host} is of an elastic run: write elastic_enabled=true.")
  return supervise(
    [sys.executable, "-m", "maxtext.cli", *command],
    arguments.processes,
    arguments.restarts,
    arguments.stall_timeout,
  )


def _elastic_config(command: Sequence[str]) -> MaxTextConfig | None:
  """The configuration of a command that trains elastically; the processes of others report their mistakes."""
  overrides = [word for word in command[1:] if not word.startswith("-")]
  try:
    config = resolve_overrides([*overrides, *METHODS[command[0]]]).config if command[0] in METHODS else None
  except ConfigError:
    if any(word.startswith("elastic_enabled=") for word in overrides):
      raise
    return None
  return config if config is not None and config.elastic_enabled else None


def _launch_elastic(arguments: argparse.Namespace, command: Sequence[str], config: MaxTextConfig) -> int:
  hosts, least = arguments.processes, config.elastic_min_slice_count
  if least > hosts:
    raise ConfigError(f"elastic_min_slice_count={least} is more than the --processes {hosts} of the run.")
  if not config.run_name:
    raise ConfigError("elastic_enabled=true needs run_name: processes that are started again resume the run of a name.")
  if arguments.restarts:
    raise ConfigError(f"--restarts {arguments.restarts}: an elastic run counts them by elastic_max_retries.")
  if arguments.host is None:
    if arguments.membership:
      raise ConfigError(f"--membership {arguments.membership} needs --host, the index of this host.")
    return _launch_local_hosts(arguments, hosts)
  if not 0 <= arguments.host < hosts or not arguments.membership:
    raise ConfigError(f"--host {arguments.host} is one of 0 to {hosts - 1}, and needs --membership FOLDER.")
  from maxtext.distributed.agent import Agent
  from maxtext.distributed.leader import ElasticPolicy
  from maxtext.distributed.membership import Membership

  least = hosts if least == -1 else max(least, 1)
  policy = ElasticPolicy(hosts, least, config.elastic_timeout_seconds, config.elastic_max_retries)
  standby, folder = [sys.executable, "-m", "maxtext.cli.standby"], Path(arguments.membership)
  try:
    plan = Membership(folder, arguments.host).latest_plan()
  except OSError as error:
    raise ConfigError(f"--membership {folder} cannot be used: {error.strerror}.") from None
  if plan.action == "stop":
    raise ConfigError(f"--membership {folder} is of a run that has ended: remove it, or name another folder.")
  agent = Agent(standby, command, arguments.host, policy, folder, arguments.address, arguments.stall_timeout)
  return agent.run()


def _launch_local_hosts(arguments: argparse.Namespace, hosts: int) -> int:
  from maxtext.distributed.local_hosts import run_hosts

  options = ["--processes", str(hosts), "--stall-timeout", str(arguments.stall_timeout)]
  launch = [sys.executable, "-m", "maxtext.cli", "launch", *options]
  return run_hosts(lambda host, folder: [*launch, "--host", str(host), "--membership", folder, *arguments.rest], hosts)
