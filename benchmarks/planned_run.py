"""Compiles one published run and keeps what fitting needs; `benchmarks.published_runs` starts a process for each.

  python -m benchmarks.planned_run RUN --cache plans
  python -m benchmarks.planned_run RUN --cache plans --depths 4 6   # two models of fewer layers

Layers that are alike run in one loop, so time and memory of a step are a + b x layers, and two depths give a and b.
That serves runs that the compiler does not fit into memory here, since it has no schedule of what does not fit. Loops
of fewer than four iterations may be unrolled, and then they are another program.
"""

import argparse
import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.short_schedule import from_json, short, to_json
from maxtext.configs import ConfigError
from maxtext.configs.loader import resolve
from maxtext.mesh.topology import Topology
from maxtext.planner.compile import program_for
from maxtext.planner.estimate import Calibration, estimate
from maxtext.planner.kept_steps import find_step
from maxtext.planner.plan import step_schedule
from maxtext.planner.published_runs import PublishedRun, published_run
from maxtext.planner.schedule import Schedule
from maxtext.storage.atomic import atomic_file

SCHEDULED = Path(__file__).parent / "scheduled_runs"  # the same of runs that were compiled as far as their schedule

LAYERS = "base_num_decoder_layers"
FEWEST_LAYERS = 4
KEPT = Path(__file__).parent / "compiled_runs"  # part of the repository: campaigns go on from what others compiled


@dataclass(frozen=True)
class CompiledPart:
  """A compiled step; the run takes `weight` times its time and memory. `schedule` is None if it does not fit."""

  weight: float
  layers: int
  peak: int
  seconds: float
  schedule: Schedule | None


@dataclass(frozen=True)
class PlannedRun:
  """A published run as it was compiled here."""

  run: PublishedRun
  parts: Sequence[CompiledPart]  # models of two depths, or the whole one
  quick: bool = False  # compiled as far as its schedule

  @staticmethod
  def read(run: PublishedRun, kept: Path = KEPT, quick: bool = False) -> "PlannedRun | None":
    """What was kept of a run; None if nothing was."""
    file = kept / f"{run.id}.json"
    if not file.exists():
      return None
    parts = [
      CompiledPart(**part | {"schedule": part["schedule"] and from_json(part["schedule"])})
      for part in json.loads(file.read_text())
    ]
    return PlannedRun(run, parts, quick)

  @staticmethod
  def best(run: PublishedRun) -> "PlannedRun | None":
    """The whole compilation that was kept, or else the schedule."""
    return PlannedRun.read(run) or PlannedRun.read(run, SCHEDULED, quick=True)

  def write(self, kept: Path = KEPT) -> None:
    """Keeps it, for `read`."""
    kept.mkdir(exist_ok=True)
    values = [{**vars(part), "schedule": part.schedule and to_json(short(part.schedule))} for part in self.parts]
    with atomic_file(kept / f"{self.run.id}.json") as target:
      target.write((json.dumps(values, separators=(",", ":")).replace(',["', ',\n["') + "\n").encode())

  def seconds(self, calibration: Calibration) -> float:
    """A step on a chip of this calibration; 0 if there is no schedule."""
    if not self.timed:
      return 0.0
    return sum(part.weight * estimate(part.schedule, calibration).seconds for part in self.parts if part.schedule)

  @property
  def timed(self) -> bool:
    """Whether there is a schedule."""
    return all(part.schedule for part in self.parts)

  @property
  def peak_bytes(self) -> float:
    """Of a device."""
    return sum(part.weight * part.peak for part in self.parts)

  @property
  def fits(self) -> bool:
    """Whether the compiler says so."""
    chip = Topology.named(self.run.topology).chip
    return self.peak_bytes <= chip.hbm_bytes // chip.devices


def main() -> None:
  """Compiles the run and writes its file."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("run", type=published_run)
  parser.add_argument("--cache", type=Path, required=True)
  parser.add_argument("--depths", type=int, nargs=2, default=[], metavar="LAYERS")
  parser.add_argument("--quick", action="store_true", help="only as far as the schedule")
  parser.add_argument("--timeout", type=int, metavar="SECONDS", help="of processor time, after which it is killed")
  arguments = parser.parse_args()
  if arguments.timeout:
    limit_processor_time(arguments.timeout)
  parts = compiled_parts(arguments.run.planned_keys, arguments.cache, arguments.depths, quick=arguments.quick)
  PlannedRun(arguments.run, parts).write(SCHEDULED if arguments.quick else KEPT)


def limit_processor_time(seconds: int) -> None:
  """Has this process killed after so many seconds of processor time: on a busy machine that is what stays the same."""
  resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def compiled_parts(
  keys: Mapping[str, Any], cache: Path, depths: Sequence[int] = (), *, quick: bool = False
) -> list[CompiledPart]:
  """A run of these keys, or models of two depths that stand for it; what is compiled is kept in `cache`."""
  layers = getattr(resolve(values=dict(keys)).config, LAYERS)
  low, high = sorted(depths) if depths else (layers, layers)
  if depths and not FEWEST_LAYERS <= low < high:
    raise ConfigError(f"--depths {low} {high}: two numbers of layers, each {FEWEST_LAYERS} or more.")
  share = (layers - low) / (high - low) if depths else 1.0
  weights = {low: 1 - share, high: share}  # a whole run: both are its own depth
  return [_compiled(keys, cache, depth, weight, quick) for depth, weight in weights.items()]


def _compiled(keys: Mapping[str, Any], cache: Path, layers: int, weight: float, quick: bool) -> CompiledPart:
  program, topology = program_for(resolve(values={**keys, LAYERS: layers}).config)
  step = find_step(program, topology, cache, quick=quick)
  work = step_schedule(program, topology, step, cache, blocks=not quick)
  return CompiledPart(weight, layers, step.peak, round(step.seconds, 1), work)


if __name__ == "__main__":
  main()
