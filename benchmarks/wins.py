"""Configurations of our own beside those of published runs: the same chips and precision, no more tokens a step.

  python -m benchmarks.wins                       # what is kept, as tables
  python -m benchmarks.wins --cache plans         # first compiles what is not kept yet
  python -m benchmarks.wins --cache plans v6e-8   # the same of runs whose ids have all of these words
  python -m benchmarks.wins --write               # also writes the tables of docs/planner-wins.md, and recipes

`wins.yml` lists what was tried: changes of a published run's keys, each compiled as far as its schedule, in a process
of its own. Schedules are kept in `benchmarks/winning_runs`, and times come from the planner's constants, as those of
the published configurations do.
"""

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fit_planner import with_table
from benchmarks.planned_run import SCHEDULED, PlannedRun, compiled_parts, limit_processor_time
from benchmarks.published_runs import planned_seconds, why_it_ended
from maxtext.configs.loader import resolve
from maxtext.mesh.topology import Topology
from maxtext.planner.calibration import predicted_runs
from maxtext.planner.published_runs import PublishedRun, published_run
from maxtext.planner.schedule import Schedule

FILE = Path(__file__).with_name("wins.yml")
KEPT = Path(__file__).parent / "winning_runs"
PAGE = Path("docs/planner-wins.md")
RECIPES = Path("src/maxtext/configs/recipes")
SPARE = 0.05  # of a device's memory, that a configuration must leave free
AIM = 0.05  # by which a dense run should be ahead; with experts, level is enough
# Keys of published runs that have no part in the step: a recipe leaves them to whoever runs it.
NOT_OF_THE_STEP = frozenset(
  {
    "async_checkpointing", "dataset_type", "enable_checkpointing", "gcs_metrics", "profile_periodically_period",
    "profiler", "profiler_steps", "reuse_example_batch", "skip_first_n_steps_for_profiler",
    "skip_jax_distributed_system", "steps", "tokenizer_path", "tokenizer_type",
  }
)  # fmt: skip


@dataclass(frozen=True)
class Attempt:
  """A configuration of our own.

  Attributes:
    run: the published run with the changes, and a name of its own.
    keys: what differs.
    why: it should be faster.
  """

  run: PublishedRun
  keys: Mapping[str, Any]
  why: str

  @cached_property
  def planned(self) -> PlannedRun | None:
    """As it was compiled; None if it was not."""
    return PlannedRun.read(self.run, KEPT, quick=True)


@dataclass(frozen=True)
class Contest:
  """A published run, and what was tried against it.

  Attributes:
    recipe: file of the configuration, where one wins.
    limit: what keeps it from being faster, where none wins or the aim is missed.
  """

  run: PublishedRun
  recipe: str
  attempts: Sequence[Attempt]
  limit: str = ""

  @cached_property
  def theirs(self) -> PlannedRun:
    """The published configuration through the project's step."""
    planned = PlannedRun.read(self.run, SCHEDULED, quick=True)
    assert planned, f"{self.run.id} has a schedule"
    return planned

  @cached_property
  def best(self) -> Attempt | None:
    """The fastest that leaves memory free and is faster than the published configuration."""
    fitting = [attempt for attempt in self.attempts if attempt.planned and attempt.planned.timed and _spares(attempt)]
    best = min(fitting, key=self.seconds, default=None)
    return best if best and self.gain(best) > 0 else None

  def seconds(self, attempt: Attempt) -> float:
    """Of as many tokens as the published step has."""
    assert attempt.planned
    return planned_seconds(attempt.planned) * self.run.tokens / attempt.run.tokens

  def gain(self, attempt: Attempt) -> float:
    """By how much more tokens a second it is planned to take than the published configuration."""
    return planned_seconds(self.theirs) / self.seconds(attempt) - 1

  def gain_on_publication(self, attempt: Attempt) -> float:
    """The same against the published time, so with all of the planner's error in it."""
    return self.run.step_seconds / self.seconds(attempt) - 1

  @cached_property
  def winner(self) -> Attempt | None:
    """The best, if it reaches the aim against the published configuration and the published time."""
    if not self.best:
      return None
    least = 0.0 if resolve(values=self.run.planned_keys).config.num_experts > 1 else AIM
    reached = min(self.gain(self.best), self.gain_on_publication(self.best))
    return self.best if reached >= least else None


def main() -> None:
  """Compiles, prints, and writes."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="*", help="of the ids; all must be in it")
  parser.add_argument("--cache", type=Path, metavar="FOLDER", help="of compiled programs: compile what is not kept")
  parser.add_argument("--timeout", type=int, default=1200, metavar="SECONDS", help="processor time of one (1200)")
  parser.add_argument("--write", action="store_true", help=f"write the tables of {PAGE} and the recipes that win")
  parser.add_argument("--compile", help=argparse.SUPPRESS)  # in the process of one attempt
  arguments = parser.parse_args()
  every = contests()
  if arguments.compile:
    limit_processor_time(arguments.timeout)
    (attempt,) = (a for contest in every for a in contest.attempts if a.run.id == arguments.compile)
    parts = compiled_parts(attempt.run.planned_keys, arguments.cache, quick=True)
    PlannedRun(attempt.run, parts).write(KEPT)
    return
  if arguments.cache:
    _compile_missing([c for c in every if all(w in c.run.id for w in arguments.words)], arguments)
    every = contests()  # what was compiled meanwhile is read anew
  print(table(every), tried_table(every), summary(every), sep="\n\n")
  if arguments.write:
    PAGE.write_text(with_table(with_table(PAGE.read_text(), table(every)), tried_table(every)))
    for contest in every:
      if contest.recipe and contest.winner:
        (RECIPES / f"{contest.recipe}.yml").write_text(recipe_text(contest, contest.winner))


def contests() -> list[Contest]:
  """Those of `wins.yml`."""
  return [_contest(**values) for values in yaml.safe_load(FILE.read_text())]


def table(every: Sequence[Contest]) -> str:
  """A row for every published run, for the documentation."""
  columns = (
    "published run", "published", "its keys, planned", "planner's error", "ours, planned", "ahead of its keys",
    "ahead of the publication", "memory, GiB", "on the host, GB a chip", "what differs, or what limits it",
  )  # fmt: skip
  return "\n".join([*_head(columns), *map(_row, every)])


def tried_table(every: Sequence[Contest]) -> str:
  """A row for everything that was tried, for the documentation."""
  columns = ("tried for", "change", "planned, for as many tokens", "ahead of its keys", "memory, GiB")
  return "\n".join([*_head(columns), *(_tried_row(c, attempt) for c in every for attempt in c.attempts)])


def summary(every: Sequence[Contest]) -> str:
  """How many are won."""
  return f"{sum(bool(contest.winner) for contest in every)} of {len(every)} reach the aim"


def recipe_text(contest: Contest, attempt: Attempt) -> str:
  """The file of a recipe."""
  run, planned = attempt.run, attempt.planned
  assert planned
  about = (
    f"Planned {contest.gain(attempt):.1%} faster than the keys of the published run {contest.run.id}, with "
    f"{planned.peak_bytes / 2**30:.1f} of {_memory(run) / 2**30:.1f} GiB a device: docs/planner-wins.md."
  )
  if flags := run.planned_keys["compile_xla_flags"]:
    about += f" The compiler got these flags, which LIBTPU_INIT_ARGS takes: {flags}"
  keys = {key: value for key, value in run.keys.items() if key not in NOT_OF_THE_STEP} | {"override_model_config": True}
  return (
    textwrap.fill(about, 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    + "\n"
    + (yaml.safe_dump(keys, sort_keys=True, width=118))
  )


def _contest(run: str, tried: Sequence[Mapping[str, Any]], recipe: str = "", limit: str = "") -> Contest:
  published = published_run(run)
  return Contest(published, recipe, [_attempt(published, **values) for values in tried], limit)


def _attempt(
  run: PublishedRun, name: str, why: str, keys: Mapping[str, Any] | None = None, flags: Mapping[str, Any] | None = None
) -> Attempt:
  """`flags` are in the place of the run's; without any, the compiler gets those of the project's table."""
  keys, theirs = keys or {}, run.keys
  if "custom" not in keys.get("remat_policy", "custom"):  # places of tensors then say nothing
    theirs = {key: value for key, value in theirs.items() if value not in ("offload", "device")}
  batch = "per_device_batch_size"
  tokens = run.tokens * keys.get(batch, run.keys[batch]) / run.keys[batch]
  assert tokens <= run.tokens, f"{run.id} {name}: more tokens a step than the published run has"
  changed = replace(
    run,
    id=f"{run.id}-{name}",
    keys={**theirs, **keys},
    flags=run.flags if flags is None else flags,
    tokens=int(tokens),
  )
  return Attempt(changed, {**keys, **({} if flags is None else {"flags": flags or "our own"})}, why)


def _compile_missing(chosen: Sequence[Contest], arguments: argparse.Namespace) -> None:
  for attempt in (attempt for contest in chosen for attempt in contest.attempts if attempt.planned is None):
    command = [sys.executable, "-m", "benchmarks.wins", "--compile", attempt.run.id]
    command += ["--cache", str(arguments.cache), "--timeout", str(arguments.timeout)]
    print(f"{attempt.run.id}: {why_it_ended(command, arguments.timeout) or 'compiled'}", flush=True)


def _spares(attempt: Attempt) -> bool:
  assert attempt.planned
  return attempt.planned.peak_bytes <= (1 - SPARE) * _memory(attempt.run)


def _memory(run: PublishedRun) -> int:
  chip = Topology.named(run.topology).chip
  return chip.hbm_bytes // chip.devices


def _host_bytes(planned: PlannedRun) -> float:
  """What waits in the host's memory, of one chip: half of what goes there and comes back."""
  return sum(part.weight * _host_seconds(part.schedule) for part in planned.parts if part.schedule) / 2


def _host_seconds(schedule: Schedule) -> float:
  """Of transfers to the host and back, at a byte per second."""
  each = (
    _host_seconds(part) if isinstance(part, Schedule) else part.seconds * (part.resource == "host")
    for part in schedule.parts
  )
  return schedule.times * sum(each)


def _head(columns: Sequence[str]) -> list[str]:
  return [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]


def _row(contest: Contest) -> str:
  run, best, theirs = contest.run, contest.best, contest.theirs
  error = next(one.error for one in predicted_runs() if one.id == run.id)
  cells = [f"`{run.id}`", f"{run.step_seconds:.2f} s", f"{planned_seconds(theirs):.2f} s", f"{error:+.1%}"]
  memory, host = f"{theirs.peak_bytes / 2**30:.1f}", f"{_host_bytes(theirs) / 1e9:.0f}"
  if not best:
    verdict = "none faster" if contest.attempts else "not tried"
    return f"| {' | '.join([*cells, verdict, '', '', memory, host, contest.limit])} |"
  assert best.planned
  cells += [f"{contest.seconds(best):.2f} s", f"{contest.gain(best):+.1%}", f"{contest.gain_on_publication(best):+.1%}"]
  cells += [
    f"{memory}, ours {best.planned.peak_bytes / 2**30:.1f}",
    f"{host}, ours {_host_bytes(best.planned) / 1e9:.0f}",
  ]
  return f"| {' | '.join([*cells, '. '.join(filter(None, (best.why, contest.limit)))])} |"


def _tried_row(contest: Contest, attempt: Attempt) -> str:
  change = ", ".join(f"`{key}={value}`" for key, value in attempt.keys.items())
  head = f"| `{contest.run.id}` | {change} |"
  if not (planned := attempt.planned):
    return f"{head} not compiled | | |"
  memory = f"{planned.peak_bytes / 2**30:.1f}" + ("" if planned.fits else ", does not fit")
  times = [f"{contest.seconds(attempt):.2f} s", f"{contest.gain(attempt):+.1%}"] if planned.timed else ["", ""]
  return f"{head} {' | '.join([*times, memory])} |"


if __name__ == "__main__":
  main()
