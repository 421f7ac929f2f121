"""Compiles published runs for chips that are not here, and sets their planned times beside those that were measured.

  python -m benchmarks.published_runs --cache plans                       # current runs
  python -m benchmarks.published_runs --cache plans --quick               # in a fraction of the time
  python -m benchmarks.published_runs --cache plans v6e-8 llama3.1-8b     # only ids with all of these words
  python -m benchmarks.published_runs --cache plans gpt3 --depths 4 6     # from models of 4 and of 6 layers

Each run is compiled in a process of its own with a time limit, those with small attention kernels first. Its schedule
is kept in `benchmarks/compiled_runs`, with `--quick` in `benchmarks/scheduled_runs`, and what is there is not compiled
again: a campaign goes on from those before it, on any machine. `--cache` has the compiled programs. With `--depths`,
runs that are kept without a schedule, since they do not fit, are compiled again.
`python -m benchmarks.fit_planner` fits the planner to all of them.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from statistics import median

from benchmarks.planned_run import PlannedRun
from maxtext.planner.calibration import CALIBRATION
from maxtext.planner.published_runs import PublishedRun, published_runs

CHIPS = ("v5p", "v6e", "tpu7x")


def main() -> None:
  """Prints a line for every run, then a summary."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="*", help="of the ids; all must be in it")
  parser.add_argument("--cache", type=Path, required=True, help="folder of compiled programs")
  parser.add_argument("--timeout", type=int, default=1200, metavar="SECONDS", help="processor time of one run (1200)")
  parser.add_argument("--jobs", type=int, default=1, help="compilations side by side (1)")
  parser.add_argument(
    "--depths", nargs=2, default=[], metavar="LAYERS", help="compile models of so many layers instead"
  )
  parser.add_argument("--quick", action="store_true", help="compile only as far as the schedule: no cycles, no blocks")
  parser.add_argument("--again", action="store_true", help="also trace what is kept, as after a change of the model")
  arguments = parser.parse_args()
  runs = sorted((run for run in published_runs().values() if _is_chosen(run, arguments.words)), key=_kernel_size)

  def one(run: PublishedRun) -> PlannedRun | str:
    kept = None if arguments.again else PlannedRun.best(run)
    if kept and (kept.timed or not arguments.depths) and (arguments.quick or not kept.quick):
      return kept
    return plan(run, arguments.cache, arguments.timeout, arguments.depths, quick=arguments.quick)

  found: list[tuple[PublishedRun, PlannedRun | str]] = []
  print(f"{'run':52} {'published':>9} {'planned':>9} {'error':>7}  memory, GiB")
  with ThreadPoolExecutor(arguments.jobs) as pool:
    for run, planned in zip(runs, pool.map(one, runs), strict=True):
      found.append((run, planned))
      print(_line(run, planned), flush=True)
  print(summary({run.id: planned_seconds(p) for run, p in found if isinstance(p, PlannedRun) and p.timed}))
  unfit = [run.id for run, planned in found if isinstance(planned, PlannedRun) and not planned.fits]
  print(f"said not to fit: {', '.join(unfit) or 'none'}")


def plan(run: PublishedRun, cache: Path, timeout: int, depths: list[str], *, quick: bool = False) -> PlannedRun | str:
  """Compiles a run in a process of its own; why not, if it could not."""
  command = [sys.executable, "-m", "benchmarks.planned_run", run.id, "--cache", str(cache), "--timeout", str(timeout)]
  command += ["--depths", *depths] if depths else []
  command += ["--quick"] if quick else []
  return why_it_ended(command, timeout) or PlannedRun.best(run) or "not kept"


def why_it_ended(command: Sequence[str], timeout: int) -> str:
  """Runs a command that gives itself so many seconds of processor time; why it failed, empty if it did not."""
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode == -signal.SIGXCPU:
    return f"not compiled in {timeout} s of processor time"
  if done.returncode:
    return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
  return ""


def planned_seconds(planned: PlannedRun) -> float:
  """A step by the planner's own constants."""
  return planned.seconds(CALIBRATION[planned.run.chip])


def summary(planned: dict[str, float]) -> str:
  """Median error, how many are near, and whether two configurations of one model, chips and batch are in the right
  order."""
  runs = published_runs()
  errors = sorted(abs(seconds / runs[name].step_seconds - 1) for name, seconds in planned.items())
  if not errors:
    return "none planned"
  pairs = [
    (planned[one] - planned[other]) * (runs[one].step_seconds - runs[other].step_seconds) > 0
    for one, other in combinations(planned, 2)
    if _kind(runs[one]) == _kind(runs[other]) and runs[one].planned_keys != runs[other].planned_keys
  ]
  return (
    f"{len(errors)} runs planned: median error {median(errors):.1%}, "
    f"nine of ten within {errors[min(len(errors) * 9 // 10, len(errors) - 1)]:.1%}; "
    f"{sum(pairs)} of {len(pairs)} pairs of one model, chips and batch in the right order"
  )


def _kind(run: PublishedRun) -> tuple[object, ...]:
  return run.keys.get("model_name"), run.topology, run.slices, run.tokens


def _kernel_size(run: PublishedRun) -> int:
  """By which runs are ordered: the compiler takes longest over the code of attention kernels with large blocks."""
  return int(run.keys.get("sa_block_q", 512) * run.keys.get("sa_block_kv", 512))


def _is_chosen(run: PublishedRun, words: list[str]) -> bool:
  if words:
    return all(word in run.id for word in words)
  return not (run.superseded or run.inconsistent) and run.chip in CHIPS


def _line(run: PublishedRun, planned: PlannedRun | str) -> str:
  head = f"{run.id:52} {run.step_seconds:7.2f} s"
  if isinstance(planned, str):
    return f"{head} {planned}"
  memory = f"{planned.peak_bytes / 2**30:.1f}{'' if planned.fits else ', does not fit'}"
  if not planned.timed:
    return f"{head} {memory}"
  seconds = planned_seconds(planned)
  return f"{head} {seconds:7.2f} s {seconds / run.step_seconds - 1:+7.1%}  {memory}"


if __name__ == "__main__":
  main()
