"""What each chip was seen to reach, and how far plans of published runs were off: `calibration.yml`, for programs.

`benchmarks.fit_planner` writes that file from runs that were compiled; `docs/planner.md` tells how. What GPUs reach is
assumed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any, Literal

import yaml

from maxtext.configs import MaxTextConfig
from maxtext.models.execution.remat_policy import remat
from maxtext.planner.estimate import Calibration

FILE = files("maxtext.planner") / "calibration.yml"
RunKind = Literal["dense", "offloading", "experts", "8-bit"]


@dataclass(frozen=True)
class PredictedRun:
  """A published run that was compiled.

  Attributes:
    seconds: of a step, as published.
    planned: with the constants of the chip.
    held_out: with constants that no run of its model had a part in; 0 if there are none.
    memory: GiB of a device.
    layers: of the models that were compiled, if they had fewer.
    quick: compiled as far as the schedule.
  """

  id: str
  chip: str
  kind: RunKind
  model: str
  seconds: float
  planned: float
  held_out: float
  memory: float
  fits: bool
  layers: Sequence[int] = ()
  quick: bool = False

  @property
  def error(self) -> float:
    """Of the plan with constants that do not know its model, relative to what was measured."""
    return self.held_out / self.seconds - 1


@dataclass(frozen=True)
class Accuracy:
  """How far plans of one chip and kind were off."""

  chip: str
  kind: RunKind
  errors: Sequence[float]  # of runs whose models had no part in the fit

  def as_text(self) -> str:
    """A sentence for readers of a plan."""
    if not self.errors:
      return f"no published run of this kind ({self.kind}) was planned for {self.chip}: use the time to compare, only"
    off = sorted(map(abs, self.errors))
    runs = f"{len(off)} published runs" if len(off) > 1 else "one published run"
    return f"{runs} of this kind ({self.kind}) on {self.chip}: {median(off):.0%} off, at most {off[-1]:.0%}"

  def as_json(self) -> dict[str, Any]:
    """As JSON values."""
    off = sorted(map(abs, self.errors))
    found = {"median": median(off), "largest": off[-1]} if off else {}
    return {"kind": self.kind, "runs": len(off), **found}


def run_kind(config: MaxTextConfig) -> RunKind:
  """What sets a run apart as far as its time is concerned."""
  if config.quantization:
    return "8-bit"
  if config.num_experts > 1:
    return "experts"
  return "offloading" if any(turn.offloaded for turn in remat(config)) else "dense"


def accuracy(chip: str, kind: RunKind, quick: bool = False) -> Accuracy:
  """That of plans of this chip and kind, quick ones or others."""
  runs = [run for run in predicted_runs() if (run.chip, run.kind, run.quick) == (chip, kind, quick) and run.held_out]
  return Accuracy(chip, kind, [run.error for run in runs])


@cache
def predicted_runs() -> tuple[PredictedRun, ...]:
  """Published runs that were compiled."""
  return tuple(PredictedRun(**run) for run in _data()["runs"])


@cache
def _data() -> dict[str, Any]:
  return yaml.load(FILE.read_text(), yaml.CSafeLoader)


FITTED: Mapping[str, Calibration] = {chip: Calibration(**constants) for chip, constants in _data()["constants"].items()}
# For GPUs, of which no published run was planned. The network is a card for each, of 200 or 400 Gbit/s.
_ASSUMED: Mapping[str, Calibration] = {
  chip: Calibration(link=0.8, between_slices=card, matmul=0.7, memory=0.9)
  for chip, card in {"a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9}.items()
}
CALIBRATION: Mapping[str, Calibration] = {**FITTED, **_ASSUMED}
