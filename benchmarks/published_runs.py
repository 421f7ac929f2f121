"""Plans published runs and sets them beside what was measured: the planner's own error.

  python -m benchmarks.published_runs --cache plans --jobs 1              # current runs of named models
  python -m benchmarks.published_runs --cache plans v6e-8 llama3.1-8b     # only ids with all of these words

Each run is planned by `maxtext plan --published RUN`, in a process of its own with a time limit, and what was compiled
is kept in `--cache`: the table is then made again in seconds a run.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from maxtext.planner.published_runs import PublishedRun, published_runs

CHIPS = ("v5p", "v6e", "tpu7x")


def main() -> None:
  """Prints a line for every run, then a summary."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="*", help="of the ids; all must be in it")
  parser.add_argument("--cache", type=Path, required=True, help="folder of what was compiled")
  parser.add_argument("--timeout", type=float, default=1200.0, metavar="SECONDS", help="of one run (1200)")
  parser.add_argument("--jobs", type=int, default=1, help="compilations side by side (1)")
  parser.add_argument("--json", type=Path, help="also write the plans there")
  arguments = parser.parse_args()
  runs = [run for run in published_runs().values() if _is_chosen(run, arguments.words)]
  plans: dict[str, dict[str, Any]] = {}
  print(f"{'run':52} {'published':>9} {'planned':>9} {'error':>7}  memory, GiB")
  with ThreadPoolExecutor(arguments.jobs) as pool:
    one = partial(plan, cache=arguments.cache, timeout=arguments.timeout)
    for run, found in zip(runs, pool.map(one, runs), strict=True):
      plans[run.id] = found
      print(_line(run, found), flush=True)
  print(summary(runs, plans))
  if arguments.json:
    arguments.json.write_text(json.dumps(plans, indent=1))


def plan(run: PublishedRun, cache: Path, timeout: float) -> dict[str, Any]:
  """The plan of a run as JSON values, or {"problem": why there is none}."""
  command = [sys.executable, "-m", "maxtext", "plan", "--published", run.id, "--json", "--cache", str(cache)]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
  except subprocess.TimeoutExpired:
    return {"problem": f"not compiled in {timeout:.0f} s"}
  if done.returncode:
    return {"problem": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"}
  return json.loads(done.stdout)


def summary(runs: list[PublishedRun], plans: dict[str, dict[str, Any]]) -> str:
  """Median error, how many are near, whether pairs of one model and chip are in the right order, what does not fit."""
  found = [(run, plans[run.id].get("estimated_step_seconds")) for run in runs]
  planned = [(run, seconds) for run, seconds in found if seconds]
  if not planned:
    return "none planned"
  errors = sorted(abs(seconds / run.step_seconds - 1) for run, seconds in planned)
  pairs = [
    (ours - theirs) * (run.step_seconds - other.step_seconds) > 0
    for (run, ours), (other, theirs) in combinations(planned, 2)
    if _kind(run) == _kind(other)
  ]
  unfit = [run.id for run in runs if plans[run.id].get("fits") is False]
  return "\n".join(
    [
      f"{len(planned)} of {len(runs)} planned: median error {median(errors):.1%}, "
      f"nine of ten within {errors[min(len(errors) * 9 // 10, len(errors) - 1)]:.1%}",
      f"{sum(pairs)} of {len(pairs)} pairs of one model, chip and batch in the right order",
      f"said not to fit: {', '.join(unfit) or 'none'}",
    ]
  )


def _kind(run: PublishedRun) -> tuple[Any, ...]:
  return run.keys.get("model_name"), run.topology, run.slices, run.tokens


def _is_chosen(run: PublishedRun, words: list[str]) -> bool:
  if words:
    return all(word in run.id for word in words)
  return not (run.superseded or run.inconsistent) and run.topology.startswith(CHIPS) and "model_name" in run.keys


def _line(run: PublishedRun, found: dict[str, Any]) -> str:
  head = f"{run.id:52} {run.step_seconds:7.2f} s"
  if "problem" in found:
    return f"{head} {found['problem']}"
  memory = f"{found['peak_hbm_bytes_per_chip'] / 2**30:.1f} of {found['hbm_bytes_per_chip'] / 2**30:.1f}"
  if not found["estimated_step_seconds"]:
    return f"{head} does not fit  {memory}"
  seconds = found["estimated_step_seconds"]
  return f"{head} {seconds:7.2f} s {seconds / run.step_seconds - 1:+7.1%}  {memory}"


if __name__ == "__main__":
  main()
