"""The bodies of requests and answers, as OpenAI's clients write and read them.

A field that is not here is refused by name, as is a value that would have no effect.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, ValidationError
from pydantic_core import from_json

from maxtext.configs import ConfigError
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.answer import Answer
from maxtext.inference.grammar import Form
from maxtext.inference.sampling import ALTERNATIVES, STOPS, SamplingParams
from maxtext.inference.scheduler import Event

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 128
_MAX_FIELDS, _MAX_VALUES, _MAX_BLANK, _MAX_REPORTED = 64, 2**16, 2**15, 2_000_000

_Strength = Annotated[float, Field(ge=-2, le=2)]


def _as_list(stop: Any) -> Any:
  return [] if stop is None else [stop] if isinstance(stop, str) else stop


_Stops = Annotated[
  list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]],
  Field(max_length=MAX_STOPS),
  BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
]


def _prompt_kind(prompt: Any) -> str:
  if not isinstance(prompt, list):
    return "text"
  first = prompt[0] if prompt else 0
  return "texts" if isinstance(first, str) else "tokens" if isinstance(first, int) else "lists_of_tokens"


def _alike(prompt: Any) -> Any:
  kind = {"texts": str, "tokens": int, "lists_of_tokens": list}.get(_prompt_kind(prompt))
  if kind is None:
    return prompt
  alike = all(isinstance(one, kind) for one in prompt)
  if not alike or (kind is list and not all(isinstance(token, int) for one in prompt for token in one)):
    raise ValueError("it is one text or several, or the tokens of one or of several")
  return prompt


# One kind by the first element, and one error: trying each kind on every element takes seconds.
_Prompt = Annotated[
  Annotated[str, Tag("text")]
  | Annotated[list[str], Tag("texts")]
  | Annotated[list[int], Tag("tokens")]
  | Annotated[list[list[int]], Tag("lists_of_tokens")],
  Discriminator(_prompt_kind),
  BeforeValidator(_alike),
]


@dataclass(frozen=True)
class Bounds:
  """What a request may ask for; beyond it, it is refused before any work is done for it.

  Attributes:
    answers: prompts times `n`.
    prompt_tokens: of one prompt; `prompt_characters`: what so many tokens can hold, at most.
    answer_tokens: that have room in one answer.
  """

  answers: int
  prompt_tokens: int
  prompt_characters: int
  answer_tokens: int

  @staticmethod
  def of(tokenizer: TextTokenizer, prompt_tokens: int, answers: int, answer_tokens: int) -> "Bounds":
    """By the longest token of a vocabulary."""
    return Bounds(answers, prompt_tokens, prompt_tokens * _longest_token(tokenizer), answer_tokens)

  def check_answers(self, prompts: int, n: int) -> None:
    """Raises where so many would never be let in."""
    if prompts * n > self.answers:
      raise ConfigError(f"{prompts} prompts with n={n} are more than the {self.answers} answers that one may wait for.")

  def check_reported(self, answers: int, asked: "Asked") -> None:
    """Raises where so much about tokens would take long to write down."""
    tokens = min(asked.most_tokens or self.answer_tokens, self.answer_tokens)
    if asked.alternatives and answers * tokens * (1 + asked.alternatives) > _MAX_REPORTED:
      raise ConfigError(
        f"{answers} answers of {tokens} tokens with {asked.alternatives} others in place of each are more than "
        f"{_MAX_REPORTED} tokens: lower n, max_tokens or the number of log probabilities."
      )

  def check_length(self, length: int, unit: Literal["characters", "tokens"]) -> None:
    """Raises where no prompt of such a length fits."""
    if length > (self.prompt_characters if unit == "characters" else self.prompt_tokens):
      raise ConfigError(f"The prompt has {length} {unit}, more than max_prefill_predict_length={self.prompt_tokens}.")


class StreamOptions(BaseModel):
  """What a stream says besides the text."""

  include_usage: bool = False


class AnyText(BaseModel):
  """No form."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["text"]
  form: ClassVar[None] = None


class AnyObject(BaseModel):
  """Any JSON object."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["json_object"]
  form: ClassVar[Form] = Form("response_format", "json", '{"type": "object"}')


class NamedSchema(BaseModel):
  """A JSON schema; it is kept whether or not it is called strict."""

  model_config = ConfigDict(extra="forbid")

  name: str
  description: str | None = None
  json_schema: dict[str, Any] = Field(alias="schema")
  strict: bool | None = None


class ObjectOfSchema(BaseModel):
  """JSON that a schema describes."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["json_schema"]
  json_schema: NamedSchema

  @property
  def form(self) -> Form:
    """The schema."""
    return Form("response_format.json_schema.schema", "json", json.dumps(self.json_schema.json_schema))


ResponseFormat = Annotated[AnyText | AnyObject | ObjectOfSchema, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
  """Forms that OpenAI's field has no words for."""

  model_config = ConfigDict(extra="forbid")

  regex: str

  @property
  def form(self) -> Form:
    """The whole answer matches it."""
    return Form("structured_outputs.regex", "regex", self.regex)


class Asked(BaseModel):
  """What completions and chats have in common; the last five are ours, by the names that vLLM gives them."""

  model_config = ConfigDict(extra="forbid")

  model: str
  max_tokens: int | None = Field(None, ge=1)
  temperature: float | None = Field(None, ge=0, le=10)
  top_p: float | None = Field(None, gt=0, le=1)
  n: int = Field(1, ge=1, le=16)
  stop: _Stops = Field(default_factory=list)
  seed: int | None = None
  presence_penalty: _Strength = 0.0
  frequency_penalty: _Strength = 0.0
  stream: bool = False
  stream_options: StreamOptions | None = None
  user: str | None = None
  response_format: ResponseFormat | None = None
  top_k: int | None = Field(None, ge=0, lt=2**31)
  repetition_penalty: float = Field(1.0, gt=0, le=10)
  min_tokens: int = Field(0, ge=0, lt=2**30)
  stop_token_ids: list[int] = Field(default_factory=list, max_length=STOPS - 1)
  structured_outputs: StructuredOutputs | None = None

  @property
  def most_tokens(self) -> int | None:
    """Of an answer; None is all that has room."""
    return self.max_tokens

  @property
  def alternatives(self) -> int:
    """Tokens that are reported beside each one."""
    return 0

  @property
  def form(self) -> Form | None:
    """What every answer must be; None is any text."""
    schema = self.response_format.form if self.response_format else None
    if schema and self.structured_outputs:
      raise ConfigError("response_format and structured_outputs both say what an answer must be: leave one out.")
    form = self.structured_outputs.form if self.structured_outputs else schema
    if form and self.min_tokens:
      raise ConfigError(f"min_tokens: an answer ends where {form.field} says.")
    return form

  def sampling_params(self, default: SamplingParams, place: int) -> SamplingParams:
    """How the answer at a place, of `n`, is made; what was left out is as the server has it."""

    def given(value: Any, otherwise: Any) -> Any:
      return otherwise if value is None else value

    return replace(
      default,
      temperature=given(self.temperature, default.temperature),
      top_p=given(self.top_p, default.top_p),
      top_k=given(self.top_k, default.top_k),
      seed=secrets.randbits(32) if self.seed is None else self.seed + place,
      repetition_penalty=self.repetition_penalty,
      presence_penalty=self.presence_penalty,
      frequency_penalty=self.frequency_penalty,
      min_tokens=self.min_tokens,
      max_tokens=self.most_tokens,
      stop_token_ids=(*default.stop_token_ids, *self.stop_token_ids),
      stop=tuple(self.stop),
      logprobs=self.alternatives,
    )


class Completion(Asked):
  """`/v1/completions`."""

  prompt: _Prompt
  logprobs: int | None = Field(None, ge=0, le=5)

  @property
  def most_tokens(self) -> int | None:
    return 16 if self.max_tokens is None else self.max_tokens

  @property
  def alternatives(self) -> int:
    return self.logprobs or 0

  def check(self, bounds: Bounds) -> None:
    """Raises where it asks for too much."""
    bounds.check_answers(len(self._prompts), self.n)
    bounds.check_reported(len(self._prompts) * self.n, self)
    for prompt in self._prompts:
      bounds.check_length(len(prompt), "characters" if isinstance(prompt, str) else "tokens")
      if isinstance(prompt, str):
        _check_blank(prompt)

  def prompts(self, tokenizer: TextTokenizer) -> list[list[int]]:
    """Tokens of every prompt."""
    return [self._tokens(one, tokenizer) for one in self._prompts]

  @property
  def _prompts(self) -> list[Any]:
    several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
    return self.prompt if several else [self.prompt]  # type: ignore[return-value]

  @staticmethod
  def _tokens(prompt: str | list[int], tokenizer: TextTokenizer) -> list[int]:
    if isinstance(prompt, str):
      return tokenizer.encode(prompt).tolist()
    return prompt


class Turn(BaseModel):
  """One message of a conversation."""

  model_config = ConfigDict(extra="forbid")

  role: Literal["system", "developer", "user", "assistant"]
  content: str
  name: str | None = Field(None, max_length=64)


class Chat(Asked):
  """`/v1/chat/completions`."""

  messages: Annotated[list[Turn], FailFast()] = Field(min_length=1)
  max_completion_tokens: int | None = Field(None, ge=1)
  logprobs: bool = False
  top_logprobs: int | None = Field(None, ge=0, le=ALTERNATIVES)

  @property
  def most_tokens(self) -> int | None:
    return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

  @property
  def alternatives(self) -> int:
    return self.top_logprobs or 0

  def check(self, bounds: Bounds) -> None:
    """Raises where it asks for too much; a turn has a token at least."""
    bounds.check_answers(1, self.n)
    bounds.check_reported(self.n, self)
    bounds.check_length(len(self.messages), "tokens")
    bounds.check_length(sum(len(turn.content) for turn in self.messages), "characters")
    for turn in self.messages:
      _check_blank(turn.content)

  def prompts(self, tokenizer: TextTokenizer) -> list[list[int]]:
    """Tokens of the conversation, up to where the answer begins."""
    return [tokenizer.chat([turn.model_dump(exclude_none=True) for turn in self.messages], answer=True).tolist()]


Kind = TypeVar("Kind", Completion, Chat)


def parse(kind: type[Kind], raw: bytes, bounds: Bounds) -> Kind:
  """A request of a body; raises where it is no such, or too large.

  A parser of JSON, and pydantic, hold the interpreter's lock until they are done, so what would take them long is
  refused before: many values, and many fields.
  """
  if (values := count_values(raw)) > _MAX_VALUES + bounds.prompt_tokens:
    raise ConfigError(f"The request has about {values} values, more than {_MAX_VALUES + bounds.prompt_tokens}.")
  try:
    given = from_json(raw)
  except ValueError as error:
    raise ConfigError(f"The request is no JSON: {error}.") from None
  _check_fields(given)
  try:
    asked = kind.model_validate(given)
  except ValidationError as error:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    raise ConfigError(f"{where}: {first['msg']}" if where else first["msg"]) from None
  asked.check(bounds)
  return asked


def _check_fields(given: Any) -> None:
  """Raises on an object of many fields, each of which would be an error of its own; a schema is no such."""
  left = [given]
  while left:
    value = left.pop()
    if isinstance(value, list):
      left += [one for one in value if isinstance(one, dict | list)]
    elif isinstance(value, dict):
      if len(value) > _MAX_FIELDS:
        raise ConfigError(f"The request has an object of {len(value)} fields, more than {_MAX_FIELDS}.")
      left += [one for name, one in value.items() if name != "schema" and isinstance(one, dict | list)]


def count_values(raw: bytes) -> int:
  """At least as many as there are values in JSON, in one pass and without making any of them."""
  plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
  if (strings := plain.count(b'"') // 2) > _MAX_VALUES:
    return strings
  between = b"".join(plain.split(b'"')[::2])
  return 1 + sum(between.count(mark) for mark in (b",", b"[", b"{"))


class Body:
  """What is sent for one request, whole or piece by piece."""

  def __init__(self, asked: Completion | Chat, tokenizer: TextTokenizer) -> None:
    self._asked, self._tokenizer = asked, tokenizer
    self._chat = isinstance(asked, Chat)
    kind = "chat.completion" if self._chat else "text_completion"
    self._kind, self._piece_kind = kind, "chat.completion.chunk" if self._chat else kind
    self._head = {
      "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
      "created": int(time.time()),
      "model": asked.model,
    }

  def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
    """The answers at once."""
    choices = []
    for place, answer in enumerate(answers):
      content = {"message": {"role": "assistant", "content": answer.text}} if self._chat else {"text": answer.text}
      choices.append(self._choice(place, answer, content, answer.events))
    return {**self._head, "object": self._kind, "choices": choices, "usage": usage(answers, prompt_tokens)}

  def opening(self, place: int) -> dict[str, Any]:
    """The piece that says who speaks, of a chat."""
    choice = {"index": place, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return {**self._head, "object": self._piece_kind, "choices": [choice]}

  def piece(self, place: int, answer: Answer, text: str, event: Event) -> dict[str, Any]:
    """Text that one event has added."""
    content: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
    return {
      **self._head,
      "object": self._piece_kind,
      "choices": [self._choice(place, answer, content, [event])],
    }

  def closing(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
    """The piece that says what was used."""
    return {**self._head, "object": self._piece_kind, "choices": [], "usage": usage(answers, prompt_tokens)}

  def _choice(self, place: int, answer: Answer, content: Mapping[str, Any], events: Sequence[Event]) -> dict[str, Any]:
    return {"index": place, **content, "logprobs": self._log_probs(events), "finish_reason": answer.finish}

  def _log_probs(self, events: Sequence[Event]) -> dict[str, Any] | None:
    if self._asked.logprobs is None or self._asked.logprobs is False:
      return None
    known = [(event.token, event) for event in events if event.token is not None]
    if self._chat:
      return {
        "content": [
          {**self._word(token, event.log_prob), "top_logprobs": [self._word(*other) for other in event.others]}
          for token, event in known
        ]
      }
    return {
      "tokens": [self._tokenizer.decode([token]) for token, _ in known],
      "token_logprobs": [event.log_prob for _, event in known],
      "top_logprobs": [{self._tokenizer.decode([t]): p for t, p in event.others} for _, event in known],
    }

  def _word(self, token: int, log_prob: float) -> dict[str, Any]:
    text = self._tokenizer.decode([token])
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}


def usage(answers: Sequence[Answer], prompt_tokens: int) -> dict[str, int]:
  """Tokens of the prompts and of the answers."""
  written = sum(event.token is not None for answer in answers for event in answer.events)
  return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}


def _check_blank(text: str) -> None:
  """Raises on so much white space that a tokenizer's expression, whose time grows with its square, gives up."""
  if any(text[start : start + _MAX_BLANK].isspace() for start in range(0, len(text) - _MAX_BLANK + 1, _MAX_BLANK)):
    raise ConfigError(f"The prompt has {_MAX_BLANK} or more characters of white space in a row.")


@cache
def _longest_token(tokenizer: TextTokenizer) -> int:
  return max(1, *(len(tokenizer.decode([token])) for token in range(tokenizer.vocab_size)))
