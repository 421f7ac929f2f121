"""Draws the metrics of `PLOTS`, a line for each run: python examples/walk/curves.py curves.svg runs/base runs/alone."""

import html
import json
import sys
from pathlib import Path

PLOTS = {
  "eval_loss": "held-out loss",
  "eval_pass_rate": "held-out pass rate",
  "reward": "reward",
  "answer_tokens": "tokens of an answer",
  "turns": "answers of a conversation",
  "entropy": "entropy",
  "mismatch_max": "mismatch, largest",
  "off_policy": "distance of the policies",
}
COLOURS = ("#2a78c0", "#d2691e", "#3a9a5b", "#8a5bb5")
WIDTH, HEIGHT, COLUMNS, LEFT, TOP = 250, 150, 3, 46, 34  # of a plot, and the space before its lines


def main(target: Path, runs: list[Path]) -> None:
  """Draws every metric that a run has, a line for each run."""
  distinct = len({run.name for run in runs}) == len(runs)
  rows = {
    run.name if distinct else str(run): [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for run in runs
  }
  shown = [metric for metric in PLOTS if any(metric in row for lines in rows.values() for row in lines)]
  if not shown:
    sys.exit(f"none of these runs has one of {', '.join(PLOTS)}")
  columns = min(len(shown), COLUMNS)
  height = HEIGHT * -(-len(shown) // columns) + 24
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * columns} {height}" font-family="sans-serif" '
    f'font-size="11" fill="#777">'
  ]
  for i, name in enumerate(rows):
    x = LEFT + (WIDTH * columns - LEFT) * i // len(rows)
    parts.append(f'<text x="{x}" y="14" fill="{COLOURS[i % len(COLOURS)]}">{html.escape(name)}</text>')
  for i, metric in enumerate(shown):
    series = [thinned([(row["step"], row[metric]) for row in lines if metric in row]) for lines in rows.values()]
    place = f"translate({WIDTH * (i % columns)} {24 + HEIGHT * (i // columns)})"
    parts.append(f'<g transform="{place}">{plot(PLOTS[metric], series)}</g>')
  target.write_text("\n".join([*parts, "</svg>\n"]))


def thinned(line: list[tuple[int, float]]) -> list[tuple[int, float]]:
  """The line as means of at most a hundred parts."""
  size = -(-len(line) // 100)
  parts = [line[i : i + size] for i in range(0, len(line), size or 1)]
  return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def plot(title: str, series: list[list[tuple[int, float]]]) -> str:
  """One plot: its title, its least and greatest value and its last step, and the lines."""
  values = [value for line in series for _, value in line]
  last = max(step for line in series for step, _ in line)
  low, high = min(values), max(values)
  low, high = (low, high) if high > low else (low, low + 1.0)
  right, bottom = WIDTH - 14, HEIGHT - 24

  def point(step: int, value: float) -> str:
    return f"{LEFT + (right - LEFT) * step / last:.1f},{bottom - (bottom - TOP) * (value - low) / (high - low):.1f}"

  parts = [
    f'<text x="{LEFT}" y="{TOP - 12}" font-weight="bold">{html.escape(title)}</text>',
    f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#aaa"/>',
    f'<text x="{LEFT - 5}" y="{TOP + 4}" text-anchor="end">{high:.2g}</text>',
    f'<text x="{LEFT - 5}" y="{bottom}" text-anchor="end">{low:.2g}</text>',
    f'<text x="{right}" y="{bottom + 14}" text-anchor="end">step {last}</text>',
  ]
  for i, line in enumerate(series):
    points = " ".join(point(*pair) for pair in line)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="1.6"/>')
  return "".join(parts)


if __name__ == "__main__":
  main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
