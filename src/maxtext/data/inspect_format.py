"""Rows of data as text for a terminal or a file, and as a page. Text of the data is harmless in both."""

import base64
import html
from collections.abc import Iterator, Sequence
from itertools import groupby

from maxtext.configs.errors import plural
from maxtext.data.inspect import RowCounts, RowView, TokenRun
from maxtext.observe.page import page
from maxtext.observe.visible_text import visible

_STYLES = {  # of a role: an SGR code of terminals, and a colour of the page
  "user": ("36", 0), "prompt": ("36", 0), "assistant": ("32", 2), "completion": ("32", 2), "system": ("35", 3),
  "developer": ("35", 3), "tool": ("33", 1),
}  # fmt: skip
_TRAINED, _SPECIAL = "【】", "⟦⟧"  # around text, where there are no colours
_MARGIN = "│ "


def as_text(rows: Sequence[RowView], colours: bool) -> Iterator[str]:
  """The rows, in lines. Lines of the data have a margin, so that they cannot be taken for others."""
  yield _terminal_legend(rows, colours)
  for number, row in enumerate(rows, 1):
    yield ""
    yield f"row {number}: {_summary(row)}"
    for place, sequence in enumerate(row.sequences, 1):
      yield f"sequence {place}: {_describe(RowCounts.of([RowView((sequence,), 0)]))}"
      yield from (_MARGIN + line for line in (_coloured if colours else _bracketed)(sequence).split("\n"))


def describe_counts(counts: RowCounts) -> Iterator[str]:
  """The counts, in lines."""
  positions = counts.tokens - counts.sequences + counts.padding
  used, room = counts.slots
  images = f", images in {used:,} of {plural(room, 'slot')} ({used / room:.1%})" if room else ""
  yield (
    f"{plural(counts.rows, 'row')}, {plural(counts.sequences, 'sequence')}, {_describe(counts)}, padding in "
    f"{counts.padding:,} of {plural(positions, 'position')} ({counts.padding / max(positions, 1):.1%}){images}"
  )
  width = max(map(len, counts.roles), default=0)
  for role, (tokens, trained) in counts.roles.items():
    yield f"  {role:<{width}}  {plural(tokens, 'token')}, {_percent(trained, tokens)} train"


def as_html(rows: Sequence[RowView], title: str) -> str:
  """The rows as a page that loads nothing."""
  counts = RowCounts.of(rows)
  legend = "".join(f"<li>{_spans([run])}</li>" for run in _legend(counts))
  body = f"<pre>{html.escape(chr(10).join(describe_counts(counts)))}</pre>"
  body += f'<ul class="legend tokens">{legend}</ul>'
  for number, row in enumerate(rows, 1):
    body += f"<figure><h2>Row {number}: {_summary(row)}</h2>"
    for place, sequence in enumerate(row.sequences, 1):
      about = f"sequence {place}: {_describe(RowCounts.of([RowView((sequence,), 0)]))}"
      body += f'<p class="note">{about}</p><pre class="tokens">{_spans(sequence)}</pre>'
    body += "</figure>"
  return page(title, body)


def _describe(counts: RowCounts) -> str:
  return f"{plural(counts.tokens, 'token')}, of which {_percent(counts.trained, counts.tokens)} train"


def _percent(part: int, whole: int) -> str:
  return f"{part:,} ({part / max(whole, 1):.1%})"


def _summary(row: RowView) -> str:
  return f"{plural(len(row.sequences), 'sequence')}, padding in {plural(row.padding, 'position')}"


def _legend(counts: RowCounts) -> Iterator[TokenRun]:
  """An example of each kind of text, which says what it is."""
  yield from (TokenRun(role, 1, 0.0, role) for role in counts.roles)
  yield TokenRun("trains", 1, 1.0)
  yield TokenRun("context only", 1, 0.0)
  yield TokenRun("special token", 1, 0.0, special=True)


def _terminal_legend(rows: Sequence[RowView], colours: bool) -> str:
  if colours:
    return "  ".join(_coloured([run]) for run in _legend(RowCounts.of(rows)))
  return f"{_TRAINED[0]}text that trains{_TRAINED[1]}  {_SPECIAL[0]}special token{_SPECIAL[1]}"


def _coloured(sequence: Sequence[TokenRun]) -> str:
  """With SGR codes that end with each line: by role, dim where a token does not train, special tokens reversed."""
  parts = []
  for run, weight in _with_weights(sequence):
    codes = [_STYLES[run.role][0]] if run.role in _STYLES else []
    codes += ([] if run.weight else ["2"]) + (["7"] if run.special else [])
    lines = (weight + _visible(run)).split("\n")
    parts.append("\n".join(f"\x1b[{';'.join(codes)}m{line}\x1b[0m" if line and codes else line for line in lines))
  return "".join(parts)


def _bracketed(sequence: Sequence[TokenRun]) -> str:
  parts = []
  for trains, runs in groupby(_with_weights(sequence), lambda pair: pair[0].weight > 0):
    texts = (
      weight + (f"{_SPECIAL[0]}{_visible(run)}{_SPECIAL[1]}" if run.special else _visible(run, _TRAINED + _SPECIAL))
      for run, weight in runs
    )
    parts.append(f"{_TRAINED[0]}{''.join(texts)}{_TRAINED[1]}" if trains else "".join(texts))
  return "".join(parts)


def _spans(sequence: Sequence[TokenRun]) -> str:
  return "".join(_span(run, weight) for run, weight in _with_weights(sequence))


def _span(run: TokenRun, shown_weight: str) -> str:
  role = f"var(--series-{_STYLES[run.role][1]})" if run.role in _STYLES else "inherit"
  kinds = " ".join(name for name, so in (("trains", run.weight > 0), ("special", run.special)) if so)
  weight = f"<sub>{shown_weight}</sub>" if shown_weight else ""
  if run.image:
    return (
      f'<img src="data:image/png;base64,{base64.b64encode(run.image).decode()}" alt="{run.text}" title="{run.text}">'
    )
  about = html.escape(f"{run.role + ', ' if run.role else ''}{plural(run.tokens, 'token')}, weight {run.weight:g}")
  return f'<span class="{kinds}" style="color:{role}" title="{about}">{weight}{html.escape(_visible(run))}</span>'


def _with_weights(sequence: Sequence[TokenRun]) -> Iterator[tuple[TokenRun, str]]:
  """Runs, each with its weight where that is neither 0 nor 1 and the run before has another."""
  before = 0.0
  for run in sequence:
    yield run, "" if run.weight in (0.0, 1.0, before) else f"×{run.weight:g} "  # noqa: RUF001
    before = run.weight


def _visible(run: TokenRun, also: str = "") -> str:
  """The text of a run; that of a special token on one line."""
  text = visible(run.text, also)
  return text.replace("\n", "\\n") if run.special else text
