"""A plan as one page to look at: where the memory goes, and where the time goes."""

import html
from collections.abc import Mapping

from maxtext.observe.page import COLOURS, figure, page
from maxtext.plan.plan import Plan
from maxtext.plan.text import as_text

_WIDTH, _ROW = 1000, 26


def as_html(plan: Plan) -> str:
  """The page."""
  body = figure("Memory of one device", _memory(plan))
  if plan.estimate:
    body += figure("Time of one step, by operation", _time(plan))
  return page(f"{plan.model} on {plan.topology}", f"{body}<pre>{html.escape(as_text(plan))}</pre>")


def _memory(plan: Plan) -> str:
  m = plan.memory
  parts = {"parameters": m.parameters, "optimizer": m.optimizer, "batch": m.batch, "temporaries": m.temporaries}
  scale = _WIDTH / (max(sum(parts.values()), m.there) * 1.02)
  marks, x = [], 0.0
  for (name, size), colour in zip(parts.items(), COLOURS, strict=False):
    marks.append(_bar(x, 20, size * scale, colour, f"{name}: {size / 2**30:.2f} GiB"))
    x += size * scale
  limit = m.there * scale
  marks.append(f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="10" y2="56" class="limit"/>')
  marks.append(f'<text x="{limit:.1f}" y="70" text-anchor="end">{m.there / 2**30:.1f} GiB there</text>')
  return _svg(80, "".join(marks)) + _legend({name: f"{size / 2**30:.2f} GiB" for name, size in parts.items()})


def _time(plan: Plan) -> str:
  operations = plan.most_expensive(20)
  kinds = ("compute", "kernel", "collective")
  longest = max(o.seconds for o in operations)
  marks = []
  for i, o in enumerate(operations):
    y, colour = i * _ROW, COLOURS[kinds.index(o.kind)]
    label = html.escape(f"{o.seconds:.3f} s  {o.name}{' (again)' if o.recomputed else ''}  {o.source}")
    marks.append(_bar(0, y, o.seconds / longest * _WIDTH * 0.4, colour, label))
    marks.append(f'<text x="{o.seconds / longest * _WIDTH * 0.4 + 8:.1f}" y="{y + 16}">{label}</text>')
  seconds = plan.estimate.seconds_by_kind() if plan.estimate else {}
  return _svg(len(operations) * _ROW, "".join(marks)) + _legend({k: f"{seconds[k]:.2f} s" for k in kinds})


def _bar(x: float, y: float, width: float, colour: str, label: str) -> str:
  return (
    f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{_ROW - 4}" style="fill:{colour}">'
    f"<title>{label}</title></rect>"
  )


def _legend(entries: Mapping[str, str]) -> str:
  cells = (
    f'<td><span style="color:{colour}">&#9632;</span> {html.escape(name)} {text}</td>'
    for (name, text), colour in zip(entries.items(), COLOURS, strict=False)
  )
  return f"<table><tr>{''.join(cells)}</tr></table>"


def _svg(height: int, body: str) -> str:
  return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{body}</svg>'
