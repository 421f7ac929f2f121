"""A plan as one page to look at: where the memory goes, and where the time goes."""

import html
from collections.abc import Mapping, Sequence
from itertools import groupby, product
from typing import get_args

from maxtext.observe.page import COLOURS, figure, page
from maxtext.planner.estimate import Loop, Operation
from maxtext.planner.plan import Plan
from maxtext.planner.schedule import Kind
from maxtext.planner.text import as_text

_KINDS = get_args(Kind)


def as_html(plan: Plan) -> str:
  """The page."""
  body = figure("Memory of one device", _memory(plan))
  if plan.estimate:
    body += figure("Time of one step, by operation", _time(plan))
    if loops := plan.estimate.layer_loops():
      body += figure("Operations of one layer, in the order of the schedule", "".join(map(_timeline, loops)))
  if plan.torus:
    body += figure("The mesh on the chips of a slice", _mesh(plan))
  if advice := plan.advice():
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in advice)
    body += figure("Advice", f"<ul>{items}</ul>")
  return page(f"{plan.model} on {plan.topology}", f"{body}<pre>{html.escape(as_text(plan))}</pre>")


def _memory(plan: Plan) -> str:
  m = plan.memory
  parts = {"parameters": m.parameters, "optimizer": m.optimizer, "batch": m.batch, "temporaries": m.temporaries}
  whole = max(sum(parts.values()), m.there) * 1.02
  texts = {name: f"{size / 2**30:.2f} GiB" for name, size in parts.items()}
  bars = "".join(
    f'<span style="width:{size / whole:.3%};background:{colour}" title="{name}: {texts[name]}"></span>'
    for (name, size), colour in zip(parts.items(), COLOURS, strict=False)
  )
  end = f'<span class="end" style="left:{m.there / whole:.3%}"><span>{m.there / 2**30:.1f} GiB there</span></span>'
  return f'<div class="stack">{bars}{end}</div>{_legend(texts)}'


def _time(plan: Plan) -> str:
  operations = plan.most_expensive(20)
  longest = max(o.seconds for o in operations)
  rows = []
  for o in operations:
    style = f"width:{o.seconds / longest * 0.3:.2%};background:{COLOURS[_KINDS.index(o.kind)]}"
    name = html.escape(o.label if o.kind == "compute" else f"{o.label}: {o.name}")
    rows.append(
      f'<li><span class="bar" style="{style}"></span>'
      f"<span>{_seconds(o.seconds)} {name} <code>{html.escape(o.source)}</code></span></li>"
    )
  seconds = plan.estimate.seconds_by_kind() if plan.estimate else {}
  return f'<ol class="bars">{"".join(rows)}</ol>{_legend({kind: _seconds(seconds[kind]) for kind in _KINDS})}'


def _timeline(loop: Loop) -> str:
  """The body of a loop as a bar; operations that follow each other under one label are one part of it."""
  parts = [(key, sum(o.seconds for o in same)) for key, same in groupby(loop.operations, _appearance)]
  bars = "".join(
    f'<span style="width:{seconds / loop.seconds:.3%};background:{COLOURS[_KINDS.index(kind)]}" '
    f'class="{"again" if again else ""}" title="{html.escape(label)}: {_seconds(seconds / loop.times)}">'
    f"{html.escape(label) if seconds > loop.seconds / 20 else ''}</span>"
    for (kind, label, again), seconds in parts
    if seconds
  )
  backward = any(label.endswith("backward") for (_, label, _), _ in parts)
  name = "backward, with what is computed again in a paler colour" if backward else "forward"
  text = f"{name}: {_seconds(loop.seconds / loop.times)}, {loop.times:,} times a step"
  return f'<div class="stack timeline">{bars}</div><p class="note">{text}</p>'


def _appearance(o: Operation) -> tuple[Kind, str, bool]:
  return o.kind, o.label, o.recomputed


_DRAWN = (16, 16, 4)  # most chips of a side that are drawn, by the sides of the torus
_DIRECTIONS = ((40.0, 0.0), (0.0, -40.0), (17.0, -13.0))  # of the sides, in pixels


def _mesh(plan: Plan) -> str:
  """The torus as points and links, the links of a side in the colour of the mesh axes that run along it."""
  axes = list(dict.fromkeys(side.axes for side in plan.torus))
  most = _DRAWN[len(plan.torus) - 1]
  sizes = [min(side.size, most) for side in plan.torus]
  directions = _DIRECTIONS[: len(sizes)]
  left, top = (sum(min(d[i], 0) * (n - 1) for n, d in zip(sizes, directions, strict=True)) for i in (0, 1))
  width, height = (sum(abs(d[i]) * (n - 1) for n, d in zip(sizes, directions, strict=True)) + 20 for i in (0, 1))

  def place(chip: Sequence[int]) -> tuple[float, float]:
    x, y = (sum(n * d[i] for n, d in zip(chip, directions, strict=True)) for i in (0, 1))
    return x - left + 10, y - top + 10

  links, points = [], []
  for chip in product(*map(range, sizes)):
    x, y = place(chip)
    points.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="var(--text)"/>')
    for side, (size, own) in enumerate(zip(sizes, plan.torus, strict=True)):
      if chip[side] + 1 < size:
        to_x, to_y = place([n + (i == side) for i, n in enumerate(chip)])
        colour = COLOURS[axes.index(own.axes)]
        links.append(f'<path d="M{x:.0f} {y:.0f}L{to_x:.0f} {to_y:.0f}" stroke="{colour}" stroke-width="2"/>')
  box = f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px"'
  drawn = f'<svg role="img" aria-label="chips and their links" {box}>{"".join(links + points)}</svg>'
  sides: dict[str, str] = {}
  for names in axes:
    same = [f"{side.size} chips{' in a ring' if side.ring else ''}" for side in plan.torus if side.axes == names]
    sides[", ".join(f"{a}={plan.axes[a]}" for a in names) or "no axis"] = "along " + " and ".join(same)
  elsewhere = [f"{a}={n}" for a, n in plan.axes.items() if not any(a in side.axes for side in plan.torus)]
  notes = [f"{', '.join(elsewhere)} between slices, or within chips"] if elsewhere else []
  notes += [f"longer sides are drawn with {most} chips"] if any(side.size > most for side in plan.torus) else []
  return f'{drawn}{_legend(sides)}<p class="note">{"; ".join(notes)}</p>'


def _legend(entries: Mapping[str, str]) -> str:
  cells = (
    f'<li><span style="color:{colour}">&#9632;</span> {html.escape(name)} {text}</li>'
    for (name, text), colour in zip(entries.items(), COLOURS, strict=False)
  )
  return f'<ul class="keys">{"".join(cells)}</ul>'


def _seconds(seconds: float) -> str:
  """Three digits, in the unit that fits."""
  unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if seconds * s >= 0.1), ("\u00b5s", 1e6))
  return f"{seconds * scale:.3g} {unit}"
