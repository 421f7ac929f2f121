"""Fits the planner's constants to published runs that were compiled, and tells how far plans of other runs are off.

  python -m benchmarks.fit_planner           # after `benchmarks.published_runs`: prints
  python -m benchmarks.fit_planner --write   # also writes planner/calibration.yml, the page's tables and the picture

The factors of each chip minimize the errors of the logarithm of the step time, every model with the same weight, and
stay near `START` as far as runs do not say otherwise. A run's error is that of constants fitted without any run of its
model. A chip with runs of fewer than three models keeps the constants of `FORMER`.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import least_squares

from benchmarks.accuracy_picture import picture
from benchmarks.planned_run import PlannedRun
from benchmarks.published_runs import summary
from maxtext.configs.loader import resolve
from maxtext.planner.calibration import FILE, PredictedRun, run_kind
from maxtext.planner.estimate import Calibration
from maxtext.planner.published_runs import PublishedRun, published_runs

PAGE = Path("docs/planner-accuracy.md")
PICTURE = Path("docs/pictures/planner-accuracy.svg")
START = Calibration(compute=0.85, matmul=0.65, matmul_8bit=0.55, memory=0.8)
# From single published figures whose configurations are not known (docs/planner-accuracy.md), and their models.
FORMER: Mapping[str, Calibration] = {
  "v5p": Calibration(compute=0.88, grouped=0.82),
  "v6e": Calibration(compute=0.83),
}
SEEN_BY_FORMER = {"v5p": ("llama2-70b", "mixtral-8x7b"), "v6e": ("llama3.1-8b",)}
FEWEST_MODELS = 3
SPREAD = {
  "compute": 0.15,
  "kernel": 0.2,
  "grouped": 0.2,
  "link": 0.1,
  "host": 0.5,
  "matmul": 0.15,
  "matmul_8bit": 0.15,
  "memory": 0.2,
}  # of their logarithms, before any run is seen
# Constants of whole compilations, and of quick ones.
OF_OPERATIONS = {False: ("compute",), True: ("matmul", "matmul_8bit", "memory")}
NOISE = 0.05  # of a run's logarithm
HEAD = """\
# Constants of each chip (`estimate.Calibration`), and published runs as they were planned. Written by
# `python -m benchmarks.fit_planner --write`; do not edit.
"""


def main() -> None:
  """Prints constants and errors."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--write", action="store_true", help=f"write {Path(str(FILE)).name}, {PAGE} and {PICTURE}")
  arguments = parser.parse_args()
  every = [one for run in published_runs().values() if (one := PlannedRun.best(run))]
  constants: dict[str, Calibration] = {}
  runs: list[PredictedRun] = []
  for chip in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
    of_chip = [planned for planned in every if planned.run.chip == chip]
    constants[chip] = calibration_of(chip, of_chip)
    runs += predictions(of_chip, constants[chip])
  print(constants_table(constants), table(runs), sep="\n\n")
  timed_runs = [run for run in runs if run.planned]
  print("fitted:  ", summary({run.id: run.planned for run in timed_runs}))
  print("held out:", summary({run.id: run.held_out for run in timed_runs if run.held_out}))
  if arguments.write:
    fields = {chip: {field: getattr(one, field) for field in SPREAD} for chip, one in constants.items()}
    values = {"constants": fields, "runs": [asdict(run) for run in runs]}
    Path(str(FILE)).write_text(HEAD + yaml.safe_dump(values, sort_keys=False, width=200))
    PAGE.write_text(with_table(with_table(PAGE.read_text(), table(runs)), constants_table(constants)))
    if held_out := [run for run in timed_runs if run.held_out]:
      PICTURE.write_text(picture(held_out))


def calibration_of(chip: str, runs: Sequence[PlannedRun]) -> Calibration:
  """The constants of a chip: of these runs, if they are of enough models; the former ones where they say nothing."""
  timed, former = [run for run in runs if run.timed], FORMER.get(chip, Calibration())
  if not enough(timed):
    return former
  seen = {run.quick for run in timed}
  unseen = [field for quick, fields in OF_OPERATIONS.items() if quick not in seen for field in fields]
  return replace(fit(timed), **{field: getattr(former, field) for field in unseen})


def enough(runs: Iterable[PlannedRun]) -> bool:
  """Whether constants are fitted to these runs."""
  return len(set(map(model, runs))) >= FEWEST_MODELS


def fit(runs: Sequence[PlannedRun]) -> Calibration:
  """The constants of a chip for these runs."""
  of_model = Counter(map(model, runs))
  weights = [1 / math.sqrt(of_model[model(run)]) for run in runs]

  def residuals(logs: np.ndarray) -> list[float]:
    calibration = _calibration(logs)
    errors = [math.log(run.seconds(calibration) / run.run.step_seconds) / NOISE for run in runs]
    return [w * e for w, e in zip(weights, errors, strict=True)] + list(logs / list(SPREAD.values()))

  best = least_squares(residuals, np.zeros(len(SPREAD)), loss="soft_l1", diff_step=1e-3)
  return _rounded(_calibration(best.x))


def predictions(runs: Sequence[PlannedRun], calibration: Calibration) -> Iterable[PredictedRun]:
  """The runs of one chip with their planned times."""
  timed = [run for run in runs if run.timed]
  for one in runs:
    published, planned, held_out = one.run, one.seconds(calibration), 0.0
    if enough(timed):
      held_out = one.seconds(fit([other for other in timed if model(other) != model(one)]))
    elif model(one) not in SEEN_BY_FORMER.get(published.chip, ()):
      held_out = planned
    yield PredictedRun(
      published.id,
      published.chip,
      run_kind(resolve(values=published.planned_keys).config),
      model(one),
      published.step_seconds,
      round(planned, 3),
      round(held_out, 3),
      round(one.peak_bytes / 2**30, 1),
      one.fits,
      [part.layers for part in one.parts] if len(one.parts) > 1 else [],
      one.quick,
    )


def model(planned: PlannedRun) -> str:
  """The model of a run, by which runs are held out together: its name, or else its width and depth."""
  keys = planned.run.keys
  return keys.get("model_name") or f"{keys['base_num_decoder_layers']} layers of {keys['base_emb_dim']}"


def table(runs: Iterable[PredictedRun]) -> str:
  """A table for the documentation."""
  lines = ["| run | kind | published | planned | held out | error | memory, GiB |", "| --- " * 7 + "|"]
  return "\n".join(lines + [_row(run, published_runs()[run.id]) for run in runs])


def constants_table(calibrations: Mapping[str, Calibration]) -> str:
  """The constants of every chip, for the documentation."""
  rows = [f"| {chip} | " + " | ".join(f"{getattr(c, f):g}" for f in SPREAD) + " |" for chip, c in calibrations.items()]
  return "\n".join([f"| chip | {' | '.join(SPREAD)} |", "| --- " * (1 + len(SPREAD)) + "|", *rows])


def with_table(page: str, table: str) -> str:
  """The page with a table in the place of the one with the same header."""
  before, header, after = page.partition(table.split("\n", 1)[0])
  assert header, "the page has this table"
  return before + table + "\n\n" + after.partition("\n\n")[2]


def _row(run: PredictedRun, published: PublishedRun) -> str:
  notes = ("superseded",) if published.superseded else ()
  notes += ("quick",) if run.quick else ()
  notes += (f"from {run.layers[0]} and {run.layers[1]} layers",) if run.layers else ()
  memory = f"{run.memory:.1f}" + ("" if run.fits else ", said not to fit")
  times = [f"{seconds:.2f} s" if seconds else "" for seconds in (run.seconds, run.planned, run.held_out)]
  error = f"{run.error:+.1%}" if run.held_out else ""
  name = f"`{run.id}`" + (f" ({', '.join(notes)})" if notes else "")
  return f"| {' | '.join([name, run.kind, *times, error, memory])} |"


def _rounded(calibration: Calibration) -> Calibration:
  return replace(calibration, **{field: float(f"{getattr(calibration, field):.3g}") for field in SPREAD})


def _calibration(logs: np.ndarray) -> Calibration:
  factors = zip(SPREAD, np.exp(logs), strict=True)
  return replace(START, **{field: float(getattr(START, field) * factor) for field, factor in factors})


if __name__ == "__main__":
  main()
