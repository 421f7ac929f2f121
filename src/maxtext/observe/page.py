"""The frame of every HTML page: plain HTML with SVG, no script, no network."""

import html

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 0 0 .3rem; font-weight: 600; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); gap: 1.5rem; }
figure { margin: 0; border: 1px solid #e5e7eb; border-radius: 8px; padding: 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem 1rem .2rem 0; text-align: left; }
th { color: #6b7280; font-weight: 500; } svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #6b7280; } .grid-line { stroke: #e5e7eb; }
"""


def page(title: str, body: str) -> str:
  """A whole page; the body is HTML already."""
  name = html.escape(title)
  return (
    f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    f"<h1>{name}</h1>{body}</html>\n"
  )


def figure(title: str, picture: str) -> str:
  """A framed picture with its title."""
  return f"<figure><h2>{html.escape(title)}</h2>{picture}</figure>"
