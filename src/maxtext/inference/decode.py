"""`maxtext decode` and `maxtext chat`: one prompt, a file of prompts, or a chat in the terminal."""

import json
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.chat_answers import AnswerFormat, AnswerParts, shown_tokens
from maxtext.data.tokenizers import Message
from maxtext.inference.llm import LLM
from maxtext.inference.sampling import SamplingParams

Show = Callable[[str], None]


def decode(llm: LLM, sampling_params: SamplingParams, show: Show) -> None:
  """Completes the prompt of the configuration; shows the prompt and the output as it is generated."""
  c = llm.config
  show(c.prompt)
  params = _with_logprobs(llm, sampling_params)
  images, videos, sounds = map(_paths, (c.image_path, c.video_path, c.audio_path))
  if images or videos or sounds:
    output = llm.complete(c.prompt, images, params, show, videos=videos, sounds=sounds)
  else:
    (output,) = llm.generate([c.prompt], params, show)
  show("\n")
  for logprob, token in zip(output.logprobs or (), output.token_ids, strict=c.return_log_prob):
    show(f"{logprob:9.4f}  {token}\n")
  text = c.prompt + output.text
  if c.autoregressive_decode_assert and text != c.autoregressive_decode_assert:
    raise RunError(f"decoding gave {text!r}, and autoregressive_decode_assert={c.autoregressive_decode_assert!r}.")


def _paths(value: str) -> list[str]:
  return [path.strip() for path in value.split(",") if path.strip()]


def decode_file(llm: LLM, file: str, sampling_params: SamplingParams, show: Show) -> None:
  """Completes every line of a file; shows one line of JSON (`DecodeRecord`) for each, in their order."""
  try:
    prompts = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"--prompts-file {file} cannot be read: {error}.") from None
  for prompt, output in zip(prompts, llm.generate(prompts, _with_logprobs(llm, sampling_params)), strict=True):
    num_tokens = sum(token not in sampling_params.stop_token_ids for token in output.token_ids)
    record = DecodeRecord(prompt, output.text, output.finish_reason, num_tokens)
    logprobs = {} if output.logprobs is None else {"logprobs": output.logprobs}
    show(json.dumps(asdict(record) | logprobs, ensure_ascii=False) + "\n")


def chat(
  llm: LLM, lines: Iterable[str], sampling_params: SamplingParams, show: Show, dim: Callable[[str], str] = str
) -> None:
  """Replies to each line by the chat template. The conversation is kept until it no longer fits.

  Ctrl-C ends an answer, of which what was shown is kept; while no answer is shown it ends the chat. `dim` changes how
  the model's reasoning is shown.
  """
  answer_format, messages = AnswerFormat.of(llm.tokenizer), list[Message]()
  for line in lines:
    messages.append({"role": "user", "content": line.rstrip("\n")})
    try:
      message = _answer(llm, messages, sampling_params, answer_format, show, dim)
    except ConfigError as error:
      if len(messages) == 1:
        raise
      show(f"({error} A new conversation starts.)\n")
      messages.clear()
      continue
    messages.append(message)
    show("\n")


class _InterruptedError(Exception):
  """Ctrl-C was pressed during an answer."""


def _answer(
  llm: LLM,
  messages: list[Message],
  sampling_params: SamplingParams,
  answer_format: AnswerFormat | None,
  show: Show,
  dim: Callable[[str], str],
) -> Message:
  """The message of an answer, as far as it was shown."""
  told, interrupted = AnswerParts(), threading.Event()
  marks = shown_tokens(llm.tokenizer, answer_format.marks) if answer_format else frozenset[int]()
  opening = llm.tokenizer.render(messages, answer=True)  # it may open the reasoning
  parser = answer_format.parser(opening, ()) if answer_format else None

  def tell(parts: AnswerParts) -> None:
    if parts.reasoning:
      show(dim(parts.reasoning))
    if parts.content:
      show("\n\n" + parts.content if told.reasoning + parts.reasoning and not told.content else parts.content)
    told.reasoning, told.content = told.reasoning + parts.reasoning, told.content + parts.content

  def on_text(text: str) -> None:
    tell(parser.add(text) if parser else AnswerParts(text))
    if interrupted.is_set():  # here, since the engine must not be interrupted within a step
      raise _InterruptedError

  def on_interrupt(*_: object) -> None:
    signal.signal(signal.SIGINT, before)  # a second one ends the program at once
    interrupted.set()

  before = signal.getsignal(signal.SIGINT)
  signal.signal(signal.SIGINT, on_interrupt)
  try:
    llm.chat(messages, sampling_params, on_text, None, marks)
  except _InterruptedError:
    pass
  finally:
    signal.signal(signal.SIGINT, before)
  if parser:
    tell(parser.finish())
  reasoning = {"reasoning_content": told.reasoning} if told.reasoning else {}
  return {"role": "assistant", "content": told.content} | reasoning


def _with_logprobs(llm: LLM, sampling_params: SamplingParams) -> SamplingParams:
  """The sampling parameters, with log-probabilities if `return_log_prob` is set."""
  return replace(sampling_params, logprobs=0) if llm.config.return_log_prob else sampling_params


@dataclass(frozen=True)
class DecodeRecord:
  """The output line for one prompt of a file."""

  prompt: str
  text: str
  finish_reason: str
  num_tokens: int


if __name__ == "__main__":
  from maxtext.cli.forwarding import forward

  forward("maxtext.inference.decode")
