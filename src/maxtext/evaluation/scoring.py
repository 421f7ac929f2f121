"""Log-likelihoods and generations of an `LLM`, by the programs that also serve: every task is scored with them.

A server that echoes a prompt's log-probabilities gives the same numbers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
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

  Attributes:
    llm: the model.
    max_length: most tokens of a context and its continuation together.
    num_truncated: how many contexts have lost tokens at their beginning, since they did not fit.
  """

  def __init__(self, llm: LLM) -> None:
    self.llm, self.max_length, self.num_truncated = llm, llm.engine.max_prompt_len, 0

  @property
  def prefix(self) -> int:
    """The token in front of a text without a context: that which begins documents, or else ends them."""
    tokenizer = self.llm.tokenizer
    found = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
    if found is None:
      raise ConfigError("The tokenizer has no token that begins or ends a document, to predict the first token from.")
    return found

  def encode(self, text: str, special: bool = False) -> list[int]:
    """The tokens of a prompt. Names of special tokens are plain text, unless `special`."""
    tokenizer = self.llm.tokenizer
    begins = special and tokenizer.bos is not None and text.startswith(tokenizer.vocabulary.name(tokenizer.bos))
    return [*tokenizer.vocabulary.encode(text, special)] if begins else tokenizer.encode(text, special).tolist()

  def encode_prompt(self, prompt: str) -> list[int]:
    """The tokens of a prompt; with `use_chat_template`, of a user's message."""
    return encode_prompt(self.llm.tokenizer, prompt, self.llm.config.use_chat_template)

  def encode_pair(self, context: str, continuation: str, special: bool = False) -> TokenPair:
    """The tokens of a context and its continuation, as they are together: spaces between belong to the continuation."""
    if not context:
      tokens = list(self.llm.tokenizer.vocabulary.encode(continuation, special))
      return (tokens[:1], tokens[1:]) if tokens[:1] == [self.prefix] else ([self.prefix], tokens)
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    before = self.encode(stripped, special)
    after = self.encode(stripped + continuation, special)[len(before) :]
    # Where the last token of the context takes in all of the continuation, this is encoded alone.
    after = after or self.llm.tokenizer.encode_continuation(continuation, special=special)
    return before or [self.prefix], after  # a context of white space alone has no token

  def loglikelihoods(self, pairs: Iterable[TokenPair], what: str = "scoring") -> Iterator[Loglikelihood]:
    """The log-likelihoods of continuations, in order. A context that does not fit loses tokens at its beginning.

    Prompts are prefilled one after the other anyway, and the log-probabilities of many long ones would fill the memory.
    """
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    for done, (context, continuation) in enumerate(pairs):
      show_phase(f"{what}: {done:,} done")
      (output,) = self.llm.generate(self._joined(context, continuation, what), params)
      assert output.prompt_logprobs is not None
      scored = output.prompt_logprobs[-len(continuation) :]
      assert len(scored) == len(continuation), "a token stands before each one that is scored"
      value = sum(one.logprob for one in scored)
      _check_numbers(what, [value])
      yield Loglikelihood(value, all(one.logprob == one.top[0][1] for one in scored))

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
    longest = self.llm.engine.max_model_len
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
      for output in self.llm.generate(block, fitting):
        _check_numbers(what, output.logprobs or ())
        yield output.text

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


def _check_numbers(what: str, log_probs: Iterable[float]) -> None:
  """Raises `RunError` if one is no number, which comparisons would pass over in silence."""
  if any(map(math.isnan, log_probs)):
    raise RunError(f"{what}: the model's log-probabilities are NaN, so its weights are: take an earlier checkpoint.")
