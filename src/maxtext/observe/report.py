"""The HTML report: facts, plots and samples of one run, or a comparison of several."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext.observe.downsample import MAX_POINTS, downsample
from maxtext.observe.goodput_html import goodput_html
from maxtext.observe.page import as_json, page
from maxtext.observe.report_parts import (
  differences_html,
  evaluations_html,
  facts_html,
  problems_html,
  samples_html,
  summary_table_html,
  tiles_html,
)
from maxtext.observe.run_files import RunFiles, Series

_SCRIPT = Path(__file__).with_name("report.js").read_text(encoding="utf-8")

_FIXED_PLOTS = {
  "reward": "Reward",
  "eval_pass_rate": "Pass rate",
  "answer_tokens": "Tokens of an answer",
  "entropy": "Entropy",
  "mismatch_max": "Mismatch of engine and trainer, largest",
  "grad_norm": "Gradient norm",
  "learning_rate": "Learning rate",
  "tokens_per_second": "Tokens per second",
  "mfu": "MFU",
  "tflops_per_device": "TFLOP/s per device",
  "expert_load": "Expert load (1 is even)",
  "load_balance_loss": "Load-balancing loss",
  "data_wait_seconds": "Waiting for input, seconds",
}
_NOT_PLOTTED = {"tokens", "step_time_seconds", "eval_tokens", "eval_seconds"}  # in the facts, or in the histogram
_NOT_SMOOTHED = {"learning_rate"}
_BINS = 40
_MAX_MARKS = 300  # of restarts and of values that are not finite


def write_report(folders: Sequence[Path], target: Path) -> Path:
  """Writes the report of the runs in those folders; returns its path. Raises `ConfigError` for other folders."""
  target.write_bytes(Report(folders).page().encode())
  return target


class Report:
  """The report of some runs, which can be read again while they go on.

  Raises:
    ConfigError: a folder is not that of a run.
  """

  def __init__(self, folders: Sequence[Path]) -> None:
    self._runs = [RunFiles(folder) for folder in folders]
    for run in self._runs:
      run.check()
    self._names = _unique_names(self._runs)
    self.update()

  def update(self) -> bool:
    """Reads what is new in the folders; returns whether anything changed."""
    return any([run.update() for run in self._runs])

  def page(self, *, live: bool = False) -> str:
    """The page; a live one asks its server for `data()` again and again."""
    body = "".join(f'<div id="{name}">{text}</div>' for name, text in self._before().items())
    body += _CONTROLS + '<noscript><p class="note">The plots are drawn by the script of this page.</p></noscript>'
    body += '<div class="grid" id="plots"></div>'
    body += "".join(f'<div id="{name}">{text}</div>' for name, text in self._after().items())
    if not live:
      body += f'<p class="note">Written {time.strftime("%Y-%m-%d %H:%M:%S %z")}.</p>'
    return page(self.title, body, _SCRIPT, self._plots() | {"live": live}, live=live)

  def data(self) -> bytes:
    """What a live page takes from its server, as JSON: the plots, and the HTML of the parts around them."""
    return as_json(self._plots() | {"live": True, "html": self._before() | self._after()}).encode()

  @property
  def title(self) -> str:
    """The names of the runs."""
    return ", ".join(self._names)

  def _before(self) -> dict[str, str]:
    if len(self._runs) == 1:
      return {"problems": problems_html(self._runs, self._names), "summary": tiles_html(self._runs[0])}
    return {
      "problems": problems_html(self._runs, self._names),
      "differences": differences_html(self._runs, self._names),
      "summary": summary_table_html(self._runs, self._names),
    }

  def _after(self) -> dict[str, str]:
    several, named = len(self._runs) > 1, list(zip(self._runs, self._names, strict=True))
    samples = "".join(
      samples_html(title, texts, name, several)
      for run, name in named
      for title, texts in (("Samples", run.samples), ("Rollouts", run.rollouts))
    )
    evaluations = "".join(evaluations_html(run.evaluations, name if several else "") for run, name in named)
    facts = "".join(facts_html(run, name, several) for run, name in named)
    goodput = "".join(goodput_html(run.goodput(), name if several else "") for run, name in named)
    return {"notes": self._notes(), "evaluations": evaluations, "goodput": goodput, "samples": samples, "facts": facts}

  def _notes(self) -> str:
    notes = []
    if any(len(series.steps) > MAX_POINTS for run in self._runs for series in run.metrics.series.values()):
      notes.append(
        f"Lines of more than {MAX_POINTS:,} points show the least and the greatest value of each of about "
        f"{MAX_POINTS // 2:,} stretches; smoothing averages all steps."
      )
    if any(len(run.metrics.starts) > 1 for run in self._runs):
      notes.append("Dotted vertical lines are restarts.")
    if any(series.not_finite for run in self._runs for series in run.metrics.series.values()):
      notes.append("Crosses at the top are steps where a value was not a finite number.")
    if any(run.metrics.steps for run in self._runs):
      notes.append(
        "Speeds and step times leave out the first step after each start, which compiles; the last bar of step times "
        "has the longest percent."
      )
    return f'<p class="note">{" ".join(notes)}</p>' if notes else ""

  def _plots(self) -> dict[str, Any]:
    """What the script draws: the points by run and metric, and which of them share a plot."""
    names = list(dict.fromkeys(name for run in self._runs for name in run.metrics.series))
    losses = [name for name in names if name == "loss" or (name.startswith("eval") and "loss" in name)]
    plots: list[dict[str, Any]] = [
      {"title": "Loss", "lines": [_line("loss")] + [_line(name) for name in losses if name != "loss"]}
    ]
    plots += [{"title": title, "lines": [_line(name)]} for name, title in _FIXED_PLOTS.items() if name in names]
    shown = {*losses, *_FIXED_PLOTS, *_NOT_PLOTTED}
    rest = [name for name in names if name not in shown and not name.startswith("badput_")]  # a table has these
    plots += [{"title": name.replace("_", " "), "lines": [_line(name)]} for name in rest]
    plotted = {line["metric"] for plot in plots for line in plot["lines"]}
    return {
      "runs": [
        {
          "name": name,
          "modified": run.modified if run.metrics.steps else 0,
          "finished": run.metrics.last_step >= (run.steps_asked or math.inf),
          "restarts": run.metrics.starts[1:][-_MAX_MARKS:],
          "series": {metric: _points(run.settled(metric)) for metric in run.metrics.series if metric in plotted},
        }
        for run, name in zip(self._runs, self._names, strict=True)
      ],
      "plots": [plot for plot in plots if plot["lines"][0]["metric"] in names or len(plot["lines"]) > 1],
      "histogram": _histogram([run.settled("step_time_seconds").values for run in self._runs]),
    }


_CONTROLS = (
  '<form class="controls" id="controls" hidden>'
  '<label>Smoothing <input type="range" id="smoothing" min="0" max="100" value="0"></label>'
  '<output id="smoothing-text" for="smoothing">off</output>'
  '<label><input type="checkbox" id="log-steps"> logarithmic steps</label>'
  '<span id="status"></span></form>'
)


def _line(metric: str) -> dict[str, Any]:
  """How a metric is drawn. Evaluations are few, so each of their points is marked."""
  evaluation = metric.startswith("eval")
  label = {"loss": "train", "eval_loss": "evaluation"}.get(metric, metric)
  return {
    "metric": metric,
    "label": label,
    "marked": evaluation,
    "smooth": not evaluation and metric not in _NOT_SMOOTHED,
  }


def _points(series: Series) -> dict[str, Any]:
  points = downsample(series.steps, series.values)
  return {
    "x": points.steps,
    "y": [_short_float(value) for value in points.values],
    "mean_x": points.mean_steps,
    "mean_y": [_short_float(value) for value in points.mean_values],
    "bad": series.not_finite[:_MAX_MARKS],
  }


def _short_float(value: float) -> float:
  return float(f"{value:.7g}")


def _histogram(values: Sequence[Sequence[float]]) -> dict[str, Any] | None:
  """Counts of step times in bins of equal width. The last bin has the longest percent, whatever it takes."""
  values = [[value for value in row if 0 <= value < 1e9] for row in values]
  everything = sorted(value for row in values for value in row)
  if not everything:
    return None
  low, high = everything[0], everything[min(len(everything) - 1, len(everything) * 99 // 100)]
  high = high if high > low else low + max(abs(low) * 0.1, 1e-6)
  counts = [[0] * _BINS for _ in values]
  for row, times in zip(counts, values, strict=True):
    for value in times:
      row[max(0, min(int((value - low) / (high - low) * _BINS), _BINS - 1))] += 1
  return {"low": low, "high": high, "counts": counts, "longest": everything[-1]}


def _unique_names(runs: Sequence[RunFiles]) -> list[str]:
  """The folders' names, with the parent's where two are equal, and then with a number."""
  names = [run.name for run in runs]
  names = [f"{run.parent}/{name}" if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]
  return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]
