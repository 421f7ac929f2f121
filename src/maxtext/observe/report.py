"""The HTML report: charts of the metrics of one or more runs."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxtext.configs import ConfigError
from maxtext.observe.metric_lines import parse_line
from maxtext.observe.page import COLOURS, figure, page

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 560, 260, 64, 20, 34, 14


@dataclass(frozen=True)
class Run:
  """The metrics of one run; of several lines for a step, the last."""

  name: str
  steps: list[int]
  metrics: list[dict[str, float | None]]

  def points(self, metric: str) -> list[tuple[float, float]]:
    """(step, value) of a metric, where it is a finite number."""
    pairs = ((float(step), row.get(metric)) for step, row in zip(self.steps, self.metrics, strict=True))
    return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


def write_report(folders: Sequence[Path], target: Path) -> Path:
  """Writes the report of the runs in those folders; returns its path."""
  runs = [_read(folder) for folder in folders]
  settled = [Run(run.name, run.steps[1:], run.metrics[1:]) for run in runs]  # the first step compiles
  charts = [
    ("Loss", _lines([(r.name, r.points("loss")) for r in runs])),
    ("Loss of evaluation", _lines([(r.name, r.points("eval_loss")) for r in runs])),
    ("Learning rate", _lines([(r.name, r.points("learning_rate")) for r in runs])),
    ("Tokens per second", _lines([(r.name, r.points("tokens_per_second")) for r in settled])),
    ("Gradient norm", _lines([(r.name, r.points("grad_norm")) for r in runs])),
    (
      "Spread of step times, seconds",
      _histogram([(r.name, [s for _, s in r.points("step_time_seconds")]) for r in settled]),
    ),
    ("Waiting for input, seconds a step", _lines([(r.name, r.points("data_wait_seconds")) for r in settled])),
  ]
  figures = "".join(figure(title, picture) for title, picture in charts if picture)
  body = f'{_summary(runs)}<div class="grid">{figures}</div>'
  target.write_text(page(", ".join(run.name for run in runs), body), encoding="utf-8")
  return target


def _read(folder: Path) -> Run:
  path = folder / "metrics.jsonl"
  try:
    lines = path.read_text(errors="replace").splitlines()
  except OSError as error:
    raise ConfigError(f"{folder} is not a run's folder: {path.name} cannot be read ({error.strerror}).") from None
  last = {int(row["step"] or 0): row for line in lines if (row := parse_line(line)) is not None}
  steps = sorted(last)
  return Run(folder.resolve().name, steps, [last[step] for step in steps])


def _summary(runs: Sequence[Run]) -> str:
  head = "<tr><th></th><th>run</th><th>steps</th><th>first loss</th><th>last loss</th><th>median step</th></tr>"
  rows = []
  for run, colour in zip(runs, _cycle(len(runs)), strict=True):
    losses = [loss for _, loss in run.points("loss")]
    times = sorted(seconds for _, seconds in run.points("step_time_seconds")[1:])
    cells = [
      f'<span style="color:{colour}">&#9632;</span>',
      html.escape(run.name),
      str(len(run.steps)),
      f"{losses[0]:.4f}" if losses else "-",
      f"{losses[-1]:.4f}" if losses else "-",
      f"{times[len(times) // 2]:.3f} s" if times else "-",
    ]
    rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
  return f"<table>{head}{''.join(rows)}</table>"


def _lines(series: Sequence[tuple[str, list[tuple[float, float]]]]) -> str:
  everything = [point for _, points in series for point in points]
  if not everything:
    return ""
  x_range, y_range = _range([x for x, _ in everything]), _range([y for _, y in everything])
  body = []
  for (name, points), colour in zip(series, _cycle(len(series)), strict=True):
    path = " ".join(f"{_x(x, x_range):.1f},{_y(y, y_range):.1f}" for x, y in points)
    label = f"<title>{html.escape(name)}</title>"
    body.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}">{label}</polyline>')
  return _frame(x_range, y_range, "step", "".join(body))


def _histogram(series: Sequence[tuple[str, list[float]]], bins: int = 30) -> str:
  everything = [value for _, values in series for value in values]
  if not everything:
    return ""
  x_range = _range(everything)
  width = (x_range[1] - x_range[0]) / bins
  counts = [[0] * bins for _ in series]
  for row, (_, values) in zip(counts, series, strict=True):
    for value in values:
      row[min(int((value - x_range[0]) / width), bins - 1)] += 1
  y_range = (0.0, float(max(max(row) for row in counts)))
  body = []
  for row, colour in zip(counts, _cycle(len(series)), strict=True):
    for i, count in enumerate(row):
      left, right = (_x(x_range[0] + width * j, x_range) for j in (i, i + 1))
      top, foot = _y(count, y_range), _y(0, y_range)
      body.append(
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" height="{foot - top:.1f}" '
        f'fill="{colour}" fill-opacity="0.6"/>'
      )
  return _frame(x_range, y_range, "seconds", "".join(body))


def _frame(x_range: tuple[float, float], y_range: tuple[float, float], x_name: str, body: str) -> str:
  marks = []
  for value in _round_numbers(y_range):
    y = _y(value, y_range)
    marks.append(f'<line class="grid-line" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    marks.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
  for value in _round_numbers(x_range):
    x = _x(value, x_range)
    marks.append(f'<text x="{x:.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{_number(value)}</text>')
  marks.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 2}" text-anchor="middle">{x_name}</text>')
  return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(marks)}{body}</svg>'


def _round_numbers(span: tuple[float, float], about: int = 5) -> list[float]:
  """A few round numbers within a range, evenly spaced."""
  rough = (span[1] - span[0]) / about
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
  return [step * i for i in range(math.ceil(span[0] / step), math.floor(span[1] / step) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
  low, high = min(values), max(values)
  return (low, high) if high > low else (low - 0.5 * abs(low) - 0.5, high + 0.5 * abs(high) + 0.5)


def _x(value: float, span: tuple[float, float]) -> float:
  return _LEFT + (value - span[0]) / (span[1] - span[0]) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, span: tuple[float, float]) -> float:
  return _HEIGHT - _BOTTOM - (value - span[0]) / (span[1] - span[0]) * (_HEIGHT - _BOTTOM - _TOP)


def _number(value: float) -> str:
  return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cycle(count: int) -> list[str]:
  return [COLOURS[i % len(COLOURS)] for i in range(count)]
