"""Who asks the server: the check of API keys, before anything of a request's body is read.

Without keys everyone may ask, and clients are told apart by their address.
"""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from maxtext.serving.connections import network

OPEN_PATHS = ("/health",)
_REFUSED = "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'."


class Access:
  """Asks for a key in front of every path but `OPEN_PATHS`, before a body is read.

  `scope["state"]["client"]` then says who asks: the place of the key, or the address.
  """

  def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
    self._app, self._keys = app, [key.encode() for key in keys]

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      return await self._app(scope, receive, send)
    address = network((scope.get("client") or ("",))[0])
    client = self._key(scope) if self._keys else address
    if client is None and scope["path"] not in OPEN_PATHS:
      return await refusal(401, _REFUSED, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
    scope.setdefault("state", {})["client"] = client
    await self._app(scope, receive, send)

  def _key(self, scope: Scope) -> int | None:
    """The place of the key that was sent; all are compared, whichever it is."""
    given = dict(scope["headers"]).get(b"authorization", b"")
    kind, _, key = given.partition(b" ")
    matches = [hmac.compare_digest(key, known) for known in self._keys]
    return matches.index(True) if kind.lower() == b"bearer" and any(matches) else None


def error_body(status: int, message: str) -> dict[str, Any]:
  """What a refusal says."""
  kind = _ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
  return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": None, "code": status}}


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
  """The same as an answer."""
  return Response(json.dumps(error_body(status, message)), status, headers, media_type="application/json")


_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_MESSAGE = 2000  # characters; a message may quote what was sent
