"""The HTML report: facts, plots and samples of one run, or a comparison of several."""

import html
import json
import math
import shlex
import time
from collections.abc import Sequence
from itertools import islice
from operator import mul
from pathlib import Path
from typing import Any

from maxtext.observe.downsample import MAX_POINTS, downsample
from maxtext.observe.page import COLOURS, as_json, page
from maxtext.observe.run_files import NOT_COMPARED, RunFiles, SampleRecord, Series

_SCRIPT = Path(__file__).with_name("report.js").read_text(encoding="utf-8")

_FIXED_PLOTS = {
  "grad_norm": "Gradient norm",
  "learning_rate": "Learning rate",
  "tokens_per_second": "Tokens per second",
  "mfu": "MFU",
  "tflops_per_device": "TFLOP/s per device",
  "expert_load": "Expert load (1 is even)",
  "load_balance_loss": "Load-balancing loss",
  "data_wait_seconds": "Waiting for input, seconds",
}
_WITHOUT_STARTS = {"tokens_per_second", "mfu", "tflops_per_device", "step_time_seconds", "data_wait_seconds"}
_NOT_PLOTTED = {"tokens", "step_time_seconds", "eval_tokens", "eval_seconds"}  # in the facts, or in the histogram
_NOT_SMOOTHED = {"learning_rate"}
_BINS = 40
_MAX_MARKS = 300  # of restarts and of values that are not finite
_MAX_TEXT = 4000  # characters of a sample, or of a value


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
      return {"problems": _problems(self._runs, self._names), "summary": _tiles(self._runs[0])}
    return {
      "problems": _problems(self._runs, self._names),
      "differences": _differences(self._runs, self._names),
      "summary": _summary_table(self._runs, self._names),
    }

  def _after(self) -> dict[str, str]:
    parts = [_samples(run, name, len(self._runs) > 1) for run, name in zip(self._runs, self._names, strict=True)]
    facts = [_facts(run, name, len(self._runs) > 1) for run, name in zip(self._runs, self._names, strict=True)]
    return {"notes": self._notes(), "samples": "".join(parts), "facts": "".join(facts)}

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
      notes.append("Speeds and step times leave out the first step after each start, which compiles.")
    return f'<p class="note">{" ".join(notes)}</p>' if notes else ""

  def _plots(self) -> dict[str, Any]:
    """What the script draws: the points by run and metric, and which of them share a plot."""
    names = list(dict.fromkeys(name for run in self._runs for name in run.metrics.series))
    losses = [name for name in names if name == "loss" or (name.startswith("eval") and "loss" in name)]
    plots: list[dict[str, Any]] = [
      {"title": "Loss", "lines": [_line("loss")] + [_line(name) for name in losses if name != "loss"]}
    ]
    plots += [{"title": title, "lines": [_line(name)]} for name, title in _FIXED_PLOTS.items() if name in names]
    rest = [name for name in names if name not in {*losses, *_FIXED_PLOTS, *_NOT_PLOTTED}]
    plots += [{"title": name.replace("_", " "), "lines": [_line(name)]} for name in rest]
    plotted = {line["metric"] for plot in plots for line in plot["lines"]}
    return {
      "runs": [
        {
          "name": name,
          "modified": run.modified if run.metrics.steps else 0,
          "finished": run.metrics.last_step >= (_steps_asked(run) or math.inf),
          "restarts": run.metrics.starts[1:][-_MAX_MARKS:],
          "series": {metric: _points(_settled(run, metric)) for metric in run.metrics.series if metric in plotted},
        }
        for run, name in zip(self._runs, self._names, strict=True)
      ],
      "plots": [plot for plot in plots if plot["lines"][0]["metric"] in names or len(plot["lines"]) > 1],
      "histogram": _histogram([_settled(run, "step_time_seconds").values for run in self._runs]),
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


def _settled(run: RunFiles, metric: str) -> Series:
  """A metric without the first steps after starts, where these would mislead."""
  series = run.metrics.series.get(metric, Series())
  return series.without(run.metrics.starts) if metric in _WITHOUT_STARTS else series


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


def _problems(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
  lines = [
    f"{name}: {run.problem}. This is what was read before."
    for run, name in zip(runs, names, strict=True)
    if run.problem
  ]
  for run, name in zip(runs, names, strict=True):
    if (loss := run.metrics.series.get("loss")) and loss.not_finite:
      count = f"{len(loss.not_finite):,} step{'s' if len(loss.not_finite) > 1 else ''}"
      lines.append(f"{name}: the loss was not a finite number at {count}, first at step {loss.not_finite[0]:,}.")
  waiting = [name for run, name in zip(runs, names, strict=True) if not run.metrics.steps and not run.problem]
  notes = [f"{name} has not finished a step; the first one compiles." for name in waiting]
  return "".join(
    f'<p class="{kind}">{html.escape(line)}</p>'
    for kind, group in (("alert", lines), ("note", notes))
    for line in group
  )


def _summary(run: RunFiles) -> dict[str, tuple[str, str]]:
  """What a run has come to: {name: (value, remark)}."""
  metrics, found = run.metrics, {}
  steps, step = _steps_asked(run), metrics.last_step
  times = _settled(run, "step_time_seconds").values
  left = ""
  if steps and 0 < step < steps and times:
    recent = sorted(times[-100:])
    left = f"about {_duration((steps - step) * recent[len(recent) // 2])} left at this speed"
  found["Step"] = f"{step:,}", f"of {steps:,}" + (f", {left}" if left else "") if steps else ""
  if loss := _values(run, "loss"):
    found["Loss"] = _loss(loss[-1]), f"{_loss(loss[0])} at first"
  evaluated = metrics.series.get("eval_loss", Series())
  if evaluated.values:
    best = min(evaluated.values)
    where = evaluated.steps[evaluated.values.index(best)]
    found["Evaluation loss"] = _loss(evaluated.values[-1]), f"best {_loss(best)} at step {where:,}"
  if isinstance(parameters := run.facts.get("parameters"), int):
    found["Parameters"] = _count(parameters), f"{parameters:,}"
  if tokens := sum(_values(run, "tokens")):
    found["Tokens"] = _count(tokens), f"{tokens:,.0f}"
  if seconds := sum(_values(run, "step_time_seconds")):
    evaluating = sum(_values(run, "eval_seconds"))
    found["Time in steps"] = _duration(seconds), f"and {_duration(evaluating)} in evaluations" if evaluating else ""
  if times:
    found["Step time"] = _duration(sorted(times)[len(times) // 2]), "median"
  if (speed := _mean_over_time(run, "tokens_per_second")) is not None:
    found["Tokens/s"] = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}", "mean"
  if (mfu := _mean_over_time(run, "mfu")) is not None:
    found["MFU"] = f"{mfu:.1%}", "mean"
  return found


def _tiles(run: RunFiles) -> str:
  tiles = (
    f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(remark)}</small></dd></div>"
    for name, (value, remark) in _summary(run).items()
  )
  return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _summary_table(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
  summaries = [_summary(run) for run in runs]
  columns = list(dict.fromkeys(name for summary in summaries for name in summary))
  head = "".join(f'<th scope="col" class="number">{html.escape(column)}</th>' for column in columns)
  rows = []
  for i, (summary, name) in enumerate(zip(summaries, names, strict=True)):
    cells = "".join(f'<td class="number">{html.escape(summary.get(column, ("-", ""))[0])}</td>' for column in columns)
    swatch = f'<span class="swatch" style="color:{COLOURS[i % len(COLOURS)]}"></span>'
    rows.append(f'<tr><th scope="row">{swatch} {html.escape(name)}</th>{cells}</tr>')
  return _section("Runs", _table(f"<tr><td></td>{head}</tr>{''.join(rows)}"))


def _differences(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
  """The keys in which the configurations differ, then versions and hardware that do."""
  unknown = [name for run, name in zip(runs, names, strict=True) if not run.config]
  note = f'<p class="note">Without a configuration: {html.escape(", ".join(unknown))}.</p>' if unknown else ""
  keys = sorted({key for run in runs for key in run.config} - NOT_COMPARED)
  rows = {key: [_text(run.value(key)) if key in run.config else "-" for run in runs] for key in keys}
  environments = [_environment(run) for run in runs]
  for name in dict.fromkeys(name for environment in environments for name in environment):
    rows[name] = [environment.get(name, "-") for environment in environments]
  rows = {key: values for key, values in rows.items() if len(set(values)) > 1}
  if not rows:
    return _section("Differences", f'<p class="note">The configurations are equal.</p>{note}')
  head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
  body = "".join(
    f'<tr><th scope="row">{html.escape(key)}</th>{"".join(f"<td>{html.escape(value)}</td>" for value in values)}</tr>'
    for key, values in rows.items()
  )
  return _section("Differences", _table(f"<tr><td></td>{head}</tr>{body}") + note)


def _environment(run: RunFiles) -> dict[str, str]:
  versions = run.facts.get("versions")
  found = (
    {f"version of {name}": str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}
  )
  if isinstance(python := run.facts.get("python"), str):
    found["version of python"] = python
  if hardware := _hardware(run):
    found["hardware"] = hardware
  return found


def _hardware(run: RunFiles) -> str:
  found = run.facts.get("hardware")
  if not isinstance(found, dict):
    return ""
  hosts = f", {found['processes']} processes" if found.get("processes", 1) != 1 else ""
  return f"{found.get('devices', '?')} x {found.get('kind', '?')}{hosts}"


def _facts(run: RunFiles, name: str, several: bool) -> str:
  """The command, what it ran on, and the keys that were set."""
  facts = run.facts
  rows: dict[str, str] = {}
  if command := run.command:
    rows["Command"] = f"<code>{html.escape(shlex.join([Path(command[0]).name, *command[1:]]))}</code>"
  if model := run.value("model_name"):
    rows["Model"] = html.escape(", ".join([_text(model), *_sizes(run)]))
  if hardware := _hardware(run):
    rows["Hardware"] = html.escape(hardware)
  if "started" in facts:
    restarts = run.metrics.starts[1:]
    again = f", the last of {len(restarts) + 1} starts" if restarts else ""
    rows["Started"] = html.escape(f"{facts['started']}{again}")
    if restarts:
      shown = ", ".join(f"{step - 1:,}" for step in restarts[:20])
      rows["Restarts"] = html.escape(f"after step {shown}{', ...' if len(restarts) > 20 else ''}")
  versions = facts.get("versions")
  if isinstance(versions, dict):
    listed = {"python": facts.get("python", "?"), **versions}
    rows["Versions"] = html.escape(", ".join(f"{library} {version}" for library, version in listed.items()))
  bad = {metric: series.not_finite for metric, series in run.metrics.series.items() if series.not_finite}
  if bad:
    rows["Not finite"] = html.escape(
      ", ".join(f"{metric} at {len(steps):,} steps from {steps[0]:,}" for metric, steps in islice(bad.items(), 10))
    )
  body = "".join(f'<tr><th scope="row">{key}</th><td>{value}</td></tr>' for key, value in rows.items())
  table = f'<table class="facts">{body}</table>' if body else ""
  inner = table + _configuration(run, name)
  return _section(f"Run {name}" if several else "Run", inner) if inner else ""


def _sizes(run: RunFiles) -> list[str]:
  """The sizes of the model and of a batch, as far as they are known."""
  forms = {
    "num_decoder_layers": "{:,} layers",
    "emb_dim": "width {:,}",
    "vocab_size": "vocabulary {:,}",
    "max_target_length": "sequences of {:,} tokens",
    "global_batch_size_to_train_on": "{:,} in a batch",
  }
  values = ((run.value(key), form) for key, form in forms.items())
  return [form.format(value) for value, form in values if isinstance(value, int)]


def _configuration(run: RunFiles, name: str) -> str:
  set_keys = {
    key: entry for key, entry in run.config.items() if entry["from"] not in ("default", "other keys", "base.yml")
  }
  if not set_keys:
    return ""
  rows = "".join(
    f'<tr><th scope="row">{html.escape(key)}</th><td>{html.escape(_text(entry["value"]))}</td>'
    f'<td class="muted">{html.escape(entry["from"])}</td></tr>'
    for key, entry in sorted(set_keys.items())
  )
  head = '<tr><th scope="col">key</th><th scope="col">value</th><th scope="col">from</th></tr>'
  return _details(f"configuration {name}", f"Configuration: {len(set_keys)} keys that are set", _table(head + rows))


def _samples(run: RunFiles, name: str, several: bool) -> str:
  """Generated texts, the last step first and the only one that is open."""
  if not run.samples:
    return ""
  steps: dict[int, list[SampleRecord]] = {}
  for sample in run.samples:
    steps.setdefault(sample.step, []).append(sample)
  blocks = []
  for i, step in enumerate(sorted(steps, reverse=True)):
    texts = "".join(
      f'<div class="sample"><pre dir="auto"><span class="prompt">{_escaped(sample.prompt)}</span>'
      f"{_escaped(sample.text)}</pre></div>"
      for sample in steps[step]
    )
    blocks.append(_details(f"{name} {step}", f"step {step:,}", texts, is_open=i == 0))
  return _section(f"Samples of {name}" if several else "Samples", "".join(blocks))


def _section(title: str, inner: str) -> str:
  return f"<section><h2>{html.escape(title)}</h2>{inner}</section>"


def _details(key: str, title: str, inner: str, *, is_open: bool = False) -> str:
  """A part that can be opened; by the key the script finds it again."""
  state = f"data-open={'true open' if is_open else 'false'}"
  return f'<details {state} data-key="{html.escape(key)}"><summary>{html.escape(title)}</summary>{inner}</details>'


def _table(rows: str) -> str:
  """A table that scrolls within the page, also by the keyboard."""
  return f'<div class="scroll" tabindex="0"><table>{rows}</table></div>'


def _values(run: RunFiles, metric: str) -> list[float]:
  return run.metrics.series.get(metric, Series()).values


def _mean_over_time(run: RunFiles, metric: str) -> float | None:
  """The mean of a rate, each step weighted by its time, without the first steps after starts."""
  rates, times = _settled(run, metric), _settled(run, "step_time_seconds")
  seconds = times.values
  if rates.steps != times.steps:
    known = dict(zip(times.steps, times.values, strict=True))
    seconds = [known.get(step, 1.0) for step in rates.steps]
  total = sum(seconds)
  return sum(map(mul, rates.values, seconds)) / total if total > 0 else None


def _steps_asked(run: RunFiles) -> int | None:
  steps = run.value("steps")
  steps = run.value("learning_rate_schedule_steps") if steps == -1 else steps
  return steps if isinstance(steps, int) and steps > 0 else None


def _unique_names(runs: Sequence[RunFiles]) -> list[str]:
  """The folders' names, with the parent's where two are equal, and then with a number."""
  names = [run.name for run in runs]
  names = [f"{run.parent}/{name}" if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]
  return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _text(value: Any) -> str:
  text = value if isinstance(value, str) else json.dumps(value)
  return text if len(text) <= 300 else f"{text[:297]}..."


def _escaped(text: str) -> str:
  return html.escape(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}...")


def _loss(value: float) -> str:
  return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def _count(number: float) -> str:
  """A count in three digits, such as 3.15 M."""
  for size, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
    if number >= size:
      return f"{number / size:.3g}{suffix}"
  return f"{number:.0f}"


def _duration(seconds: float) -> str:
  if not 0 <= seconds < 1e12:
    return "-"
  if seconds < 1:
    return f"{seconds * 1000:.3g} ms"
  if seconds < 100:
    return f"{seconds:.3g} s"
  minutes = round(seconds / 60)
  if minutes < 100:
    return f"{minutes} min"
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
