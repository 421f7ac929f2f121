"""`maxtext plan`: what a run would need and how fast it would be, before any hardware is rented."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from maxtext.cli import config
from maxtext.cli.interrupt import prompt_interrupt
from maxtext.cli.platform import FATAL
from maxtext.configs import ConfigError
from maxtext.configs.loader import Resolved, parse_assignments
from maxtext.configs.secrets import redact_arguments
from maxtext.status_line import status_line
from maxtext.weights.resolve import resolve_keys

if TYPE_CHECKING:
  from maxtext.planner.plan import Plan
  from maxtext.planner.published_runs import PublishedRun
  from maxtext.planner.run_estimate import RunEstimate


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "plan",
    help="compile the step for hardware that is not here: does it fit, how fast is it",
    description="Compile the real train step for compile_topology on this machine and read what the compiler says.",
  )
  config.add_overrides(parser)
  parser.add_argument("--json", action="store_true", help="as a JSON object")
  parser.add_argument("--quick", action="store_true", help="compile only as far as the schedule: sooner, and rougher")
  parser.add_argument("--html", type=Path, metavar="FILE.html", help="also draw it")
  parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep what the compiler made, and find it again")
  parser.add_argument(
    "--published",
    nargs="?",
    const="",
    metavar="RUN",
    help="a published run, beside what was measured; without RUN, list",
  )
  searched = parser.add_argument_group("searching")
  searched.add_argument(
    "--search",
    action="store_true",
    help="for the fastest mesh, remat_policy, batch and kernel blocks that fit; for RL, division of devices",
  )
  searched.add_argument("--compiles", type=int, default=12, metavar="N", help="at most (12)")
  searched.add_argument("--jobs", type=int, default=2, metavar="N", help="compilations side by side (2)")
  searched.add_argument("--recipe", type=Path, metavar="FILE.yml", help="where the winner is written")
  whole = parser.add_argument_group("a whole run")
  whole.add_argument("--tokens", type=float, metavar="N", help="what it would take to train on so many tokens")
  whole.add_argument("--price", type=float, metavar="P", help="of a chip and hour")
  whole.add_argument("--storage", type=float, metavar="BYTES", help="per second, of all hosts together (50e9)")
  whole.add_argument("--restart", type=float, metavar="SECONDS", help="from a failure to the next step (300)")
  whole.add_argument("--failures", type=float, metavar="RATE", help="per chip and hour (1.97e-5)")
  parser.set_defaults(run=_plan, library_log_level=FATAL)


def _plan(arguments: argparse.Namespace) -> int:
  with prompt_interrupt():
    return _planned(arguments)


def _planned(arguments: argparse.Namespace) -> int:
  os.environ["JAX_PLATFORMS"] = "cpu"  # the compiler is asked by name; no accelerator of this machine is touched
  if arguments.published == "":
    return _list_published(arguments)
  published = _published(arguments)
  if published:
    given, own = parse_assignments(arguments.overrides), published.planned_keys
    resolved = resolve_keys(own | given, arguments.strict, recorded=own.keys() - given.keys())
  else:
    given, resolved = {}, _on_its_chips(config.resolve_overrides(arguments.overrides, arguments.strict))
  if arguments.search:
    return _search(arguments, resolved)
  with status_line() as status:
    status.phase("loading JAX")
    from maxtext.planner.html import as_html
    from maxtext.planner.plan import plan
    from maxtext.planner.text import as_text, compared_with

    name = published.id if published else resolved.name
    found = plan(resolved.config, config_name=name, cache=arguments.cache, quick=arguments.quick)
  whole = _run_estimate(arguments, found)
  if arguments.json:
    more = {"run": whole.as_json() if whole else None, "published": published.as_json() if published else None}
    print(json.dumps(found.as_json() | {name: value for name, value in more.items() if value}, indent=1))
  else:
    print(
      as_text(found),
      *([whole.as_text()] if whole else []),
      *(compared_with(found, published, list(given)) if published else []),
      sep="\n",
    )
  if arguments.html:
    arguments.html.write_text(as_html(found), encoding="utf-8")
    if not arguments.json:
      print(f"drawn in {arguments.html}")
  return 0


def _on_its_chips(resolved: Resolved) -> Resolved:
  """For the chips in the name of the recipe, where `compile_topology` says none."""
  from maxtext.mesh.topology import Topology

  topology = resolved.config.compile_topology or Topology.named_in(resolved.name)
  return replace(resolved, config=resolved.config.model_copy(update={"compile_topology": topology}))


def _list_published(arguments: argparse.Namespace) -> int:
  from maxtext.planner.published_runs import as_table, published_runs

  if arguments.overrides or arguments.search:
    raise ConfigError("--published without RUN lists the runs: it takes no keys and no --search.")
  print(json.dumps([run.as_json() for run in published_runs().values()], indent=1) if arguments.json else as_table())
  return 0


def _published(arguments: argparse.Namespace) -> "PublishedRun | None":
  if arguments.published is None:
    return None
  from maxtext.planner.published_runs import published_run

  if arguments.search:
    raise ConfigError("--search does not start from --published: give the run's keys.")
  return published_run(arguments.published)


def _search(arguments: argparse.Namespace, resolved: Resolved) -> int:
  from maxtext.mesh.topology import Topology
  from maxtext.planner.search import search

  topology = resolved.config.compile_topology
  if topology and not Topology.named(topology).compiles:
    raise ConfigError(f"--search compiles, and there is no compiler for compile_topology={topology} here.")
  if resolved.config.use_grpo:
    return _search_split(arguments, resolved)
  best = search(
    resolved.config,
    arguments.overrides,
    arguments.compiles,
    arguments.jobs,
    lambda line: print(line, file=sys.stderr, flush=True),
  )
  _tell_best(arguments, resolved, best.candidate.keys, best.plan)
  return 0


def _search_split(arguments: argparse.Namespace, resolved: Resolved) -> int:
  from maxtext.planner.device_split import search_device_split

  keys, best = search_device_split(
    resolved.config, resolved.name, arguments.cache, lambda line: print(line, file=sys.stderr, flush=True)
  )
  _tell_best(arguments, resolved, keys, best.as_json())
  return 0


def _tell_best(
  arguments: argparse.Namespace, resolved: Resolved, keys: Mapping[str, Any], plan: Mapping[str, Any]
) -> None:
  """Prints what a search has found, and writes it as a recipe."""
  if arguments.recipe:
    head = f"# Found by: maxtext plan {' '.join(redact_arguments(arguments.overrides))} --search\n"
    values = config.given_values(resolved) | dict(keys)
    arguments.recipe.write_text(head + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
  if arguments.json:
    print(json.dumps({**plan, "keys": dict(keys)}, indent=1))
  else:
    print("best:", " ".join(f"{key}={value}" for key, value in keys.items()))


_RUN_FLAGS = {
  "price": "price",
  "storage": "storage_bandwidth",
  "restart": "restart_seconds",
  "failures": "interruptions_per_chip_hour",
}


def _run_estimate(arguments: argparse.Namespace, plan: "Plan") -> "RunEstimate | None":
  """The whole run, if its tokens are given and its step compiled."""
  from maxtext.planner.run_estimate import RunEstimate

  for flag in ("tokens", *_RUN_FLAGS):
    value = getattr(arguments, flag)
    if value is not None and not 0 < value < float("inf"):
      raise ConfigError(f"--{flag} {value:g} must be a number above 0.")
  if arguments.tokens is None or plan.estimate is None:
    return None
  given = {
    field: getattr(arguments, flag) for flag, field in _RUN_FLAGS.items() if getattr(arguments, flag) is not None
  }
  return RunEstimate(arguments.tokens, plan.seconds_per_step, plan.tokens, plan.chips, plan.state_bytes, **given)
