"""Authentication: API keys are checked before any part of a request's body is read.

Without API keys every client is accepted, and clients are identified by their address.
"""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from maxtext.serving.connections import client_network
from maxtext.serving.errors import error_response

_INVALID_KEY = "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'."


class AuthenticationMiddleware:
  """ASGI middleware that requires an API key on every path except the open ones.

  It sets `scope["state"]["client"]` to the index of the key, or to the client's network without keys.
  """

  def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: tuple[str, ...]) -> None:
    self._app, self._keys, self._open_paths = app, [key.encode() for key in keys], open_paths

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      return await self._app(scope, receive, send)
    address = client_network((scope.get("client") or ("",))[0])
    client = self._key(scope) if self._keys else address
    if client is None and scope["path"] not in self._open_paths:
      return await error_response(401, _INVALID_KEY, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
    scope.setdefault("state", {})["client"] = client
    await self._app(scope, receive, send)

  def _key(self, scope: Scope) -> int | None:
    """The index of the key that was sent. All keys are compared, so the time does not depend on which one matches."""
    given = dict(scope["headers"]).get(b"authorization", b"")
    kind, _, key = given.partition(b" ")
    matches = [hmac.compare_digest(key, known) for known in self._keys]
    return matches.index(True) if kind.lower() == b"bearer" and any(matches) else None
