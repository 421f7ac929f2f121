"""Log-likelihoods and generations of an `LLM`, by the programs that also serve: every task is scored with them.

A server that echoes a prompt's log-probabilities gives the same numbers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.llm import LLM, encode_prompt
from maxtext.inference.sampling import SamplingParams
from maxtext.status_line import show_phase

DEFAULT_MAX_TOKENS = 256
_BLOCK = 256  # prompts that are with the scheduler at once

TokenPair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context, at least one, and of the continuation that is scored."""


class Loglikelihood(NamedTuple):
  """The log-probability of a continuation, and whether greedy sampling would generate it."""

  value: float
  is_greedy: bool


class Scorer:
  """Scores texts with a model.

  Args:
    llm: the model.
    between: called between prompts, and while one is answered; what it raises ends the evaluation.

  Attributes:
    tokenizer: of the model.
    chat: whether prompts are messages of a user (`use_chat_template`).
    max_length: most tokens of a context and its continuation together.
    max_model_len: most tokens of a prompt and its output together.
    num_truncated: how many contexts have lost tokens at their beginning, since they did not fit.
  """

  tokenizer: TextTokenizer
  chat: bool
  max_length: int
  max_model_len: int
  num_truncated: int = 0

  def __init__(self, llm: LLM, between: Callable[[], None] = lambda: None) -> None:
    self._llm, self._between = llm, between
    self.tokenizer, self.chat = llm.tokenizer, llm.config.use_chat_template
    self.max_length, self.max_model_len = llm.engine.max_prompt_len, llm.engine.max_model_len

  @property
  def prefix(self) -> int:
    """The token in front of a text without a context: that which begins documents, or else ends them."""
    tokenizer = self.tokenizer
    found = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
    if found is None:
      raise ConfigError("The tokenizer has no token that begins or ends a document, to predict the first token from.")
    return found

  def encode(self, text: str, special: bool = False) -> list[int]:
    """The tokens of a prompt. Names of special tokens are plain text, unless `special`."""
    tokenizer = self.tokenizer
    begins = special and tokenizer.bos is not None and text.startswith(tokenizer.vocabulary.name(tokenizer.bos))
    return [*tokenizer.vocabulary.encode(text, special)] if begins else tokenizer.encode(text, special).tolist()

  def encode_prompt(self, prompt: str) -> list[int]:
    """The tokens of a prompt; with `use_chat_template`, of a user's message."""
    return encode_prompt(self.tokenizer, prompt, self.chat)

  def encode_pair(self, context: str, continuation: str, special: bool = False) -> TokenPair:
    """The tokens of a context and its continuation, as they are together: spaces between belong to the continuation."""
    if not context:
      tokens = list(self.tokenizer.vocabulary.encode(continuation, special))
      return (tokens[:1], tokens[1:]) if tokens[:1] == [self.prefix] else ([self.prefix], tokens)
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    before = self.encode(stripped, special)
    after = self.encode(stripped + continuation, special)[len(before) :]
    # Where the last token of the context takes in all of the continuation, this is encoded alone.
    after = after or self.tokenizer.encode_continuation(continuation, special=special)
    return before or [self.prefix], after  # a context of white space alone has no token

  def loglikelihoods(self, pairs: Iterable[TokenPair], what: str = "scoring") -> Iterator[Loglikelihood]:
    """The log-likelihoods of continuations, in order. A context that does not fit loses tokens at its beginning.

    Prompts are prefilled one after the other anyway, and the log-probabilities of many long ones would fill the memory.
    """
    for done, (context, continuation) in enumerate(pairs):
      show_phase(f"{what}: {done:,} done")
      found = self._loglikelihood(self._joined(context, continuation, what), len(continuation))
      _check_numbers(what, [found.value])
      yield found

  def rolling(self, tokens: Sequence[int]) -> Iterator[TokenPair]:
    """Pairs that predict each token of a document once: the first from `prefix`, and as few pairs as can be. The last
    has as much context as fits, the others one token."""
    size = self.max_length - 1
    for begin in range(0, len(tokens), size):
      end = min(begin + size, len(tokens))
      yield (tokens[end - size - 1 : begin] if begin else [self.prefix]), tokens[begin:end]

  def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], what: str) -> Iterator[str]:
    """The texts that continue prompts, in order. A prompt loses tokens at its beginning where the output does not fit
    otherwise; an empty one is `prefix`."""
    longest = self.max_model_len
    for start in range(0, len(prompts), _BLOCK):
      show_phase(f"{what}: {start:,} of {len(prompts):,}")
      block, fitting = [], []
      for prompt, one in zip(prompts[start : start + _BLOCK], params[start : start + _BLOCK], strict=True):
        most = min(DEFAULT_MAX_TOKENS, longest // 2) if one.max_tokens is None else one.max_tokens
        if most >= longest:
          raise ConfigError(
            f"{what}: max_tokens={most} leaves no room for a prompt in max_target_length={longest}: set a larger "
            f"max_target_length, or fewer tokens in the task."
          )
        block.append(self._truncated(prompt or [self.prefix], min(longest - most, self.max_length)))
        fitting.append(replace(one, max_tokens=most, logprobs=0))
      for text, log_probs in self._answers(block, fitting):
        _check_numbers(what, log_probs)
        yield text

  def _loglikelihood(self, tokens: Sequence[int], count: int) -> Loglikelihood:
    """Of the last `count` tokens."""
    self._between()
    (output,) = self._llm.generate(tokens, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    scored = output.prompt_logprobs[-count:]
    assert len(scored) == count, "a token stands before each one that is scored"
    return Loglikelihood(sum(one.logprob for one in scored), all(one.logprob == one.top[0][1] for one in scored))

  def _answers(
    self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
  ) -> list[tuple[str, Sequence[float]]]:
    """Text and log-probabilities of each."""
    outputs = self._llm.generate(prompts, params, lambda text: self._between())
    return [(output.text, output.logprobs or ()) for output in outputs]

  def _joined(self, context: Sequence[int], continuation: Sequence[int], what: str) -> list[int]:
    if not continuation or len(continuation) >= self.max_length:
      raise ConfigError(
        f"{what}: a continuation of {len(continuation)} tokens cannot be scored: it needs at least one, and with a "
        f"token before it at most max_prefill_predict_length={self.max_length}."
      )
    return self._truncated([*context, *continuation], self.max_length)

  def _truncated(self, tokens: Sequence[int], length: int) -> list[int]:
    self.num_truncated += len(tokens) > length
    return list(tokens[-length:])


class Rehearsal(Scorer):
  """Encodes what a `Scorer` would score, without a model: what cannot be scored shows before there is one. Every
  log-probability is 0, and every text empty."""

  def __init__(self, config: MaxTextConfig, tokenizer: TextTokenizer, max_length: int) -> None:
    self.tokenizer, self.chat = tokenizer, config.use_chat_template
    self.max_length, self.max_model_len = max_length, config.max_target_length

  def _loglikelihood(self, tokens: Sequence[int], count: int) -> Loglikelihood:
    return Loglikelihood(0.0, True)

  def _answers(
    self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
  ) -> list[tuple[str, Sequence[float]]]:
    return [("", ())] * len(prompts)


def _check_numbers(what: str, log_probs: Iterable[float]) -> None:
  """Raises `RunError` if one is no number, which comparisons would pass over in silence."""
  if any(map(math.isnan, log_probs)):
    raise RunError(f"{what}: the model's log-probabilities are NaN, so its weights are: take an earlier checkpoint.")
