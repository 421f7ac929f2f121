"""A plan as one page to look at: where the memory goes, and where the time goes."""

import html
from collections.abc import Mapping

from maxtext.observe.page import COLOURS, figure, page
from maxtext.planner.plan import Plan
from maxtext.planner.text import as_text

_KINDS = ("compute", "kernel", "collective")


def as_html(plan: Plan) -> str:
  """The page."""
  body = figure("Memory of one device", _memory(plan))
  if plan.estimate:
    body += figure("Time of one step, by operation", _time(plan))
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
    style = f"width:{o.seconds / longest * 0.4:.2%};background:{COLOURS[_KINDS.index(o.kind)]}"
    name = html.escape(o.label if o.kind == "compute" else f"{o.label}: {o.name}")
    rows.append(
      f'<li><span class="bar" style="{style}"></span>'
      f"<span>{_seconds(o.seconds)} {name} <code>{html.escape(o.source)}</code></span></li>"
    )
  seconds = plan.estimate.seconds_by_kind() if plan.estimate else {}
  return f'<ol class="bars">{"".join(rows)}</ol>{_legend({kind: _seconds(seconds[kind]) for kind in _KINDS})}'


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
