"""Serves the live report of some runs, to this machine alone."""

import hashlib
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from maxtext.configs import ConfigError
from maxtext.observe.report import Report

_ADDRESS = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost", "::1")
_TIMEOUT = 30  # seconds for a request to arrive


class ReportServer:
  """Serves a page at `/` and its data at `/data.json`, on the loopback address.

  A request must name this machine in its Host header: a page of another site, whose name was made to lead here, has
  that site's. The port may be another one, since an SSH tunnel may lead here too.

  Args:
    folders: of the runs.
    port: 0 takes a free one.

  Raises:
    ConfigError: a folder is not that of a run, or the port is in use.
  """

  def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
    self._live = _LiveReport(folders)
    try:
      self._server = _Server((_ADDRESS, port), self._live)
    except (OSError, OverflowError) as error:
      reason = error.strerror if isinstance(error, OSError) else "it is not between 0 and 65535"
      raise ConfigError(f"--port {port} cannot be used: {reason}.") from None

  @property
  def url(self) -> str:
    """Where the page is."""
    return f"http://{_ADDRESS}:{self._server.server_address[1]}/"

  def serve(self) -> None:
    """Answers requests until `close`, or an interrupt."""
    try:
      self._server.serve_forever(poll_interval=0.2)
    finally:
      self._server.server_close()

  def close(self) -> None:
    """Ends `serve`, which runs in another thread."""
    self._server.shutdown()


class _LiveReport:
  """A report that is read again for a request, if its files have changed. Reading takes a fifth of the time at most."""

  def __init__(self, folders: Sequence[Path]) -> None:
    self._report, self._lock = Report(folders), threading.Lock()
    self._data: tuple[bytes, str] | None = None
    self._rest_until = 0.0

  def page(self) -> bytes:
    """HTML."""
    with self._lock:
      return self._report.page(live=True).encode()

  def data(self) -> tuple[bytes, str]:
    """JSON, and its tag."""
    with self._lock:
      begin = time.monotonic()
      if self._data is None or begin >= self._rest_until:
        changed = self._report.update()
        if changed or self._data is None:
          data = self._report.data()
          self._data = data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        end = time.monotonic()
        self._rest_until = end + 4 * (end - begin)
      return self._data


class _Server(ThreadingHTTPServer):
  daemon_threads = True
  block_on_close = False

  def __init__(self, address: tuple[str, int], live: _LiveReport) -> None:
    self.live = live
    super().__init__(address, _Handler)

  def handle_error(self, request: Any, client_address: Any) -> None:
    """A browser that went away in the middle of an answer is no event."""


class _Handler(BaseHTTPRequestHandler):
  server: _Server
  timeout = _TIMEOUT
  protocol_version = "HTTP/1.1"
  server_version, sys_version = "maxtext", ""

  def do_HEAD(self) -> None:
    self.do_GET()

  def do_GET(self) -> None:
    if not _is_local(self.headers.get_all("Host") or []):
      self._answer(HTTPStatus.FORBIDDEN, b"This server answers to localhost alone.\n")
    elif self.path == "/":
      self._answer(HTTPStatus.OK, self.server.live.page(), "text/html; charset=utf-8")
    elif self.path == "/data.json":
      data, tag = self.server.live.data()
      unchanged = self.headers.get("If-None-Match") == tag
      status = HTTPStatus.NOT_MODIFIED if unchanged else HTTPStatus.OK
      self._answer(status, b"" if unchanged else data, "application/json", tag)
    else:
      self._answer(HTTPStatus.NOT_FOUND, b"There is no such page here.\n")

  def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", tag: str = "") -> None:
    self.send_response(status)
    headers = {
      "Content-Type": kind,
      "Content-Length": str(len(body)),
      "Cache-Control": "no-store",
      "X-Content-Type-Options": "nosniff",
      "X-Frame-Options": "DENY",
      "Cross-Origin-Resource-Policy": "same-origin",
      "Referrer-Policy": "no-referrer",
    }
    for name, value in (headers | ({"ETag": tag} if tag else {})).items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  def log_message(self, format: str, *args: Any) -> None:
    """Requests are not logged: a live page makes one every two seconds."""


def _is_local(hosts: Sequence[str]) -> bool:
  """Whether the one Host header names this machine."""
  try:
    return len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in _NAMES and "@" not in hosts[0]
  except ValueError:
    return False
