"""The bodies of responses of the OpenAI API, whole and in chunks of a stream."""

import secrets
import string
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from maxtext.data.chat_answers import AnswerParser, AnswerParts, FunctionCall, shown_tokens
from maxtext.data.media import AUDIO, VISION
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.detokenizer import IncrementalDetokenizer
from maxtext.inference.multimodal import EncodedPrompt
from maxtext.inference.scheduler import PromptLogprob, TokenOutput
from maxtext.serving.protocol import ChatCompletionRequest, CompletionRequest

_ID_LETTERS = string.ascii_letters + string.digits
_PROMPT_END = 8  # tokens of a prompt, which show whether it opens the model's reasoning


class ResponseBuilder:
  """Builds the response of one request, as a whole or in chunks.

  Args:
    request: the request.
    model: the name that the response gives.
    tokenizer: the model's tokenizer.
    prompts: the tokens of the prompt of each output.
  """

  def __init__(
    self,
    request: CompletionRequest | ChatCompletionRequest,
    model: str,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
  ) -> None:
    self._request, self._tokenizer = request, tokenizer
    self._chat = isinstance(request, ChatCompletionRequest)
    kind = "chat.completion" if self._chat else "text_completion"
    self._object, self._chunk_object = kind, "chat.completion.chunk" if self._chat else kind
    answer_format = request.answer_format(tokenizer)
    self.shown = shown_tokens(tokenizer, answer_format.marks) if answer_format else frozenset[int]()
    self._answers = list[_Answer]()
    for prompt in prompts:
      end = tokenizer.decode(prompt[-_PROMPT_END:], self.shown)
      parser = answer_format.parser(end, request.offered_names) if answer_format else None
      self._answers.append(_Answer(parser, request.max_calls))
    self._head = {
      "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
      "created": int(time.time()),
      "model": model,
    }

  def response(self, outputs: Sequence[IncrementalDetokenizer], prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
    """The whole response."""
    choices = []
    for index, output in enumerate(outputs):
      content: dict[str, Any]
      if self._chat:
        content = {"message": self._answers[index].message(output.text)}
      else:
        content = {"text": self._echo(output) + output.text}
      choices.append(self._choice(index, output, content, output.outputs))
    return {**self._head, "object": self._object, "choices": choices, "usage": usage(outputs, prompts)}

  def first_chunk(self, index: int) -> dict[str, Any]:
    """The first chunk of a chat, with the role."""
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return {**self._head, "object": self._chunk_object, "choices": [choice]}

  def chunk(
    self, index: int, output: IncrementalDetokenizer, text: str, token_output: TokenOutput
  ) -> dict[str, Any] | None:
    """The chunk of one token output, with its new text; None if there is nothing to tell yet."""
    ended, content = output.finish_reason is not None, dict[str, Any](text=text)
    if self._chat:
      content = {"delta": self._answers[index].delta(text, ended)}
    elif len(output.outputs) == 1:
      content["text"] = self._echo(output) + text
    reports = bool(self._request.logprobs) or token_output.prompt_logprobs is not None
    if not (any(content.values()) or ended or reports):
      return None
    return {
      **self._head,
      "object": self._chunk_object,
      "choices": [self._choice(index, output, content, [token_output])],
    }

  def usage_chunk(self, outputs: Sequence[IncrementalDetokenizer], prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
    """The last chunk, with the usage."""
    return {**self._head, "object": self._chunk_object, "choices": [], "usage": usage(outputs, prompts)}

  def _choice(
    self,
    index: int,
    output: IncrementalDetokenizer,
    content: Mapping[str, Any],
    token_outputs: Sequence[TokenOutput],
  ) -> dict[str, Any]:
    logprobs, reason = self._logprobs(token_outputs), cast("str | None", output.finish_reason)
    if reason == "stop" and self._answers[index].num_calls:
      reason = "tool_calls"
    found = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
    in_prompt = next((one.prompt_logprobs for one in token_outputs if one.prompt_logprobs is not None), None)
    if self._request.prompt_logprobs is not None and in_prompt is not None:
      found["prompt_logprobs"] = self._prompt_logprobs(output.request.prompt, in_prompt)
    return found

  def _echo(self, output: IncrementalDetokenizer) -> str:
    """The prompt as text, if the request wants it back."""
    echo = isinstance(self._request, CompletionRequest) and self._request.echo
    return self._tokenizer.decode(output.request.prompt) if echo else ""

  def _prompt_logprobs(self, prompt: Sequence[int], found: Sequence[PromptLogprob]) -> list[dict[str, Any] | None]:
    """For each token of a prompt, the likeliest tokens and itself, as vLLM has them; None for the first."""
    count = self._request.prompt_logprobs or 0
    listed: list[dict[str, Any] | None] = [None]
    for token, one in zip(prompt[1:], found, strict=True):
      ranked = {own: (logprob, rank) for rank, (own, logprob) in enumerate(one.top[:count], 1)}
      listed.append(
        {
          str(own): {"logprob": logprob, "rank": rank, "decoded_token": self._tokenizer.decode([own])}
          for own, (logprob, rank) in ({token: (one.logprob, one.rank)} | ranked).items()
        }
      )
    return listed

  def _logprobs(self, token_outputs: Sequence[TokenOutput]) -> dict[str, Any] | None:
    if self._request.logprobs is None or self._request.logprobs is False:
      return None
    known = [(output.token, output) for output in token_outputs if output.token is not None]
    if self._chat:
      return {
        "content": [
          {**self._token(token, output.logprob), "top_logprobs": [self._token(*top) for top in output.top_logprobs]}
          for token, output in known
        ]
      }
    reported = [(token, output.logprob, output.top_logprobs) for token, output in known]
    return self._listed([*self._echoed_logprobs(token_outputs), *reported])

  def _echoed_logprobs(self, token_outputs: Sequence[TokenOutput]) -> list["_Reported"]:
    """Those of the prompt's tokens, if it is echoed; the first has none."""
    if not (isinstance(self._request, CompletionRequest) and self._request.echo):
      return []
    for output in token_outputs:
      if output.prompt_logprobs is not None:
        first, *others = output.request.prompt
        pairs = zip(others, output.prompt_logprobs, strict=True)
        return [(first, None, None), *((token, one.logprob, one.top[: self._request.logprobs]) for token, one in pairs)]
    return []

  def _listed(self, reported: Sequence["_Reported"]) -> dict[str, Any]:
    return {
      "tokens": [self._tokenizer.decode([token]) for token, _, _ in reported],
      "token_logprobs": [logprob for _, logprob, _ in reported],
      "top_logprobs": [None if top is None else self._by_text(top) for _, _, top in reported],
    }

  def _by_text(self, top_logprobs: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by the text of their tokens, most likely first; of tokens with the same text, the first."""
    found: dict[str, float] = {}
    for token, logprob in top_logprobs:
      found.setdefault(self._tokenizer.decode([token]), logprob)
    return found

  def _token(self, token: int, logprob: float) -> dict[str, Any]:
    text = self._tokenizer.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


_Reported = tuple[int, float | None, Sequence[tuple[int, float]] | None]
"""A token, its log-probability, and the likeliest tokens with theirs."""


class _Answer:
  """The message of one answer, whole or in parts.

  Args:
    parser: takes the answer apart; None if all of it is its text.
    max_calls: most tool calls that are reported; None is all.
  """

  def __init__(self, parser: AnswerParser | None, max_calls: int | None) -> None:
    self._parser, self._max_calls, self.num_calls = parser, max_calls, 0

  def message(self, text: str) -> dict[str, Any]:
    """The message of a whole answer."""
    found = self._fields([self._add(text), self._finish()])
    return {"role": "assistant", "content": None if "tool_calls" in found else ""} | found

  def delta(self, text: str, ended: bool) -> dict[str, Any]:
    """The fields that new text adds."""
    before = self.num_calls
    found = self._fields([self._add(text), *([self._finish()] if ended else [])])
    for index, call in enumerate(found.get("tool_calls", ()), before):
      call["index"] = index
    return found

  def _add(self, text: str) -> AnswerParts:
    return AnswerParts(content=text) if self._parser is None else self._parser.add(text)

  def _finish(self) -> AnswerParts:
    return AnswerParts() if self._parser is None else self._parser.finish()

  def _fields(self, parts: Sequence[AnswerParts]) -> dict[str, Any]:
    left = None if self._max_calls is None else self._max_calls - self.num_calls
    calls = [call for part in parts for call in part.calls][:left]
    self.num_calls += len(calls)
    found = {
      "content": "".join(part.content for part in parts),
      "reasoning_content": "".join(part.reasoning for part in parts),
      "tool_calls": [_tool_call(call) for call in calls],
    }
    return {name: value for name, value in found.items() if value}


def _tool_call(call: FunctionCall) -> dict[str, Any]:
  """A call as the API has it. Some templates take only ids of nine letters and digits."""
  number = "".join(secrets.choice(_ID_LETTERS) for _ in range(9))
  return {"id": number, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(outputs: Sequence[IncrementalDetokenizer], prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
  """The number of prompt and completion tokens, and how many of the prompt stand for media."""
  generated = sum(token.token is not None for output in outputs for token in output.outputs)
  asked = sum(len(tokens) for tokens, _ in prompts)
  found = {"prompt_tokens": asked, "completion_tokens": generated, "total_tokens": asked + generated}
  media = sum((media.tokens for _, media in prompts if media is not None), Counter[str]())
  details = {f"{name}_tokens": media[tower] for name, tower in (("image", VISION), ("audio", AUDIO))}
  return found | {"prompt_tokens_details": details} if media else found
