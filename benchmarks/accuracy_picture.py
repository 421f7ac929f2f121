"""A picture of planned against published step times, as SVG: a chip has a colour, a kind of run has a shape."""

import math
from collections.abc import Sequence

from maxtext.planner.calibration import PredictedRun

_COLOURS = {"v4": "#8c564b", "v5e": "#9467bd", "v5p": "#0072b2", "v6e": "#d55e00", "tpu7x": "#009e73"}
_SHAPES = {
  "dense": '<circle r="5"/>',
  "offloading": '<path d="M-5-5h10v10h-10z"/>',
  "experts": '<path d="M0-6l6 11h-12z"/>',
  "8-bit": '<path d="M0-7l6 7-6 7-6-7z"/>',
}
_SIDE, _LEFT, _BOTTOM, _WIDTH = 420, 60, 50, 640
_BAND = 0.12  # nine of ten runs are to be within


def picture(runs: Sequence[PredictedRun]) -> str:
  """Both axes logarithmic; the band is 12 % to both sides of the published time."""
  low, high = _range(runs)

  def at(seconds: float) -> float:
    return _SIDE * math.log(seconds / low) / math.log(high / low)

  def x(seconds: float) -> str:
    return f"{_LEFT + at(seconds):.1f}"

  def y(seconds: float) -> str:
    return f"{_SIDE + 20 - at(seconds):.1f}"

  corners = [(low, low), (low * (1 + _BAND), low), (high, high / (1 + _BAND)), (high, high), (high / (1 + _BAND), high)]
  corners += [(low, low * (1 + _BAND))]
  band = " ".join(f"{x(a)},{y(b)}" for a, b in corners)
  ticks = [t for exponent in range(-2, 4) for t in (10**exponent, 2 * 10**exponent, 5 * 10**exponent)]
  lines = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_SIDE + _BOTTOM + 30}" '
    'font-family="sans-serif" font-size="13">',
    "<title>Planned against published step times</title>",
    f'<rect width="{_WIDTH}" height="{_SIDE + _BOTTOM + 30}" fill="#fff"/>',
    f'<polygon points="{band}" fill="#e8e8e8"/>',
    f'<path d="M{x(low)} {y(low)}L{x(high)} {y(high)}" stroke="#777"/>',
    f'<rect x="{_LEFT}" y="20" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#333"/>',
  ]
  for tick in (t for t in ticks if low <= t <= high):
    lines.append(f'<text x="{x(tick)}" y="{_SIDE + 38}" text-anchor="middle">{tick:g}</text>')
    lines.append(f'<text x="{_LEFT - 6}" y="{y(tick)}" dy="4" text-anchor="end">{tick:g}</text>')
  lines.append(f'<text x="{_LEFT + _SIDE / 2}" y="{_SIDE + 62}" text-anchor="middle">published seconds a step</text>')
  lines.append(
    f'<text transform="translate(16 {20 + _SIDE / 2})rotate(-90)" text-anchor="middle">planned seconds a step</text>'
  )
  for run in runs:
    place = f"translate({x(run.seconds)} {y(run.seconds * (1 + run.error))})"
    title = f"<title>{run.id}: {run.error:+.1%}</title>"
    lines.append(f'<g transform="{place}" fill="{_COLOURS[run.chip]}" fill-opacity=".8">{title}{_SHAPES[run.kind]}</g>')
  legend = [(f'<circle r="5" fill="{_COLOURS[chip]}"/>', chip) for chip in _COLOURS if chip in {r.chip for r in runs}]
  legend += [(_SHAPES[kind], kind) for kind in _SHAPES if kind in {r.kind for r in runs}]
  for i, (mark, text) in enumerate(legend):
    lines.append(f'<g transform="translate({_LEFT + _SIDE + 24} {40 + 24 * i})" fill="#555">{mark}')
    lines.append(f'<text x="14" y="4" fill="#222">{text}</text></g>')
  return "\n".join([*lines, "</svg>", ""])


def _range(runs: Sequence[PredictedRun]) -> tuple[float, float]:
  times = [t for run in runs for t in (run.seconds, run.seconds * (1 + run.error))]
  return (min(times) / 1.3, max(times) * 1.3) if times else (1.0, 10.0)
