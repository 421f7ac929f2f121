"""The bodies of requests of the OpenAI API.

A field that is not supported is an error that names it, as is a value that would have no effect.
"""

import base64
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import (
  BaseModel,
  BeforeValidator,
  ConfigDict,
  Discriminator,
  FailFast,
  Field,
  Tag,
  ValidationError,
  model_validator,
)
from pydantic_core import from_json

from maxtext.configs import ConfigError
from maxtext.data.chat_answers import (
  NAME,
  AnswerFormat,
  required_calls,
  required_calls_schema,
)
from maxtext.data.chat_messages import media_parts, template_tools
from maxtext.data.chat_template import GUARDED, MARK_GENERATION, iterate_texts
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.grammar import GrammarSpec
from maxtext.inference.multimodal import EncodedPrompt, PromptEncoder
from maxtext.inference.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, SamplingParams

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 128
_MAX_PARTS = 256  # of one message
_MAX_BIAS = 100
MAX_TOOLS, _MAX_REQUIRED_CALLS = 128, 16
_MAX_PATH = 4096  # characters
_MAX_FIELDS, _MAX_VALUES, _MAX_WHITESPACE, _MAX_TOTAL_LOGPROBS = 64, 2**16, 2**15, 2_000_000

_Penalty = Annotated[float, Field(ge=-2, le=2)]


def _as_list(stop: Any) -> Any:
  return [] if stop is None else [stop] if isinstance(stop, str) else stop


_Stops = Annotated[
  list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]],
  Field(max_length=MAX_STOPS),
  BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
]


def _read_biases(biases: Any) -> Any:
  """Biases by token, checked here: pydantic would report each wrong one of thousands."""
  if biases is None:
    return {}
  if not isinstance(biases, dict):
    raise ValueError("must be an object of token ids and numbers")
  if len(biases) > MAX_LOGIT_BIAS:
    raise ValueError(f"{len(biases)} tokens have a bias, and {MAX_LOGIT_BIAS} may")
  found = {}
  for token, bias in biases.items():
    if not re.fullmatch(r"[0-9]{1,9}", str(token)):
      raise ValueError(f"{str(token)[:20]!r} is not a token id")
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
      raise ValueError(f"the bias of token {token} must be a number from -{_MAX_BIAS} to {_MAX_BIAS}")
    found[int(token)] = float(bias)
  return found


_LogitBias = Annotated[dict[int, float], BeforeValidator(_read_biases, json_schema_input_type=dict[str, float] | None)]


def _prompt_kind(prompt: Any) -> str:
  if not isinstance(prompt, list):
    return "text"
  first = prompt[0] if prompt else 0
  return "texts" if isinstance(first, str) else "tokens" if isinstance(first, int) else "lists_of_tokens"


def _validate_prompt(prompt: Any) -> Any:
  kind = {"texts": str, "tokens": int, "lists_of_tokens": list}.get(_prompt_kind(prompt))
  if kind is None:
    return prompt
  same_kind = all(isinstance(one, kind) for one in prompt)
  if not same_kind or (kind is list and not all(isinstance(token, int) for one in prompt for token in one)):
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of lists of token ids")
  return prompt


# The first element decides the kind: trying each kind on every element would take seconds.
_Prompt = Annotated[
  Annotated[str, Tag("text")]
  | Annotated[list[str], Tag("texts")]
  | Annotated[list[int], Tag("tokens")]
  | Annotated[list[list[int]], Tag("lists_of_tokens")],
  Discriminator(_prompt_kind),
  BeforeValidator(_validate_prompt),
]


@dataclass(frozen=True)
class RequestLimits:
  """Limits of one HTTP request, checked before any work is done for it.

  Attributes:
    outputs: prompts times `n`.
    prompt_tokens: tokens of one prompt.
    prompt_characters: the most characters that so many tokens can hold.
    output_tokens: tokens of one output.
  """

  outputs: int
  prompt_tokens: int
  prompt_characters: int
  output_tokens: int

  @staticmethod
  def of(tokenizer: TextTokenizer, prompt_tokens: int, outputs: int, output_tokens: int) -> "RequestLimits":
    """Computes `prompt_characters` from the longest token of the vocabulary."""
    return RequestLimits(outputs, prompt_tokens, prompt_tokens * _longest_token(tokenizer), output_tokens)

  def check_outputs(self, prompts: int, n: int) -> None:
    """Raises if there are more outputs than the queue could ever take."""
    if prompts * n > self.outputs:
      raise ConfigError(f"{prompts} prompts with n={n} are more than the {self.outputs} outputs of a request.")

  def check_logprobs(self, outputs: int, prompt_lengths: Sequence[int], request: "GenerationRequest") -> None:
    """Raises if the log-probabilities would take long to encode; a prompt may have fewer tokens than its length."""
    most, in_prompt = request.max_output_tokens, request.num_prompt_logprobs
    tokens = self.output_tokens if most is None else min(most, self.output_tokens)
    if request.num_logprobs and outputs * tokens * (1 + request.num_logprobs) > _MAX_TOTAL_LOGPROBS:
      raise ConfigError(
        f"{outputs} outputs of {tokens} tokens with {request.num_logprobs} top logprobs each are more than "
        f"{_MAX_TOTAL_LOGPROBS} logprobs: lower n, max_tokens or the number of logprobs."
      )
    tokens = request.n * sum(min(length, self.prompt_tokens) for length in prompt_lengths)
    if in_prompt is not None and tokens * (1 + in_prompt) > _MAX_TOTAL_LOGPROBS:
      raise ConfigError(
        f"Prompts of {tokens} tokens with {in_prompt} top logprobs each are more than {_MAX_TOTAL_LOGPROBS} logprobs: "
        "send fewer prompts, or lower n or the number of logprobs."
      )

  def check_length(self, length: int, unit: Literal["characters", "tokens"]) -> None:
    """Raises if a prompt of this length cannot fit."""
    if length > (self.prompt_characters if unit == "characters" else self.prompt_tokens):
      raise ConfigError(f"The prompt has {length} {unit}, more than max_prefill_predict_length={self.prompt_tokens}.")


class StreamOptions(BaseModel):
  """Options of a stream."""

  include_usage: bool = False


class TextFormat(BaseModel):
  """Any text."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["text"]
  grammar_spec: ClassVar[None] = None


class JsonObjectFormat(BaseModel):
  """Any JSON object."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["json_object"]
  grammar_spec: ClassVar[GrammarSpec] = GrammarSpec("response_format", "json", '{"type": "object"}')


class JsonSchema(BaseModel):
  """A JSON schema. It is enforced whatever `strict` says."""

  model_config = ConfigDict(extra="forbid")

  name: str
  description: str | None = None
  json_schema: dict[str, Any] = Field(alias="schema")
  strict: bool | None = None


class JsonSchemaFormat(BaseModel):
  """JSON that matches a schema."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["json_schema"]
  json_schema: JsonSchema

  @property
  def grammar_spec(self) -> GrammarSpec:
    """The grammar of the schema."""
    return GrammarSpec("response_format.json_schema.schema", "json", json.dumps(self.json_schema.json_schema))


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
  """Grammars beyond OpenAI's `response_format`, with vLLM's names."""

  model_config = ConfigDict(extra="forbid")

  regex: str

  @property
  def grammar_spec(self) -> GrammarSpec:
    """The grammar of the expression, which the whole output matches."""
    return GrammarSpec("structured_outputs.regex", "regex", self.regex)


class RequestBody(BaseModel):
  """The body of a request."""

  model_config = ConfigDict(extra="forbid")

  def check(self, limits: RequestLimits) -> None:
    """Raises `ConfigError` if the request exceeds a limit that its fields do not have themselves."""


class GenerationRequest(RequestBody):
  """The common fields of completions and chats. Those from `top_k` on are not OpenAI's; they have vLLM's names."""

  model: str | None = None
  max_tokens: int | None = Field(None, ge=0)
  temperature: float | None = Field(None, ge=0, le=10)
  top_p: float | None = Field(None, gt=0, le=1)
  n: int = Field(1, ge=1, le=16)
  stop: _Stops = Field(default_factory=list)
  seed: int | None = None
  presence_penalty: _Penalty = 0.0
  frequency_penalty: _Penalty = 0.0
  stream: bool = False
  stream_options: StreamOptions | None = None
  user: str | None = None
  logit_bias: _LogitBias = Field(default_factory=dict)
  response_format: ResponseFormat | None = None
  top_k: int | None = Field(None, ge=-1, lt=2**31)
  min_p: float = Field(0.0, ge=0, le=1)
  repetition_penalty: float = Field(1.0, gt=0, le=10)
  min_tokens: int = Field(0, ge=0, lt=2**30)
  stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_TOKENS - 3)
  ignore_eos: bool = False
  prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
  structured_outputs: StructuredOutputs | None = None

  @model_validator(mode="after")
  def _streams(self) -> "GenerationRequest":
    if self.stream_options and not self.stream:
      raise ValueError("stream_options: only with stream=true")
    return self

  @property
  def max_output_tokens(self) -> int | None:
    """Most tokens of an output; None is as many as fit."""
    return self.max_tokens

  @property
  def num_logprobs(self) -> int:
    """Number of most likely tokens that are reported with each token."""
    return 0

  @property
  def num_prompt_logprobs(self) -> int | None:
    """The same for the tokens of the prompt; None if they are not reported."""
    return self.prompt_logprobs

  @property
  def offered_names(self) -> set[str]:
    """The names of the tools that an output may call."""
    return set()

  @property
  def max_calls(self) -> int | None:
    """Most tool calls of an output that are reported; None is all."""
    return None

  def answer_format(self, tokenizer: TextTokenizer) -> AnswerFormat | None:
    """The format of outputs of several parts; None if all of an output is its text."""
    return None

  @property
  def grammar_spec(self) -> GrammarSpec | None:
    """The grammar of every output; None is any text."""
    schema = self.response_format.grammar_spec if self.response_format else None
    if schema and self.structured_outputs:
      raise ConfigError("response_format and structured_outputs both set a grammar: leave one out.")
    spec = self.structured_outputs.grammar_spec if self.structured_outputs else schema
    for name in ("min_tokens", "ignore_eos"):
      if spec and getattr(self, name):
        raise ConfigError(f"{name}: {spec.field} decides where the output ends: leave {name} out.")
    return spec

  def sampling_params(self, default: SamplingParams, index: int) -> SamplingParams:
    """The sampling parameters of output `index` of `n`; fields that are not set have the server's default."""

    def value_or(value: Any, otherwise: Any) -> Any:
      return otherwise if value is None else value

    return replace(
      default,
      temperature=value_or(self.temperature, default.temperature),
      top_p=value_or(self.top_p, default.top_p),
      top_k=max(value_or(self.top_k, default.top_k), 0),
      min_p=self.min_p,
      logit_bias=self.logit_bias,
      seed=secrets.randbits(32) if self.seed is None else self.seed + index,
      repetition_penalty=self.repetition_penalty,
      presence_penalty=self.presence_penalty,
      frequency_penalty=self.frequency_penalty,
      min_tokens=self.min_tokens,
      max_tokens=self.max_output_tokens,
      stop_token_ids=tuple(dict.fromkeys((*(() if self.ignore_eos else default.stop_token_ids), *self.stop_token_ids))),
      ignore_eos=self.ignore_eos,
      stop=tuple(self.stop),
      logprobs=self.num_logprobs,
      prompt_logprobs=self.num_prompt_logprobs,
    )


class CompletionRequest(GenerationRequest):
  """`/v1/completions`."""

  prompt: _Prompt
  logprobs: int | None = Field(None, ge=0, le=5)
  echo: bool = False

  @property
  def max_output_tokens(self) -> int | None:
    return 16 if self.max_tokens is None else self.max_tokens

  @property
  def num_logprobs(self) -> int:
    return self.logprobs or 0

  @property
  def num_prompt_logprobs(self) -> int | None:
    echoed = self.logprobs if self.echo else None
    return max((count for count in (echoed, self.prompt_logprobs) if count is not None), default=None)

  def check(self, limits: RequestLimits) -> None:
    prompts = _separate(self.prompt)
    limits.check_outputs(len(prompts), self.n)
    limits.check_logprobs(len(prompts) * self.n, [len(prompt) for prompt in prompts], self)
    for prompt in prompts:
      check_prompt(limits, prompt)

  has_media: ClassVar[bool] = False
  remote_media: ClassVar[tuple[str, ...]] = ()

  def encoded(self, prompts: PromptEncoder, fetched: Mapping[str, bytes] = MappingProxyType({})) -> list[EncodedPrompt]:
    """The tokens of every prompt."""
    return [(tokens, None) for tokens in _encode(self.prompt, prompts.tokenizer)]


class EmbeddingRequest(RequestBody):
  """`/v1/embeddings`."""

  model: str | None = None
  input: _Prompt
  encoding_format: Literal["float", "base64"] = "float"
  user: str | None = None

  def check(self, limits: RequestLimits) -> None:
    prompts = _separate(self.input)
    limits.check_outputs(len(prompts), 1)
    for prompt in prompts:
      check_prompt(limits, prompt)

  def encoded(self, tokenizer: TextTokenizer) -> list[list[int]]:
    """The tokens of every input."""
    return _encode(self.input, tokenizer)

  def response(self, model: str, embeddings: Sequence[np.ndarray], num_tokens: int) -> dict[str, Any]:
    """The response."""
    used = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    data = [
      {"object": "embedding", "index": index, "embedding": self._value(embedding)}
      for index, embedding in enumerate(embeddings)
    ]
    return {"object": "list", "data": data, "model": model, "usage": used}

  def _value(self, embedding: np.ndarray) -> list[float] | str:
    if self.encoding_format == "float":
      return embedding.tolist()
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()


def check_prompt(limits: RequestLimits, prompt: str | list[int]) -> None:
  """Raises `ConfigError` if a prompt cannot fit, or would take long to tokenize."""
  limits.check_length(len(prompt), "characters" if isinstance(prompt, str) else "tokens")
  if isinstance(prompt, str):
    _check_whitespace(prompt)


def _separate(prompt: Any) -> list[Any]:
  """The prompts of a field that has one or several."""
  several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
  return prompt if several else [prompt]


def _encode(prompt: Any, tokenizer: TextTokenizer) -> list[list[int]]:
  """The tokens of the prompts of a field."""
  return [tokenizer.encode(one).tolist() if isinstance(one, str) else one for one in _separate(prompt)]


class TextPart(BaseModel):
  """A part of a message."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["text"]
  text: str


class MediaURL(BaseModel):
  """A medium within the request itself, or behind a URL of a host that is allowed."""

  model_config = ConfigDict(extra="forbid")

  url: str


class ImageURL(MediaURL):
  """An image. `detail` is accepted, and images are always read in full."""

  detail: Literal["auto", "low", "high"] | None = None


class ImagePart(BaseModel):
  """An image of a message."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["image_url"]
  image_url: ImageURL


class VideoPart(BaseModel):
  """A video of a message, as in vLLM."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["video_url"]
  video_url: MediaURL


class InputAudio(BaseModel):
  """A sound in base64."""

  model_config = ConfigDict(extra="forbid")

  data: str
  format: Literal["wav", "mp3"]


class AudioPart(BaseModel):
  """A sound of a message."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["input_audio"]
  input_audio: InputAudio


class CalledFunction(BaseModel):
  """The function that a tool call names, and its arguments as JSON text, or as an object."""

  model_config = ConfigDict(extra="forbid")

  name: str = Field(max_length=256)
  arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
  """A call of a tool in an earlier answer."""

  model_config = ConfigDict(extra="forbid")

  id: str | None = None
  index: int | None = None  # of a stream
  type: Literal["function"] = "function"
  function: CalledFunction


_Part = Annotated[TextPart | ImagePart | VideoPart | AudioPart, Field(discriminator="type")]


class ChatMessage(BaseModel):
  """One message of a conversation. The reasoning of an earlier answer may have any of its three names."""

  model_config = ConfigDict(extra="forbid")

  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: str | Annotated[list[_Part], Field(max_length=_MAX_PARTS)] | None = None
  name: str | None = Field(None, max_length=64)
  tool_calls: list[ToolCall] | None = Field(None, max_length=_MAX_PARTS)
  tool_call_id: str | None = Field(None, max_length=256)
  reasoning_content: str | None = None
  reasoning: str | None = None
  thinking: str | None = None
  # OpenAI's client sends these back with an answer, without a value.
  refusal: None = None
  annotations: None = None
  audio: None = None
  function_call: None = None

  @property
  def text(self) -> dict[str, Any]:
    """The message without its media."""
    found = self.model_dump(exclude_none=True)
    if isinstance(self.content, list):
      found["content"] = [part.text for part in self.content if isinstance(part, TextPart)]
    return found

  @property
  def remote_media(self) -> list[str]:
    """The URLs of media that are not within the request."""
    parts = self.content if isinstance(self.content, list) else []
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    urls += [part.video_url.url for part in parts if isinstance(part, VideoPart)]
    return [url for url in urls if not url.startswith("data:")]

  @property
  def has_media(self) -> bool:
    """Whether it has parts other than text."""
    return isinstance(self.content, list) and not all(isinstance(part, TextPart) for part in self.content)

  @model_validator(mode="after")
  def _has_content(self) -> "ChatMessage":
    if self.content is None and not self.tool_calls:
      raise ValueError("content: a message without tool_calls needs it")
    return self


class FunctionDefinition(BaseModel):
  """A function that may be called. Other fields are the template's."""

  model_config = ConfigDict(extra="allow")

  name: str = Field(pattern=f"^{NAME}$", max_length=256)
  parameters: dict[str, Any] | None = None


class Tool(BaseModel):
  """A tool that may be called."""

  model_config = ConfigDict(extra="allow")

  type: Literal["function"] = "function"
  function: FunctionDefinition


class FunctionName(BaseModel):
  """The name of a function."""

  model_config = ConfigDict(extra="forbid")

  name: str


class NamedTool(BaseModel):
  """The tool that must be called."""

  model_config = ConfigDict(extra="forbid")

  type: Literal["function"] = "function"
  function: FunctionName


# Variables of a template that come from other fields, or are not for clients.
_OWN_VALUES = frozenset(
  {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", GUARDED, MARK_GENERATION}
) | {"answer", "expand", "self", "template"}  # arguments of ours that variables of a template are beside


class ChatCompletionRequest(GenerationRequest):
  """`/v1/chat/completions`."""

  messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
  max_completion_tokens: int | None = Field(None, ge=1)
  logprobs: bool = False
  top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
  tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
  tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
  parallel_tool_calls: bool = True
  reasoning_effort: str | None = Field(None, max_length=64)
  chat_template_kwargs: dict[str, Any] | None = None

  @property
  def max_output_tokens(self) -> int | None:
    return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

  @property
  def num_logprobs(self) -> int:
    return self.top_logprobs or 0

  @property
  def grammar_spec(self) -> GrammarSpec | None:
    spec, required = super().grammar_spec, self._required_tools
    if not required:
      return spec
    for name, given in ((spec and spec.field, spec), ("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
      if given:
        raise ConfigError(f"{name}: tool_choice decides what the answer is: leave {name} out.")
    several = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
    return GrammarSpec("tools", "json", required_calls_schema(required, _MAX_REQUIRED_CALLS if several else 1))

  def answer_format(self, tokenizer: TextTokenizer) -> AnswerFormat | None:
    if self._required_tools:
      return AnswerFormat(required_calls, ())
    return None if super().grammar_spec else template_answer_format(tokenizer)

  @property
  def offered_names(self) -> set[str]:
    return {tool.function.name for tool in self._offered_tools}

  @property
  def max_calls(self) -> int | None:
    return None if self.parallel_tool_calls else 1

  @property
  def _offered_tools(self) -> list[Tool]:
    return [] if self.tool_choice == "none" else self.tools or []

  @property
  def _required_tools(self) -> list[dict[str, Any]]:
    """The tools of which the answer must call one; empty if it may be text."""
    if self.tool_choice in (None, "auto", "none"):
      return []
    name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
    found = [tool.model_dump() for tool in self._offered_tools if name in (None, tool.function.name)]
    if not found:
      raise ConfigError(f"tool_choice: the request has no tool{f' {name[:100]!r}' if name else ''} to call.")
    return found

  def check(self, limits: RequestLimits) -> None:
    limits.check_outputs(1, self.n)
    limits.check_logprobs(self.n, [limits.prompt_tokens], self)
    limits.check_length(len(self.messages), "tokens")  # a message has at least one
    texts = list(iterate_texts([[message.text for message in self.messages], self._values]))
    limits.check_length(sum(map(len, texts)), "characters")
    for text in texts:
      _check_whitespace(text)
    if reserved := sorted(_OWN_VALUES & (self.chat_template_kwargs or {}).keys()):
      raise ConfigError(f"chat_template_kwargs: {', '.join(reserved)} cannot be set here.")

  @property
  def has_media(self) -> bool:
    return any(message.has_media for message in self.messages)

  @property
  def remote_media(self) -> list[str]:
    return [url for message in self.messages for url in message.remote_media]

  def encoded(self, prompts: PromptEncoder, fetched: Mapping[str, bytes] = MappingProxyType({})) -> list[EncodedPrompt]:
    """The tokens of the conversation with the start of the assistant's message, and its media."""
    messages = [message.model_dump(exclude_none=True) for message in self.messages]
    for part in media_parts(messages):
      medium = part[part["type"]]
      if medium.get("url") in fetched:
        medium["bytes"] = fetched[medium["url"]]
    return [prompts.chat(messages, self._values)]

  @property
  def _values(self) -> dict[str, Any]:
    """The other variables of the template."""
    tools = template_tools([tool.model_dump(exclude_unset=True) for tool in self._offered_tools])
    found = {"tools": tools, "reasoning_effort": self.reasoning_effort}
    return {name: value for name, value in found.items() if value is not None} | (self.chat_template_kwargs or {})


class LoadAdapterRequest(RequestBody):
  """`/v1/load_lora_adapter`, with vLLM's fields."""

  lora_name: str
  lora_path: str = Field(min_length=1, max_length=_MAX_PATH)


class UnloadAdapterRequest(RequestBody):
  """`/v1/unload_lora_adapter`, with vLLM's fields."""

  lora_name: str


RequestT = TypeVar("RequestT", bound=RequestBody)


def parse(kind: type[RequestT], raw: bytes, limits: RequestLimits) -> RequestT:
  """Parses a request body; raises `ConfigError` if it is invalid or too large.

  JSON parsers and pydantic hold Python's global lock until they are done, so bodies that would take long, with many
  values or fields, are rejected first.
  """
  if (values := count_values(raw)) > _MAX_VALUES + limits.prompt_tokens:
    raise ConfigError(f"The request has about {values} values, more than {_MAX_VALUES + limits.prompt_tokens}.")
  try:
    fields = from_json(raw)
  except ValueError as error:
    raise ConfigError(f"The request is not valid JSON: {error}.") from None
  _check_fields(fields)
  try:
    request = kind.model_validate(fields)
  except ValidationError as error:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    raise ConfigError(f"{where}: {first['msg']}" if where else first["msg"]) from None
  request.check(limits)
  return request


_SCHEMAS = ("schema", "tools", "logit_bias")  # objects of the client's own, or with a limit of their own


def _check_fields(fields: Any) -> None:
  """Raises on an object with many fields, each of which pydantic would report as an error. Schemas are exempt."""
  stack = [fields]
  while stack:
    value = stack.pop()
    if isinstance(value, list):
      stack += [one for one in value if isinstance(one, dict | list)]
    elif isinstance(value, dict):
      if len(value) > _MAX_FIELDS:
        raise ConfigError(f"The request has an object of {len(value)} fields, more than {_MAX_FIELDS}.")
      stack += [one for name, one in value.items() if name not in _SCHEMAS and isinstance(one, dict | list)]


def count_values(raw: bytes) -> int:
  """An upper bound of the number of values in a JSON text, in one pass and without parsing it."""
  plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
  if (strings := plain.count(b'"') // 2) > _MAX_VALUES:
    return strings
  between = b"".join(plain.split(b'"')[::2])
  return 1 + sum(between.count(mark) for mark in (b",", b"[", b"{"))


def _check_whitespace(text: str) -> None:
  """Raises on long runs of whitespace: the time of a tokenizer's regex grows with the square of their length."""
  if any(
    text[start : start + _MAX_WHITESPACE].isspace()
    for start in range(0, len(text) - _MAX_WHITESPACE + 1, _MAX_WHITESPACE)
  ):
    raise ConfigError(f"The prompt has {_MAX_WHITESPACE} or more characters of whitespace in a row.")


@cache
def template_answer_format(tokenizer: TextTokenizer) -> AnswerFormat | None:
  """The format of answers by the tokenizer's chat template."""
  return AnswerFormat.of(tokenizer)


@cache
def _longest_token(tokenizer: TextTokenizer) -> int:
  return max(1, *(len(tokenizer.decode([token])) for token in range(tokenizer.vocab_size)))
