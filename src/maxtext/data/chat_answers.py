"""Answers of a chat model, taken apart into visible text, reasoning and tool calls: the inverse of a chat template.

Which format an answer has is found by rendering a tool call with the template and reading it back (`AnswerFormat.of`).
A parser takes the answer as it is generated. What is no well-formed call of an offered tool stays text, so a parser
never fails and loses nothing but the marks and the white space around them.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from maxtext.configs import ConfigError
from maxtext.data.chat_messages import REASONING, template_messages
from maxtext.data.conversations import answer_tokens
from maxtext.data.special_tokens import partial_match_length
from maxtext.data.tokenizers import TextTokenizer

NAME = r"[\w.:/-]+"
"""What the name of a tool may be: it is part of the template's own text, and so has no quotes and no brackets."""


@dataclass(frozen=True)
class FunctionCall:
  """A call of a tool: its name, and its arguments as the JSON text of an object."""

  name: str
  arguments: str


@dataclass
class AnswerParts:
  """The parts of an answer, or of what was added to it."""

  content: str = ""
  reasoning: str = ""
  calls: list[FunctionCall] = field(default_factory=list)

  def __bool__(self) -> bool:
    return bool(self.content or self.reasoning or self.calls)


class AnswerParser(Protocol):
  """Takes one answer apart. Parts of marks are held back until it is known what they are."""

  def add(self, text: str) -> AnswerParts:
    """The parts that new text of the answer completes."""
    ...

  def finish(self) -> AnswerParts:
    """What was held back, when the answer has ended."""
    ...


_Calls = list[FunctionCall] | None
_Reader = Callable[[str], _Calls]


@dataclass(frozen=True)
class CallFormat:
  """How a family of models writes tool calls.

  Attributes:
    begin: mark in front of calls.
    read: the calls in the text after it; None if it is malformed, and `_UnfinishedError` if a text in it goes on.
    end: mark after them; empty if the end of the answer is.
    inner: marks that `read` takes.
    bare: what begins calls without the mark, at the start of an answer; empty if they have it always.
  """

  begin: str
  read: _Reader
  end: str = ""
  inner: tuple[str, ...] = ()
  bare: str = ""

  @property
  def marks(self) -> tuple[str, ...]:
    """All marks."""
    return tuple(filter(None, (self.begin, self.end, *self.inner)))


@dataclass(frozen=True)
class AnswerFormat:
  """The format of a chat template's answers.

  Attributes:
    parser: makes the parser of an answer, from the text that ends the prompt and the names of the offered tools.
    marks: the marks that it reads, of which those that are special tokens must be in its text.
  """

  parser: Callable[[str, Collection[str]], AnswerParser]
  marks: tuple[str, ...]

  @staticmethod
  def of(tokenizer: TextTokenizer) -> "AnswerFormat | None":
    """The format of the tokenizer's chat template; None if it has neither reasoning nor tool calls."""
    template = tokenizer.chat_template or ""
    if _MESSAGE in template and _CHANNEL in template:
      return AnswerFormat(lambda prompt, names: _HarmonyParser(names), (_START, _CHANNEL, _MESSAGE, *_ENDS))
    thinking = next((marks for marks in _THINKING if marks[1] in template), None)
    calls = next((one for one in CALL_FORMATS if _reads_back(one, tokenizer, thinking)), None)
    if thinking is None and calls is None:
      return None
    marks = (*(thinking or ()), *(calls.marks if calls else ()))
    return AnswerFormat(lambda prompt, names: _TaggedParser(calls, thinking, prompt, names), marks)


def shown_tokens(tokenizer: TextTokenizer, marks: Collection[str]) -> frozenset[int]:
  """The special tokens among marks, which text would otherwise not contain."""
  encoded = (tokenizer.vocabulary.encode(mark, special=True) for mark in marks)
  return frozenset(tokens[0] for tokens in encoded if len(tokens) == 1) & tokenizer.special_ids


def ends_of_turns(tokenizer: TextTokenizer) -> tuple[int, ...]:
  """The tokens that the chat template ends an answer with, one of text and one of a tool call."""
  found = list[int]()
  for answer in ({"content": "b"}, {"content": "", "tool_calls": [_PROBE]}):
    tokens = _rendered(tokenizer, answer)
    found += [token for token in tokens[-1:] if token in tokenizer.special_ids]
  return tuple(dict.fromkeys(found))


def required_calls_schema(tools: Sequence[Mapping[str, Any]], most: int) -> str:
  """A JSON schema, as text, of a list of 1 to `most` calls of these tools, which `required_calls` reads.

  A reference within a tool's parameters starts at their root; here it leads to their place among the definitions.
  """
  functions = [tool["function"] for tool in tools]
  definitions = {
    str(n): _relocated(_of_object(function.get("parameters") or {}), f"#/$defs/{n}")
    for n, function in enumerate(functions)
  }
  calls = [
    {
      "type": "object",
      "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{n}"}},
      "required": ["name", "arguments"],
      "additionalProperties": False,
    }
    for n, function in enumerate(functions)
  ]
  listed = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most}
  return json.dumps(listed | {"$defs": definitions})


def required_calls(prompt: str, names: Collection[str]) -> AnswerParser:
  """The parser of an answer that `required_calls_schema` forces, whatever the chat template is."""
  return _TaggedParser(CallFormat("", _json_calls, bare="["), None, prompt, names)


class _UnfinishedError(Exception):
  """A text in JSON has not ended, so that a mark within it is part of it."""


_MOST_INNER_MARKS = 64  # within the texts of a call, which is read again at each


class _MarkParser:
  """Handles one mark after the other of what has arrived."""

  def __init__(self) -> None:
    self._buffer = ""  # what has not been told yet
    self._searched = 0  # of the buffer, for the mark that comes next
    self._inner_marks = 0  # of the buffer, in texts that go on

  def add(self, text: str) -> AnswerParts:
    self._buffer += text
    parts = AnswerParts()
    while self._advance(parts):
      pass
    return parts

  def _advance(self, parts: AnswerParts) -> bool:
    """Handles the next mark; False where more text is needed."""
    raise NotImplementedError


class _TaggedParser(_MarkParser):
  """Reads answers in which marks stand around reasoning and calls. White space beside marks is dropped."""

  def __init__(
    self, calls: CallFormat | None, thinking: tuple[str, str] | None, prompt: str, names: Collection[str]
  ) -> None:
    super().__init__()
    self._calls, self._thinking, self._names = calls if names else None, thinking, names
    self._reasoning = thinking is not None and prompt.rstrip().endswith(thinking[0])
    self._at_start, self._after_mark = True, self._reasoning
    self._begin: str | None = None  # what the calls that are being read began with

  def finish(self) -> AnswerParts:
    parts = AnswerParts()
    if self._begin is None:
      self._show(parts, self._buffer.rstrip() if self._reasoning else self._buffer)
    elif not self._read_calls(parts, self._buffer, final=True):
      self._show(parts, self._begin + self._buffer)
    self._buffer = ""
    return parts

  def _advance(self, parts: AnswerParts) -> bool:
    if self._begin is not None:
      return self._advance_calls(parts, self._begin)
    if self._starts_bare():
      self._begin = ""
      return True
    marks = self._marks()
    found = min(((place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0), default=None)
    if found is None:
      shown = self._buffer[: len(self._buffer) - partial_match_length(self._buffer, marks)]
      shown = shown.rstrip() if marks else shown
      self._buffer = self._buffer[len(shown) :]
      self._show(parts, shown)
      return False
    place, mark = found
    self._show(parts, self._buffer[:place].rstrip())
    self._buffer, self._after_mark = self._buffer[place + len(mark) :], True
    if self._calls and mark == self._calls.begin:
      self._begin, self._searched, self._inner_marks, self._at_start = mark, 0, 0, False
    else:
      self._reasoning = not self._reasoning
      self._at_start = True
    return True

  def _advance_calls(self, parts: AnswerParts, begin: str) -> bool:
    assert self._calls is not None
    end = self._calls.end
    while end and (place := self._buffer.find(end, self._searched)) >= 0:
      self._searched, body = place + 1, self._buffer[:place]
      try:
        done = self._read_calls(parts, body, final=self._inner_marks == _MOST_INNER_MARKS)
      except _UnfinishedError:
        self._inner_marks += 1
        continue
      self._begin, self._buffer, self._after_mark = None, self._buffer[place + len(end) :], done
      if not done:
        self._show(parts, begin + body + end)
      return True
    self._searched = max(self._searched, len(self._buffer) - len(end) + 1)
    return False

  def _read_calls(self, parts: AnswerParts, body: str, final: bool = False) -> bool:
    """Takes the calls of a body; False if it has none, or names another tool."""
    assert self._calls is not None
    try:
      found = self._calls.read(body)
    except _UnfinishedError:
      if not final:
        raise
      found = None
    if not found or any(call.name not in self._names for call in found):
      return False
    parts.calls += found
    return True

  def _starts_bare(self) -> bool:
    bare = self._calls.bare if self._calls and self._at_start and not self._reasoning else ""
    return bool(bare) and self._buffer.lstrip().startswith(bare)

  def _marks(self) -> tuple[str, ...]:
    """The marks that can come next. Reasoning can only begin an answer."""
    opening, closing = self._thinking or ("", "")
    if self._reasoning:
      return (closing,)
    text = self._buffer.lstrip()[: len(opening)]
    may_open = opening and self._at_start and opening.startswith(text)
    return (*((opening,) if may_open else ()), *((self._calls.begin,) if self._calls and self._calls.begin else ()))

  def _show(self, parts: AnswerParts, text: str) -> None:
    if self._after_mark:
      text = text.lstrip()
    if not text:
      return
    if self._reasoning:
      parts.reasoning += text
    else:
      parts.content += text
    self._after_mark, self._at_start = False, self._at_start and not text.strip()


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(rf"\bto=functions\.({NAME})")


class _HarmonyParser(_MarkParser):
  """Reads answers of several messages, each with a header that says its channel and recipient (GPT-OSS)."""

  def __init__(self, names: Collection[str]) -> None:
    super().__init__()
    self._names = names
    self._header: str | None = None  # of the message that is being read

  def finish(self) -> AnswerParts:
    parts = AnswerParts()
    if self._header is not None:
      self._end_message(parts, self._header, self._buffer, final=True)
    elif not self._buffer.startswith(_START):
      parts.content += self._buffer  # no message at all
    self._buffer = ""
    return parts

  def _advance(self, parts: AnswerParts) -> bool:
    if self._header is None:
      header, mark, rest = self._buffer.partition(_MESSAGE)
      if mark:
        self._header, self._buffer, self._searched, self._inner_marks = header, rest, 0, 0
      return bool(mark)
    marks = (*_ENDS, _START)
    while (place := min((p for m in marks if (p := self._buffer.find(m, self._searched)) >= 0), default=-1)) >= 0:
      self._searched = place + 1
      try:
        self._end_message(parts, self._header, self._buffer[:place], final=self._inner_marks == _MOST_INNER_MARKS)
      except _UnfinishedError:
        self._inner_marks += 1
        continue
      mark = next(mark for mark in marks if self._buffer.startswith(mark, place))
      self._header, self._buffer = None, self._buffer[place + (len(mark) if mark in _ENDS else 0) :]
      return True
    if self._recipient(self._header) is None:
      shown = len(self._buffer) - partial_match_length(self._buffer, marks)
      self._show(parts, self._header, self._buffer[:shown])
      self._buffer = self._buffer[shown:]
    self._searched = max(self._searched, len(self._buffer) - max(map(len, marks)) + 1)
    return False

  def _recipient(self, header: str) -> str | None:
    found = _RECIPIENT.search(header)
    return found[1] if found and found[1] in self._names else None

  def _end_message(self, parts: AnswerParts, header: str, body: str, final: bool = False) -> None:
    call, name = None, self._recipient(header)
    try:
      call = None if name is None else _call(name, body)
    except _UnfinishedError:
      if not final:
        raise
    if call is None:
      self._show(parts, header, body)
    else:
      parts.calls.append(call)

  def _show(self, parts: AnswerParts, header: str, text: str) -> None:
    """Shows text of a channel: the model's own thoughts are in `analysis`, unless they are a call."""
    if f"{_CHANNEL}analysis" in header and self._recipient(header) is None:
      parts.reasoning += text
    else:
      parts.content += text


def _no_constant(name: str) -> Any:
  raise ValueError(name)  # NaN and infinities, which JSON does not have


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_UNTERMINATED = "Unterminated string"


def _values(text: str) -> Iterator[tuple[Any, int]]:
  """The JSON values that follow each other in a text, with their ends.

  Raises:
    ValueError: something else is between them, or one is malformed.
  """
  place = len(text) - len(text.lstrip())
  while place < len(text):
    try:
      value, place = _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
      if error.msg.startswith(_UNTERMINATED):
        raise _UnfinishedError from None
      raise
    except RecursionError:
      raise ValueError("nested too deeply") from None
    yield value, place
    while place < len(text) and (text[place].isspace() or text[place] in ",;"):
      place += 1


def _json_calls(text: str) -> _Calls:
  """Calls as JSON objects with a name and `arguments` or `parameters`, one after the other or in a list."""
  try:
    values = [value for value, _ in _values(text)]
  except ValueError:
    return None
  objects = [one for value in values for one in (value if isinstance(value, list) else [value])]
  return _all([_object_call(one) for one in objects])


# An answer is what a client made of the model, and these patterns take no time that grows with more than its length.
_NAMED = re.compile(rf"\s*(?:\[TOOL_CALLS\]\s*)?({NAME})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{)")


def _named_calls(text: str) -> _Calls:
  """Calls as a name in front of a JSON object (`[TOOL_CALLS]`), or as JSON."""
  if text.lstrip()[:1] in ("[", "{"):
    return _json_calls(text)
  found, place = list[FunctionCall | None](), 0
  while text[place:].strip():
    if (head := _NAMED.match(text, place)) is None:
      return None
    try:
      value, end = next(_values(text[head.end() :]))
    except ValueError:
      return None
    found.append(_object_call({"name": head[1], "arguments": value}))
    place = head.end() + end
  return _all(found)


_DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
_DEEPSEEK_CALL = re.compile(r"\s*{}(?>(?P<head>.*?){})(?P<rest>.*?){}\s*".format(*_DEEPSEEK_MARKS), re.DOTALL)
_FENCED = re.compile(rf"({NAME})\s*```json(.*)```", re.DOTALL)


def _deepseek_calls(text: str) -> _Calls:
  """Calls between marks: the name and a block of JSON (V3, R1), or the name, a separator and JSON (V3.1)."""
  found, place = list[FunctionCall | None](), 0
  while place < len(text):
    if (one := _DEEPSEEK_CALL.match(text, place)) is None:
      return None
    fenced, place = _FENCED.fullmatch(one["rest"].strip()), one.end()
    name, arguments = fenced.groups() if fenced else (one["head"].strip(), one["rest"])
    found.append(_call(name, arguments))
  return _all(found)


_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
CALL_FORMATS = (
  CallFormat("<tool_call>", _json_calls, "</tool_call>"),  # Hermes, Qwen
  CallFormat("[TOOL_CALLS]", _named_calls, inner=("[ARGS]", "[CALL_ID]")),
  CallFormat("<｜tool▁calls▁begin｜>", _deepseek_calls, "<｜tool▁calls▁end｜>", _DEEPSEEK_MARKS),  # noqa: RUF001
  CallFormat("<|python_tag|>", _json_calls, bare="{"),  # Llama 3
)


def _call(name: str, arguments: str) -> FunctionCall | None:
  """A call whose arguments are the text of one JSON object; None if they are not."""
  try:
    values = [value for value, _ in _values(arguments)]
  except ValueError:
    return None
  return _object_call({"name": name, "arguments": values[0]}) if len(values) == 1 else None


def _object_call(value: Any) -> FunctionCall | None:
  if not isinstance(value, dict):
    return None
  name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
  if isinstance(arguments, str):  # JSON within JSON
    return _call(name, arguments) if isinstance(name, str) else None
  if not isinstance(name, str) or not isinstance(arguments, dict):
    return None
  try:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
  except (ValueError, RecursionError):  # a number that is too large, or half of a surrogate pair
    return None
  return FunctionCall(name, text)


def _all(calls: list[FunctionCall | None]) -> _Calls:
  """The calls; None if one of them is malformed, or there are none."""
  found = [call for call in calls if call is not None]
  return found if found and len(found) == len(calls) else None


def _of_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
  """The schema of arguments, which are an object even if it does not say so."""
  return schema if "$ref" in schema else {"type": "object", **schema}


def _relocated(schema: Any, root: str) -> Any:
  """A schema whose references to its root lead to another place."""
  if isinstance(schema, list):
    return [_relocated(one, root) for one in schema]
  if not isinstance(schema, dict):
    return schema
  return {
    key: root + one[1:] if key == "$ref" and isinstance(one, str) and one.startswith("#") else _relocated(one, root)
    for key, one in schema.items()
  }


_PROBE = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "probe", "arguments": {"a": 1}}}
_PROBE_TOOL = {
  "type": "function",
  "function": {
    "name": "probe",
    "description": "b",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "c"}}, "required": ["a"]},
  },
}


def _rendered(tokenizer: TextTokenizer, answer: Mapping[str, Any]) -> list[int]:
  """The tokens of an answer with reasoning to a user's message; empty if the template takes no such conversation."""
  if tokenizer.chat_template is None:
    return []
  messages = template_messages([{"role": "user", "content": "a"}, {"role": "assistant", **answer}])
  messages[-1] |= dict.fromkeys((REASONING[0], REASONING[-1]), "c")
  try:
    return answer_tokens(tokenizer, messages, {"tools": [_PROBE_TOOL]} if answer.get("tool_calls") else {})
  except ConfigError:
    return []


def _reads_back(calls: CallFormat, tokenizer: TextTokenizer, thinking: tuple[str, str] | None) -> bool:
  """Whether the template writes a call that this format reads."""
  tokens, shown = _rendered(tokenizer, {"content": "", "tool_calls": [_PROBE]}), shown_tokens(tokenizer, calls.marks)
  while tokens and tokens[-1] in tokenizer.special_ids - shown:
    tokens.pop()
  text = tokenizer.decode(tokens, shown | shown_tokens(tokenizer, thinking or ()))
  prompt = thinking[0] if thinking and thinking[0] not in text and thinking[1] in text else ""
  parser = _TaggedParser(calls, thinking, prompt, {"probe"})
  return [*parser.add(text).calls, *parser.finish().calls] == [FunctionCall("probe", '{"a": 1}')]
