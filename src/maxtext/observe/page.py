"""The frame of every HTML page. A page is one file: its style, script and data are in it, and it loads nothing."""

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

COLOURS = tuple(f"var(--series-{i})" for i in range(8))
"""CSS colours that differ also for colour-blind readers; `page.css` has their values, in light and dark."""

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page(title: str, body: str, script: str = "", data: Any = None, *, live: bool = False) -> str:
  """A whole page, as text without lone surrogates.

  The page's policy allows this script alone and no request, so markup that were to slip into the body is inert.

  Args:
    title: plain text.
    body: HTML.
    script: runs at the end of the page.
    data: what the script finds as JSON in the element `data`.
    live: whether the script may ask the server that the page came from.
  """
  name = html.escape(title)
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  sources = [
    "default-src 'none'",
    "style-src 'unsafe-inline'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
  ]
  sources += [f"script-src 'sha256-{digest}'"] if script else []
  sources += ["connect-src 'self'"] if live else []
  scripts = f'<script type="application/json" id="data">{as_json(data)}</script><script>{script}</script>'
  text = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(sources)}">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
    '<link rel="icon" href="data:,">'
    f"<title>{name}</title><style>{_STYLE}</style></head>"
    f"<body><h1>{name}</h1>{body}{scripts if script else ''}</body></html>\n"
  )
  return text.encode("utf-8", "replace").decode()


def as_json(value: Any) -> str:
  """JSON that may stand inside a script element: no `<`, `>` or `&`, and no character beyond ASCII."""
  text = json.dumps(value, separators=(",", ":"), allow_nan=False)
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def figure(title: str, picture: str) -> str:
  """A framed picture with its title."""
  return f"<figure><h2>{html.escape(title)}</h2>{picture}</figure>"
