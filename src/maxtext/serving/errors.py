"""Errors that clients are told, in OpenAI's format."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_MESSAGE = 2000  # characters; a message may quote the request


def error_body(status: int, message: str) -> dict[str, Any]:
  """The JSON body of an error, in OpenAI's format."""
  kind = _ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
  return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": None, "code": status}}


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
  """An error response."""
  return Response(json.dumps(error_body(status, message)), status, headers, media_type="application/json")
