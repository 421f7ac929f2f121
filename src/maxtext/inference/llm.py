"""`LLM`: a trained model as a Python object. `maxtext decode` is written on it; `maxtext serve` on what it stands on.

Both make requests with `Loaded.request` and read what a `Scheduler` over one `Engine` says of them with `Answer`.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import jax
import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.data.tokenizers import Message, TextTokenizer
from maxtext.inference.answer import Answer
from maxtext.inference.engine import Engine, checked_params
from maxtext.inference.loading import Loaded
from maxtext.inference.sampling import SamplingParams
from maxtext.inference.scheduler import Finish, Request
from maxtext.inference.source import resolve_draft, resolve_model

Prompt = str | Sequence[int]
OnText = Callable[[str], None]


@dataclass(frozen=True)
class RequestOutput:
  """The answer to one prompt.

  Attributes:
    prompt_token_ids: what was answered.
    text: without the stop text or stop token that ended it.
    token_ids: all that were written; a stop token, or the tokens of a stop text, are among them.
    finish_reason: "stop", or "length" where there was no room or `max_tokens` were written.
    versions: for each token, the version of the parameters that wrote it (`LLM.update_params`).
    logprobs: for each token, its log-probability as the model has it, before temperature, penalties and the like; None
      unless `SamplingParams.logprobs` is a number.
    top_logprobs: for each token, so many of the most likely tokens in its place; None likewise.
  """

  prompt_token_ids: tuple[int, ...]
  text: str
  token_ids: tuple[int, ...]
  finish_reason: Finish
  versions: tuple[int, ...]
  logprobs: tuple[float, ...] | None = None
  top_logprobs: tuple[dict[int, float], ...] | None = None

  @staticmethod
  def of(answer: Answer) -> "RequestOutput":
    """Of an answer that has ended."""
    assert answer.finish is not None
    written = [(event.token, event) for event in answer.events if event.token is not None]
    reports = answer.request.sampling_params.logprobs is not None
    return RequestOutput(
      tuple(answer.request.prompt),
      answer.text,
      tuple(token for token, _ in written),
      answer.finish,
      tuple(event.version for _, event in written),
      tuple(event.log_prob for _, event in written) if reports else None,
      tuple(dict(event.others) for _, event in written) if reports else None,
    )


class LLM:
  """A trained model that answers prompts, on all devices that JAX finds.

  One thread at a time generates, and others wait for it; `update_params` may come from any thread meanwhile.

  Args:
    model: a run's folder or checkpoint, a folder of safetensors as Hugging Face has them, or where a configuration
      starts from (a model's name, a YAML file), which needs `load_parameters_path`.
    num_speculative_tokens: tokens that are guessed in each step; the text stays the same.
    draft_model: the folder of a run that guesses them, instead of a look at the text.
    strict: refuses keys that have no effect, instead of a warning.
    **keys: as `key=value` of `maxtext decode`, such as `max_target_length=2048`, or `per_device_batch_size=32`, which
      is how many prompts are answered at once on each device.

  Raises:
    ConfigError: (a ValueError) the keys, or the folder, describe nothing that can answer.
  """

  def __init__(
    self,
    model: str | os.PathLike[str],
    *,
    num_speculative_tokens: int = 0,
    draft_model: str | os.PathLike[str] | None = None,
    strict: bool = False,
    **keys: Any,
  ) -> None:
    if num_speculative_tokens < 0:
      raise ConfigError(f"num_speculative_tokens={num_speculative_tokens}: at least 0.")
    if draft_model is not None and not num_speculative_tokens:
      raise ConfigError("draft_model: say with num_speculative_tokens how many tokens it guesses.")
    config = resolve_model(os.fspath(model), keys, strict)
    draft = None if draft_model is None else resolve_draft(os.fspath(draft_model), "draft_model")
    self._begin(Loaded.of(config, num_speculative_tokens, draft))

  @classmethod
  def of(cls, loaded: Loaded) -> "LLM":
    """Of what is loaded already."""
    llm = cls.__new__(cls)
    llm._begin(loaded)
    return llm

  def _begin(self, loaded: Loaded) -> None:
    self._loaded, self._scheduler, self._generating = loaded, loaded.scheduler(), threading.Lock()

  @property
  def config(self) -> MaxTextConfig:
    """What the keys, the folder and the environment came to."""
    return self._loaded.config

  @property
  def tokenizer(self) -> TextTokenizer:
    """The model's own."""
    return self._loaded.tokenizer

  @property
  def engine(self) -> Engine:
    """What runs the model; `engine.model` says the path, shape, dtype and sharding of every parameter."""
    return self._loaded.engine

  @property
  def version(self) -> int:
    """Of the parameters; 0 before the first `update_params`."""
    return self.engine.version

  @property
  def sampling_params(self) -> SamplingParams:
    """How prompts are answered without any: as `decode_sampling_strategy` and its keys say, greedily by default."""
    return self._loaded.sampling_params

  def generate(
    self,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    on_text: OnText | None = None,
  ) -> list[RequestOutput]:
    """Continues texts, as many at once as the engine has slots.

    Args:
      prompts: one or many, each a text or its tokens. With `use_chat_template`, a text is the first turn of a chat.
      sampling_params: for all, or one for each; None is `self.sampling_params`. The tokenizer's end-of-sequence token
        ends every answer, besides `stop_token_ids`.
      on_text: gets all text as it comes, that of several prompts mixed.

    Returns:
      The answers, in the order of the prompts.

    Raises:
      ConfigError: (a ValueError) a prompt is empty or too long, or holds what is no token. Nothing was answered then.
    """
    several = [prompts] if _is_one(prompts) else list(cast(Sequence[Prompt], prompts))
    return self._answer([self._encode(prompt) for prompt in several], sampling_params, on_text)

  def chat(
    self,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    on_text: OnText | None = None,
  ) -> list[RequestOutput]:
    """The assistant's next turn of one conversation, or of each of several, by the tokenizer's chat template.

    A message is a dict with `role` and `content`. Names of special tokens in it are text like any other.
    """
    several = [messages] if _is_conversation(messages) else cast(Sequence[Sequence[Message]], messages)
    tokens = [self.tokenizer.chat(one, answer=True).tolist() for one in several]
    return self._answer(tokens, sampling_params, on_text)

  def score(self, token_ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities of tokens, each after those before it, by the forward pass of training.

    Returns:
      float32, one fewer than there are tokens, since the first has nothing before it: of a prompt of n tokens and its
      answer, `score([*prompt, *answer])[n - 1 :]` is what `generate` reports as `logprobs`, to about five digits.
    """
    tokens, vocab = [int(token) for token in token_ids], self.engine.vocab
    if not 0 < len(tokens) <= self.engine.length:
      raise ConfigError(f"score: {len(tokens)} tokens; from 1 to max_target_length={self.engine.length} can be scored.")
    if wrong := [token for token in tokens if not 0 <= token < vocab]:
      raise ConfigError(f"{wrong[0]} is no token; they go from 0 to {vocab - 1}.")
    return self.engine.score(tokens)

  def update_params(self, params: Mapping[str, jax.Array], version: int) -> None:
    """Swaps the model's parameters without compiling anything, between two steps where some thread generates.

    Requests that have begun go on with their cache, which older parameters made; what later requests could share (the
    prefix cache, and files of `prefill_cache_dir`) is kept apart. See `Engine.update_params`; the arrays are not
    copied, so do not donate or delete them while they are in use.

    Args:
      params: all parameters and buffers by path, as a `TrainState` and `engine.model` have them, placed as there.
      version: what `RequestOutput.versions` says of the tokens that they write.

    Raises:
      ValueError: a path, shape, dtype or sharding is another; the message names the path, and nothing has changed.
    """
    model = self.engine.model
    self.engine.update_params(model.apart(checked_params(model.params | model.buffers, params)), version)

  def _encode(self, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
      return [int(token) for token in prompt]
    if self.config.use_chat_template:
      return self.tokenizer.chat([{"role": "user", "content": prompt}], answer=True).tolist()
    return self.tokenizer.encode(prompt).tolist()

  def _answer(
    self,
    prompts: list[list[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    on_text: OnText | None,
  ) -> list[RequestOutput]:
    one = self.sampling_params if sampling_params is None else sampling_params
    each = [one] * len(prompts) if isinstance(one, SamplingParams) else list(one)
    if len(each) != len(prompts):
      raise ConfigError(f"{len(each)} sampling parameters for {len(prompts)} prompts: give one, or one for each.")
    requests = [
      self._loaded.request(prompt, self._ending(params)) for prompt, params in zip(prompts, each, strict=True)
    ]
    with self._generating:
      try:
        return [RequestOutput.of(answer) for answer in self._run(requests, on_text)]
      except BaseException:  # an interrupt, too: what is under way must not come back in the next call
        self._scheduler = self._loaded.scheduler()
        raise

  def _ending(self, params: SamplingParams) -> SamplingParams:
    """With the tokenizer's end of a document among the stop tokens."""
    stops = dict.fromkeys((*self.sampling_params.stop_token_ids, *params.stop_token_ids))
    return replace(params, stop_token_ids=tuple(stops))

  def _run(self, requests: list[Request], on_text: OnText | None) -> list[Answer]:
    found = {request: Answer(request, self.tokenizer) for request in requests}
    for request in requests:
      self._scheduler.submit(request)
    for event in self._scheduler.run():
      answer = found[event.request]
      text = answer.add(event)
      if answer.finish and not event.finish:  # by a stop text
        self._scheduler.cancel(event.request)
      if on_text and text:
        on_text(text)
    return list(found.values())


def _is_one(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
  return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))


def _is_conversation(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> TypeGuard[Sequence[Message]]:
  return len(messages) > 0 and isinstance(messages[0], Mapping)
