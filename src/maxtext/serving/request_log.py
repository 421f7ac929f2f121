"""The id of every request, `X-Request-Id`, and the access log: one line for each response."""

import logging
import re
import secrets
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxtext.logs import ON_STDERR

_LOG = logging.getLogger(__name__)
_HEADER = b"x-request-id"
_VALID = re.compile(rb"[\x21-\x7e]{1,128}")
_MAX_PATH = 200  # characters of a line


class RequestLogMiddleware:
  """ASGI middleware that gives every response the id that the client sent, or a new one.

  Args:
    app: the application.
    access_log: whether each response is logged when it has ended.
  """

  def __init__(self, app: ASGIApp, access_log: bool) -> None:
    self._app, self._access_log = app, access_log

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      return await self._app(scope, receive, send)
    given, start = dict(scope["headers"]).get(_HEADER, b""), time.perf_counter()
    request_id = given if _VALID.fullmatch(given) else secrets.token_hex(16).encode()
    status, sent = 0, 0

    async def send_with_id(message: Message) -> None:
      nonlocal status, sent
      if message["type"] == "http.response.start":
        status = message["status"]
        message = {**message, "headers": [*message.get("headers", ()), (_HEADER, request_id)]}
      sent += len(message.get("body", b""))
      await send(message)

    try:
      await self._app(scope, receive, send_with_id)
    finally:
      if self._access_log:
        # Queries are left out: they may have secrets. A response that has not begun has no status.
        path, seconds = quote(scope["path"])[:_MAX_PATH], time.perf_counter() - start
        address = (scope.get("client") or ("-",))[0]
        line = f"{address} {scope['method']} {path} {status or '-'} {sent} B {seconds:.3f} s {request_id.decode()}"
        _LOG.info(line, extra=ON_STDERR)
