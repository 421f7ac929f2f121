"""The parts of a report around its plots, as HTML. Every text from a run's files is escaped here."""

import html
import json
import shlex
from collections.abc import Callable, Sequence
from itertools import islice
from operator import mul
from pathlib import Path
from typing import Any

from maxtext.observe.evaluation_records import EvaluationRecord
from maxtext.observe.page import COLOURS
from maxtext.observe.run_files import NOT_COMPARED, RunFiles, SampleRecord, Series

_MAX_TEXT = 4000  # characters of a sample, or of a value
_EVALUATED: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
  "eval_loss": ("Evaluation loss", min),
  "eval_pass_rate": ("Pass rate", max),
}


def problems_html(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
  """What a reader must know first: folders that have gone, a loss that was not finite, a run without a step."""
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
  steps, step = run.steps_asked, metrics.last_step
  times = run.settled("step_time_seconds").values
  left = ""
  if steps and 0 < step < steps and times:
    recent = sorted(times[-100:])
    left = f"about {_duration((steps - step) * recent[len(recent) // 2])} left at this speed"
  found["Step"] = f"{step:,}", f"of {steps:,}" + (f", {left}" if left else "") if steps else ""
  if loss := _values(run, "loss"):
    found["Loss"] = _loss(loss[-1]), f"{_loss(loss[0])} at first"
  for metric, (name, choose) in _EVALUATED.items():
    evaluated = metrics.series.get(metric, Series())
    if evaluated.values:
      best = choose(evaluated.values)
      where = evaluated.steps[evaluated.values.index(best)]
      found[name] = _loss(evaluated.values[-1]), f"best {_loss(best)} at step {where:,}"
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


def tiles_html(run: RunFiles) -> str:
  """What one run has come to."""
  tiles = (
    f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(remark)}</small></dd></div>"
    for name, (value, remark) in _summary(run).items()
  )
  return f'<dl class="tiles">{"".join(tiles)}</dl>'


def summary_table_html(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
  """What several runs have come to, a row for each, with the colours of their lines."""
  summaries = [_summary(run) for run in runs]
  columns = list(dict.fromkeys(name for summary in summaries for name in summary))
  head = "".join(f'<th scope="col" class="number">{html.escape(column)}</th>' for column in columns)
  rows = []
  for i, (summary, name) in enumerate(zip(summaries, names, strict=True)):
    cells = "".join(f'<td class="number">{html.escape(summary.get(column, ("-", ""))[0])}</td>' for column in columns)
    swatch = f'<span class="swatch" style="color:{COLOURS[i % len(COLOURS)]}"></span>'
    rows.append(f'<tr><th scope="row">{swatch} {html.escape(name)}</th>{cells}</tr>')
  return _section("Runs", _table(f"<tr><td></td>{head}</tr>{''.join(rows)}"))


def differences_html(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
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


def facts_html(run: RunFiles, name: str, several: bool) -> str:
  """The command, what it ran on, and the keys that were set."""
  facts = run.facts
  rows: dict[str, str] = {}
  if command := run.command:
    rows["Command"] = f"<code>{html.escape(shlex.join([Path(command[0]).name, *command[1:]]))}</code>"
  named = run.value("model_name")
  if model := run.value("decoder_block") if named in (None, "default") else named:
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


def samples_html(title: str, samples: Sequence[SampleRecord], name: str, several: bool) -> str:
  """Generated texts, the last step first and the only one that is open."""
  if not samples:
    return ""
  steps: dict[int, list[SampleRecord]] = {}
  for sample in samples:
    steps.setdefault(sample.step, []).append(sample)
  blocks = []
  for i, step in enumerate(sorted(steps, reverse=True)):
    texts = "".join(
      f'<div class="sample"><pre dir="auto"><span class="prompt">{_escaped(sample.prompt)}</span>'
      f"{_escaped(sample.text)}</pre>{_note(sample)}</div>"
      for sample in steps[step]
    )
    blocks.append(_details(f"{title} {name} {step}", f"step {step:,}", texts, is_open=i == 0))
  return _section(f"{title} of {name}" if several else title, "".join(blocks))


def evaluations_html(records: Sequence[EvaluationRecord], name: str) -> str:
  """What `maxtext eval` found last for each step, task and metric, the latest step first. `name` is the run's where
  there are several."""
  found = {
    (record.step, record.task, metric): (value, record.stderr.get(metric), record.samples)
    for record in records
    for metric, value in record.metrics.items()
  }
  if not found:
    return ""
  rows = "".join(
    f'<tr><td class="number">{"-" if step is None else f"{step:,}"}</td><th scope="row">{_escaped(task)}</th>'
    f'<td>{_escaped(metric)}</td><td class="number">{_metric(value)}</td>'
    f'<td class="number">{"" if stderr is None else f"{stderr:.4f}"}</td><td class="number">{samples:,}</td></tr>'
    for (step, task, metric), (value, stderr, samples) in sorted(found.items(), key=lambda one: -(one[0][0] or 0))
  )
  numbers = "".join(f'<th scope="col" class="number">{column}</th>' for column in ("value", "stderr", "samples"))
  head = '<tr><th scope="col" class="number">step</th><th scope="col">task</th><th scope="col">metric</th>'
  return _section(f"Evaluations of {name}" if name else "Evaluations", _table(f"{head}{numbers}</tr>{rows}"))


def _metric(value: float) -> str:
  return f"{value:,}" if isinstance(value, int) else _loss(value)


def _note(sample: SampleRecord) -> str:
  return f'<div class="prompt">{_escaped(sample.note)}</div>' if sample.note else ""


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
  rates, times = run.settled(metric), run.settled("step_time_seconds")
  seconds = times.values
  if rates.steps != times.steps:
    known = dict(zip(times.steps, times.values, strict=True))
    seconds = [known.get(step, 1.0) for step in rates.steps]
  total = sum(seconds)
  return sum(map(mul, rates.values, seconds)) / total if total > 0 else None


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
