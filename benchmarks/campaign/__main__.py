"""Counts what faults lead to, a portion at a time: it continues from what was counted before.

  python -m benchmarks.campaign kills --seconds 300
  python -m benchmarks.campaign kills power-loss --seconds 10 --targets prepare --results /tmp/counts
  python -m benchmarks.campaign --table            what was counted so far

What is found wrong is printed, counted, and ends the portion unless --go-on is given.
"""

from benchmarks.campaign.child import preload

if __name__ == "__main__":
  preload()

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from types import ModuleType

from benchmarks.campaign import errors, hosts, kills, names, partitions, power_loss
from benchmarks.campaign.child import WrongError, cache_compiled, imported_by
from benchmarks.campaign.results import FOLDER, WRONG, Results
from benchmarks.campaign.targets import make_inputs

FAULTS: dict[str, ModuleType] = {
  "kills": kills, "power-loss": power_loss, "errors": errors, "names": names, "hosts": hosts,
  "partitions": partitions,
}  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("faults", choices=[*FAULTS, []], nargs="*")
  parser.add_argument("--seconds", type=float, default=300, help="of a portion, for each fault")
  parser.add_argument("--targets", nargs="+", help="some of them")
  parser.add_argument("--go-on", action="store_true", help="after what is wrong")
  parser.add_argument("--results", type=Path, default=FOLDER, help="where counts are kept")
  parser.add_argument("--table", action="store_true", help="print what was counted")
  arguments = parser.parse_args()
  if arguments.table:
    for fault in FAULTS:
      for line in table(fault, Results(fault, arguments.results)):
        print(line)
    return
  cache_compiled()
  folder = Path(tempfile.mkdtemp(prefix="campaign-", dir="/dev/shm"))
  try:
    for fault in arguments.faults:
      results = Results(fault, arguments.results)
      (folder / fault).mkdir()
      right = run_portion(FAULTS[fault], results, folder / fault, arguments)
      for name, count in results.targets.items():
        print(f"{fault}, {name}: {count.points} points, {count.outcomes}")
      if not right and not arguments.go_on:
        raise SystemExit(1)
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def table(fault: str, results: Results) -> Iterator[str]:
  """A line of Markdown for each target."""
  for name, count in results.targets.items():
    outcomes = ", ".join(f"{outcome} {number}" for outcome, number in count.outcomes.items())
    seconds = f"{statistics.median(count.seconds):.1f} s, at most {max(count.seconds):.1f} s" if count.seconds else ""
    yield f"| {fault} | {name} | {count.points} | {outcomes} | {seconds} |"


def run_portion(fault: ModuleType, results: Results, folder: Path, arguments: argparse.Namespace) -> bool:
  """A portion of one fault, its targets in turn, each at least once. Returns whether all was right."""
  made, right = {}, True
  targets = {name: target for name, target in fault.TARGETS.items() if name in (arguments.targets or fault.TARGETS)}
  if fault.INPUTS and targets:
    imported_by(lambda: make_inputs(folder / "inputs"))
  deadline = time.monotonic() + arguments.seconds
  for name in cycle(targets):
    if (len(made) == len(targets) and time.monotonic() > deadline) or (not right and not arguments.go_on):
      break
    if name not in made:
      (folder / name).mkdir()
      made[name] = fault.Campaign(targets[name], folder / name)
    count = results.count(name)
    try:
      made[name].portion(count)
    except WrongError as error:
      right = False
      count.add(WRONG)
      print(f"{name}: {error}", flush=True)
    results.save()
  return right


if __name__ == "__main__":
  main()
