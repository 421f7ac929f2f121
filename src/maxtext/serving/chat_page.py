"""The page at `/` of a server: a chat in the browser. It asks the server that it came from, and loads nothing else."""

from pathlib import Path

from starlette.responses import HTMLResponse, Response

from maxtext.observe.page import page

_HERE = Path(__file__).parent


def chat_page_response(needs_key: bool) -> Response:
  """The page; it asks for the API key where the server needs one."""
  body, script = (_HERE.joinpath(name).read_text(encoding="utf-8") for name in ("chat_page.html", "chat_page.js"))
  text = page("maxtext chat", body, script, {"needsKey": needs_key}, live=True)
  return HTMLResponse(text, headers={"X-Frame-Options": "DENY", "Cache-Control": "no-cache"})
