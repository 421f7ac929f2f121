"""The bodies of requests and answers, as OpenAI's clients write and read them.

A field that is not here is refused by name, as is a value that would have no effect.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from maxtext.configs import ConfigError
from maxtext.data.tokenizers import Tokenizer
from maxtext.inference.answer import Answer
from maxtext.inference.grammar import Form
from maxtext.inference.sampling import ALTERNATIVES, STOPS, Settings
from maxtext.inference.scheduler import Event


def _encodable(text: str) -> str:
  if any("\ud800" <= character <= "\udfff" for character in text):
    raise ValueError("half of a surrogate pair is no character")
  return text


_Strength = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, AfterValidator(_encodable)]


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

  regex: _Text

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
  stop: _Text | list[_Text] | None = None
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

  def settings(self, default: Settings, place: int) -> Settings:
    """How the answer at a place, of `n`, is made; what was left out is as the server has it."""

    def given(value: Any, otherwise: Any) -> Any:
      return otherwise if value is None else value

    stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
    if "" in stops:
      raise ConfigError("stop: an empty text would end every answer.")
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
      stop_tokens=(*default.stop_tokens, *self.stop_token_ids),
      stop_texts=tuple(stops),
      alternatives=self.alternatives,
    )


class Completion(Asked):
  """`/v1/completions`."""

  prompt: _Text | list[_Text] | list[int] | list[list[int]]
  logprobs: int | None = Field(None, ge=0, le=5)

  @property
  def most_tokens(self) -> int | None:
    return 16 if self.max_tokens is None else self.max_tokens

  @property
  def alternatives(self) -> int:
    return self.logprobs or 0

  def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of every prompt."""
    given: Any = self.prompt
    several = isinstance(given, list) and given and not isinstance(given[0], int)
    return [self._tokens(one, tokenizer) for one in (given if several else [given])]

  @staticmethod
  def _tokens(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
      return tokenizer.encode(prompt).tolist()
    return prompt


class Turn(BaseModel):
  """One message of a conversation."""

  model_config = ConfigDict(extra="forbid")

  role: Literal["system", "developer", "user", "assistant"]
  content: _Text
  name: str | None = None


class Chat(Asked):
  """`/v1/chat/completions`."""

  messages: list[Turn] = Field(min_length=1)
  max_completion_tokens: int | None = Field(None, ge=1)
  logprobs: bool = False
  top_logprobs: int | None = Field(None, ge=0, le=ALTERNATIVES)

  @property
  def most_tokens(self) -> int | None:
    return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

  @property
  def alternatives(self) -> int:
    return self.top_logprobs or 0

  def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of the conversation, up to where the answer begins."""
    return [tokenizer.chat([turn.model_dump(exclude_none=True) for turn in self.messages], answer=True).tolist()]


class Body:
  """What is sent for one request, whole or piece by piece."""

  def __init__(self, asked: Completion | Chat, tokenizer: Tokenizer) -> None:
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
