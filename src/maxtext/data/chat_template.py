"""Chat templates, with protection against special tokens in messages.

A template comes from a model's folder or from the operator. It runs in Jinja's sandbox, and may write special tokens.
Messages must not: the name of a special token in a message must stay text, or a user could write a system turn. The
rendered text does not show which part came from a message. So the names of special tokens in messages are broken up by
marks between their characters before rendering, and the encoder removes the marks after it has found special tokens.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from maxtext.configs import ConfigError
from maxtext.data.special_tokens import SpecialTokenFinder

BREAK, DELETE = "\x7f1", "\x7f0"  # text seldom has a DEL, and it is no white space that a template would trim
"""Marks: nothing at all, and the character that marks begin with."""

GUARDED = "text_has_marks"
"""The value that tells a template's functions that marks are there."""

MARK_GENERATION, GENERATION_BEGIN, GENERATION_END = "mark_generation", "\x7f2", "\x7f3"
"""With this value, the text within `{% generation %}` of a template stands between these two."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of messages. Templates choose the names of special tokens by these words, so they are never broken up."""


def render_template(template: str, **values: Any) -> str:
  """The rendered template. Errors are `ConfigError`, since they are about the conversation."""
  import jinja2

  try:
    return _compiled(template).render(**values)
  except jinja2.TemplateError as error:
    raise ConfigError(f"The chat template rejects this conversation: {error}.") from None
  except Exception as error:  # of expressions in it, such as a sum of a text and a list
    kind = type(error).__name__
    raise ConfigError(f"The chat template cannot be filled in with this conversation: {kind}: {error}.") from None


class Guard:
  """Breaks up the names of special tokens in messages.

  Args:
    names: of the special tokens.
  """

  def __init__(self, names: Collection[str]) -> None:
    self._names = SpecialTokenFinder(names, ignore_case=True)
    # A name may be put together from the end of one text and the beginning of the next.
    self._beginnings = tuple({name[:n] for name in names for n in range(1, len(name))})
    self._ends = tuple({name[n:] for name in names for n in range(1, len(name))})

  def wanted(self, value: Any) -> bool:
    """Whether a text in this value has a name in it, or a part of one at its edge."""
    return any(self._guards(text) for text in iterate_texts(value))

  def guarded(self, value: Any) -> Any:
    """The value with marks in its texts; only what is encoded without the marks may be made of it."""
    if isinstance(value, str):
      return self._broken(value)
    if isinstance(value, Mapping):
      kind = type(value) if isinstance(value, dict) else dict
      return kind({self.guarded(k): one if _is_role(k, one) else self.guarded(one) for k, one in value.items()})
    return [self.guarded(one) for one in value] if isinstance(value, list | tuple) else value

  def _guards(self, text: str) -> bool:
    edges = text.endswith(self._beginnings) or text.startswith(self._ends)
    same = text if text.isascii() else unicodedata.normalize("NFKC", text)  # which some tokenizers do, too
    return edges or any(True for _ in self._names.spans(same))

  def _broken(self, text: str) -> str:
    text = text.replace(DELETE[0], DELETE)
    first = BREAK if text.startswith(self._ends) else ""
    last = BREAK if text.endswith(self._beginnings) else ""
    while (broken := self._once_broken(text)) != text:
      text = broken  # a name may begin within another
    return first + text + last

  def _once_broken(self, text: str) -> str:
    parts, done = [], 0
    for start, end in self._names.spans(text):
      parts += [text[done:start], BREAK.join(text[start:end])]
      done = end
    return "".join([*parts, text[done:]])


def remove_marks(text: str) -> str:
  """What was guarded, as it was."""
  return text.replace(BREAK, "").replace(DELETE, DELETE[0])


def iterate_texts(value: Any) -> Iterator[str]:
  """All texts in a value of lists and objects, also the names of its fields, but not the roles of messages."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for name, one in value.items():
      if not _is_role(name, one):
        yield from iterate_texts(name)
        yield from iterate_texts(one)
  elif isinstance(value, list | tuple):
    for one in value:
      yield from iterate_texts(one)


def _is_role(name: Any, value: Any) -> bool:
  return name == "role" and isinstance(value, str) and value in ROLES


_ESCAPES = re.compile(r"\\(?:u007f([01])|.)", re.DOTALL)  # also others, so that no second backslash begins one


def _unescaped_mark(found: re.Match[str]) -> str:
  """What JSON made of a mark: the mark, or the escape of the character that it stands for."""
  return {None: found[0], BREAK[1]: BREAK, DELETE[1]: r"\u007f"}[found[1]]


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
  """In the dialect that Hugging Face's own library runs."""
  import jinja2
  from jinja2.ext import Extension, loopcontrols
  from jinja2.sandbox import ImmutableSandboxedEnvironment

  class Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what the model writes, by the word of the template's author."""

    tags = {"generation"}  # noqa: RUF012 (as the library has it)

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      call = self.call_method("_marked", [jinja2.nodes.ContextReference()])
      return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, context: Any, caller: Callable[[], str]) -> str:
      text = caller()
      return f"{GENERATION_BEGIN}{text}{GENERATION_END}" if context.get(MARK_GENERATION) else text

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  @jinja2.pass_context
  def to_json(context: Any, value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    return _ESCAPES.sub(_unescaped_mark, text) if ensure_ascii and context.get(GUARDED) else text

  jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
  jinja.filters["tojson"] = to_json
  jinja.globals["raise_exception"] = refuse
  jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
  return jinja.from_string(template)
