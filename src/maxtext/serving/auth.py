"""Authentication: API keys are checked before any part of a request's body is read.

Without API keys every client is accepted, and clients are identified by their address.
"""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from maxtext.serving.connections import client_network

OPEN_PATHS = ("/health",)
_INVALID_KEY = "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'."


class AuthenticationMiddleware:
  """ASGI middleware that requires an API key on every path except `OPEN_PATHS`.

  It sets `scope["state"]["client"]` to the index of the key, or to the client's network without keys.
  """

  def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
    self._app, self._keys = app, [key.encode() for key in keys]

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      return await self._app(scope, receive, send)
    address = client_network((scope.get("client") or ("",))[0])
    client = self._key(scope) if self._keys else address
    if client is None and scope["path"] not in OPEN_PATHS:
      return await error_response(401, _INVALID_KEY, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
    scope.setdefault("state", {})["client"] = client
    await self._app(scope, receive, send)

  def _key(self, scope: Scope) -> int | None:
    """The index of the key that was sent. All keys are compared, so the time does not depend on which one matches."""
    given = dict(scope["headers"]).get(b"authorization", b"")
    kind, _, key = given.partition(b" ")
    matches = [hmac.compare_digest(key, known) for known in self._keys]
    return matches.index(True) if kind.lower() == b"bearer" and any(matches) else None


def error_body(status: int, message: str) -> dict[str, Any]:
  """The JSON body of an error, in OpenAI's format."""
  kind = _ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
  return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": None, "code": status}}


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
  """An error response."""
  return Response(json.dumps(error_body(status, message)), status, headers, media_type="application/json")


_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_MESSAGE = 2000  # characters; a message may quote the request
