"""Messages of a conversation, checked and brought into the form that chat templates expect.

The server does this with the messages of a request, and fine-tuning with those of a data set, so that a template sees
the same values in both.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext.configs import ConfigError
from maxtext.data.chat_template import ROLES

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the text that a model writes before its answer. Templates read the first or the last of them."""


MEDIA = {
  "image": "image", "image_url": "image", "audio": "audio", "input_audio": "audio", "video": "video",
  "video_url": "video",
}  # fmt: skip
"""Types of parts, and the kind of media in them."""


def template_messages(messages: Any, media: bool = False) -> list[dict[str, Any]]:
  """The messages as templates expect them; fields that no template knows are left out.

  With `media`, parts of media are allowed: their messages have a list of parts, in which a medium is only its kind.

  Raises:
    ConfigError: they are no list of messages; the error names the message by its number from 0.
  """
  if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
    raise ConfigError("messages: it must be a list of at least one message.")
  return [_message(message, number, media) for number, message in enumerate(messages)]


class Arguments(dict[str, Any]):
  """The arguments of a tool call: an object, which a template that adds it to a text sees as its JSON."""

  def __add__(self, other: str) -> str:
    return json.dumps(self, ensure_ascii=False) + other

  def __radd__(self, other: str) -> str:
    return other + json.dumps(self, ensure_ascii=False)


def media_sources(messages: Any) -> list[tuple[str, Any]]:
  """The media of messages in their order, each with its kind: files, paths or URLs, from parts as OpenAI's API has
  them, or from {"type": "image", "image": ...}, and so of audio and video; a file may be a mapping with "bytes" and
  "path", as the `datasets` library has it."""
  return [(MEDIA[part["type"]], _source(part)) for part in media_parts(messages)]


def media_parts(messages: Any) -> list[Any]:
  """The parts of messages that are media, in their order."""
  listed = messages if isinstance(messages, list | tuple) else ()
  contents = [message.get("content") for message in listed if isinstance(message, Mapping)]
  return [part for content in contents if isinstance(content, list | tuple) for part in content if media_kind(part)]


def media_kind(part: Any) -> str | None:
  """The kind of media in a part of a message; None for text."""
  kind = part.get("type") if isinstance(part, Mapping) else None
  return MEDIA.get(kind) if isinstance(kind, str) else None


def template_tools(tools: Any) -> list[dict[str, Any]] | None:
  """The descriptions of tools, from a list or its JSON text; None where there are none."""
  if isinstance(tools, str | bytes):
    tools = _json(tools, "tools") if tools.strip() else None
  if not tools:
    return None
  if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
    raise ConfigError("tools: it must be a list of objects.")
  return [dict(tool) for tool in tools]


def _source(part: Mapping[str, Any]) -> Any:
  value = part.get(part["type"])
  if not isinstance(value, Mapping):
    return value
  if "data" in value:
    return f"data:audio/{value.get('format')};base64,{value['data']}"
  return next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)


def _message(message: Any, number: int, media: bool) -> dict[str, Any]:
  where = f"messages.{number}"
  if not isinstance(message, Mapping) or "role" not in message:
    hint = " This one has 'from' and 'value': rename them by formatting_func_path." if _is_share_gpt(message) else ""
    raise ConfigError(f"{where}: it must be an object with role and content.{hint}")
  role = message["role"]
  if role not in ROLES:
    raise ConfigError(f"{where}.role: {role!r} is not one of {', '.join(ROLES)}.")
  found = {"role": role, "content": _content(message.get("content"), f"{where}.content", media)}
  for name in ("name", "tool_call_id"):
    if message.get(name) is not None:
      found[name] = _text(message[name], f"{where}.{name}")
  if (reasoning := next((message[name] for name in REASONING if message.get(name)), None)) is not None:
    found |= dict.fromkeys((REASONING[0], REASONING[-1]), _text(reasoning, f"{where}.{REASONING[0]}"))
  if message.get("tool_calls"):
    found["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
  return found


def _is_share_gpt(message: Any) -> bool:
  return isinstance(message, Mapping) and {"from", "value"} <= message.keys()


def _content(content: Any, where: str, media: bool) -> str | list[dict[str, Any]]:
  """The text of a message; parts of text are joined by line breaks, and stay parts where media are among them."""
  if content is None:
    return ""
  if isinstance(content, Sequence) and not isinstance(content, str | bytes):
    if media and any(map(media_kind, content)):
      return [
        {"type": kind}
        if (kind := media_kind(part))
        else {"type": "text", "text": _text_part(part, f"{where}.{number}")}
        for number, part in enumerate(content)
      ]
    return "\n".join(_text_part(part, f"{where}.{number}") for number, part in enumerate(content))
  return _text(content, where)


def _text_part(part: Any, where: str) -> str:
  kind = part.get("type") if isinstance(part, Mapping) else None
  if kind != "text":
    raise ConfigError(f"{where}: only parts of type 'text' are supported, not {kind!r}.")
  return _text(part.get("text"), f"{where}.text")


def _text(value: Any, where: str) -> str:
  if not isinstance(value, str):
    raise ConfigError(f"{where}: it must be text, not {type(value).__name__}.")
  try:
    value.encode()
  except UnicodeEncodeError:
    raise ConfigError(f"{where}: half of a surrogate pair, which no text has.") from None
  return value


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
  if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
    raise ConfigError(f"{where}: it must be a list.")
  return [_tool_call(call, f"{where}.{number}") for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
  """{"type": "function", "function": {"name", "arguments"}}, with arguments as an object."""
  function = call.get("function", call) if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
    raise ConfigError(f"{where}: it must be an object with function.name and function.arguments.")
  arguments = function.get("arguments") or {}
  if isinstance(arguments, str):  # as OpenAI's API has it; templates write them as JSON once more
    arguments = _json(arguments, f"{where}.function.arguments")
  if not isinstance(arguments, Mapping):
    raise ConfigError(f"{where}.function.arguments: it must be an object, or its JSON text.")
  found: dict[str, Any] = {
    "type": "function",
    "function": {"name": function["name"], "arguments": Arguments(arguments)},
  }
  return found | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _json(text: str | bytes, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    raise ConfigError(f"{where}: not valid JSON.") from None
