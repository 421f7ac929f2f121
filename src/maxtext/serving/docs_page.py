"""The page at `/docs` of a server: its routes, and the fields of bodies, from its OpenAPI description. No script."""

import html
import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import HTMLResponse, Response

from maxtext.observe.page import page

_PREFIX = "#/components/schemas/"
_HEAD = "<tr>" + "".join(f'<th scope="col">{name}</th>' for name in ("field", "type", "default")) + "</tr>"
_BOUNDS = {
  "minimum": "at least",
  "maximum": "at most",
  "exclusiveMinimum": "more than",
  "exclusiveMaximum": "less than",
}


def docs_page_response(openapi: Mapping[str, Any]) -> Response:
  """The page of a description."""
  routes = (
    f"<li><code>{method.upper()} {html.escape(path)}</code> {_body(operation)}</li>"
    for path, operations in openapi["paths"].items()
    for method, operation in operations.items()
  )
  schemas = openapi["components"]["schemas"]
  tables = (_table(name, schema) for name, schema in schemas.items() if "properties" in schema)
  text = f"<section><h2>Routes</h2><ul>{''.join(routes)}</ul></section>{''.join(tables)}"
  return HTMLResponse(page("maxtext API", text), headers={"X-Frame-Options": "DENY"})


def _body(operation: Mapping[str, Any]) -> str:
  body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
  return "" if body is None else _type(body)


def _table(name: str, schema: Mapping[str, Any]) -> str:
  required = schema.get("required", ())
  rows = "".join(
    f'<tr><th scope="row">{html.escape(field)}</th><td>{_type(one)}</td><td>{_default(one, field in required)}</td>'
    for field, one in schema["properties"].items()
  )
  about = html.escape(schema.get("description", ""))
  return (
    f'<section id="{html.escape(name)}"><h2>{html.escape(name)}</h2><p class="note">{about}</p>'
    f'<div class="scroll" tabindex="0"><table>{_HEAD}{rows}</table></div></section>'
  )


def _default(schema: Mapping[str, Any], required: bool) -> str:
  return "required" if required else html.escape(json.dumps(schema["default"])) if "default" in schema else ""


def _type(schema: Mapping[str, Any]) -> str:
  """A type in a few words, as HTML, with links to the schemas that it names."""
  if "$ref" in schema:
    name = html.escape(schema["$ref"].removeprefix(_PREFIX))
    return f'<a href="#{name}">{name}</a>'
  if several := schema.get("anyOf") or schema.get("oneOf"):
    return " or ".join(_type(one) for one in several)
  if values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
    return html.escape(" or ".join(json.dumps(value) for value in values))
  if schema.get("type") == "array":
    return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
  limits = [f"{word} {schema[key]}" for key, word in _BOUNDS.items() if key in schema]
  return html.escape(", ".join([schema.get("type", "any"), *limits]))
