"""Where the time of a run went, as HTML: a bar and a table."""

import html

from maxtext.logs import readable_duration
from maxtext.observe.goodput_journal import GoodputSummary, Kind

_NAMES: dict[Kind, str] = {
  "step": "steps that count (goodput)",
  "lost_steps": "steps that were repeated after a restart",
  "between_starts": "between starts",
  "start_up": "start-up: devices, other processes, model, data",
  "restore": "first state, or restoring it",
  "compile": "compiling the step",
  "data_wait": "waiting for data, with idle devices",
  "evaluation": "evaluation",
  "checkpoint_save": "saving, while devices wait",
  "other": "samples, profiles and other callbacks",
}


def goodput_html(found: GoodputSummary | None, name: str) -> str:
  """A section of a report; empty without a journal. `name` is the run's where there are several."""
  if found is None or found.total <= 0:
    return ""
  kinds = {kind: found.seconds[kind] for kind in _NAMES if found.seconds[kind] > 0}
  bar = "".join(
    f'<i style="flex:{spent / found.total:.6f};{_colour(kind)}" title="{_NAMES[kind]}"></i>'
    for kind, spent in kinds.items()
  )
  rows = "".join(
    f'<tr><th scope="row"><span class="swatch" style="{_colour(kind)}"></span> {_NAMES[kind]}</th>'
    f'<td class="number">{spent / found.total:.1%}</td>'
    f'<td class="number">{readable_duration(spent)}</td></tr>'
    for kind, spent in kinds.items()
  )
  starts = f"{found.starts} start" + ("s" if found.starts > 1 else "")
  title = f"Goodput {found.goodput:.1%} of {readable_duration(found.total)}, {starts}"
  title = f"{title}: {name}" if name else title
  return (
    f'<section><h2>{html.escape(title)}</h2><div class="bar" role="img" aria-label="{html.escape(title)}">{bar}</div>'
    f"<table>{rows}</table></section>"
  )


def _colour(kind: Kind) -> str:
  place = list(_NAMES).index(kind)
  return f"color:var(--series-{place % 8});opacity:{1 if place < 8 else 0.5}"
