"""Compiles one published run and keeps what fitting needs; `benchmarks.published_runs` starts a process for each.

  python -m benchmarks.planned_run RUN --cache plans
  python -m benchmarks.planned_run RUN --cache plans --depths 4 6   # two models of fewer layers

Layers that are alike run in one loop, so time and memory of a step are a + b x layers, and two depths give a and b.
That serves runs that the compiler does not fit into memory here, since it has no schedule of what does not fit. Loops
of fewer than four iterations may be unrolled, and then they are another program.
"""

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from maxtext.configs import ConfigError
from maxtext.configs.loader import resolve
from maxtext.mesh.topology import Topology
from maxtext.planner.compile import program_for
from maxtext.planner.compiled_step import compiled_step
from maxtext.planner.estimate import Calibration, estimate
from maxtext.planner.hlo import CompiledProgram
from maxtext.planner.plan import filled_rows
from maxtext.planner.published_runs import PublishedRun, published_run
from maxtext.planner.schedule import Schedule, schedule
from maxtext.storage.atomic import atomic_file

LAYERS = "base_num_decoder_layers"
FEWEST_LAYERS = 4


@dataclass(frozen=True)
class CompiledPart:
  """A compiled step with all that its schedule is read from; the run takes `weight` times its time and memory."""

  weight: float
  layers: int
  text: str | None
  peak: int
  seconds: float
  kernel_efficiency: Mapping[str, float]
  filled_rows: float
  axes: Mapping[str, int]  # of its mesh
  devices: Sequence[int]  # their ids, in the order of the mesh

  def schedule(self, topology: Topology) -> Schedule | None:
    """Its schedule; None if it does not fit."""
    if self.text is None:
      return None
    by_id = {device.id: device for device in topology.devices()}
    places = np.array([by_id[i] for i in self.devices]).reshape(tuple(self.axes.values()))
    program, mesh = CompiledProgram.parse(self.text), Mesh(places, tuple(self.axes))
    return schedule(program, topology, mesh, self.filled_rows, self.kernel_efficiency)


@dataclass(frozen=True)
class PlannedRun:
  """A published run as it was compiled here."""

  run: PublishedRun
  schedules: Sequence[tuple[float, Schedule]]  # with weights
  peak_bytes: float  # of a device
  compile_seconds: float
  depths: Sequence[int]  # of the models that were compiled; one if it was the whole one

  @staticmethod
  def read(cache: Path, run: PublishedRun) -> "PlannedRun | None":
    """What was kept of a run; None if nothing was."""
    file = _file(cache, run)
    if not file.exists():
      return None
    topology = Topology.named(run.topology, run.slices)
    parts = [CompiledPart(**part) for part in json.loads(gzip.decompress(file.read_bytes()))]
    schedules = [(part.weight, part.schedule(topology)) for part in parts]
    return PlannedRun(
      run,
      [(weight, found) for weight, found in schedules if found],
      sum(part.weight * part.peak for part in parts),
      sum(part.seconds for part in parts),
      [part.layers for part in parts],
    )

  def seconds(self, calibration: Calibration) -> float:
    """A step on a chip of this calibration; 0 if there is no schedule."""
    return sum(weight * estimate(schedule, calibration).seconds for weight, schedule in self.schedules)

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
  arguments = parser.parse_args()
  parts = compiled_parts(arguments.run.planned_keys, arguments.cache, arguments.depths)
  file = _file(arguments.cache, arguments.run)
  file.parent.mkdir(parents=True, exist_ok=True)
  with atomic_file(file) as target:
    target.write(gzip.compress(json.dumps([asdict(part) for part in parts]).encode()))


def compiled_parts(keys: Mapping[str, Any], cache: Path, depths: Sequence[int] = ()) -> list[CompiledPart]:
  """A run of these keys, or models of two depths that stand for it; what is compiled is kept in `cache`."""
  layers = getattr(resolve(values=dict(keys)).config, LAYERS)
  low, high = sorted(depths) if depths else (layers, layers)
  if depths and not FEWEST_LAYERS <= low < high:
    raise ConfigError(f"--depths {low} {high}: two numbers of layers, each {FEWEST_LAYERS} or more.")
  share = (layers - low) / (high - low) if depths else 1.0
  weights = {low: 1 - share, high: share}  # a whole run: both are its own depth
  return [_compiled(keys, cache, depth, weight) for depth, weight in weights.items()]


def _compiled(keys: Mapping[str, Any], cache: Path, layers: int, weight: float) -> CompiledPart:
  program, topology = program_for(resolve(values={**keys, LAYERS: layers}).config)
  step, execution = compiled_step(program, topology, cache), program.model.execution
  mesh = execution.sharding.mesh
  return CompiledPart(
    weight,
    layers,
    step.text,
    step.peak,
    step.seconds,
    dict(step.kernel_efficiency),
    filled_rows(program.config, execution),
    dict(mesh.shape),
    [device.id for device in mesh.devices.flat],
  )


def _file(cache: Path, run: PublishedRun) -> Path:
  return cache / "runs" / f"{run.id}.json.gz"


if __name__ == "__main__":
  main()
