"""Answers that keep a form, a JSON schema or a regular expression: which tokens may come next, on llguidance.

A grammar is compiled once; each answer then goes through it with a `Path` of its own. The scheduler asks all paths for
their masks before a step, and tells each the token that was chosen. Nothing here touches a device. The library comes
with the extra `serve`, so the engine's side imports this only where there is a grammar.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par

from maxtext.configs import ConfigError
from maxtext.data.tokenizers import Tokenizer
from maxtext.inference.sampling import anything

# JSON as Python writes it. Free whitespace would be a way on that never ends.
_JSON: Any = {
  "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False,
}  # fmt: skip

_WRITE = {
  "json": lambda text: llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON),
  "regex": llguidance.LLMatcher.grammar_from_regex,
}


@dataclass(frozen=True)
class Form:
  """What an answer must be: the field of a request that says it, and a schema as JSON text or an expression."""

  field: str
  kind: Literal["json", "regex"]
  text: str


class Path:
  """How far one answer has come."""

  def __init__(self, matcher: llguidance.LLMatcher) -> None:
    self.matcher = matcher

  def take(self, token: int) -> Literal["stop", "misfit"] | None:
    """Goes on by a token: to the end, to where the grammar cannot be followed, or to where more may come."""
    if not self.matcher.consume_token(token):
      return "misfit"
    return "stop" if self.matcher.is_stopped() else None


class Grammar:
  """A compiled form."""

  def __init__(self, matcher: llguidance.LLMatcher) -> None:
    self._matcher = matcher

  def begin(self) -> Path:
    """The path of a new answer."""
    return Path(self._matcher.deep_copy())


class Grammars:
  """Compiles forms for one tokenizer, and remembers the last ones.

  Args:
    tokenizer: must have an end of a document.
    vocab: logits of the model, which may be more than there are tokens.
  """

  def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
    self._tokens = tokenizer.for_grammars(vocab)
    self.compile = lru_cache(maxsize=64)(self._compile)

  def _compile(self, form: Form) -> Grammar:
    try:
      grammar = _WRITE[form.kind](form.text)
    except ValueError as error:  # NaN, or half of a surrogate pair
      raise ConfigError(f"{form.field}: {error}.") from None
    matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
    if matcher.is_error():
      raise ConfigError(f"{form.field}: {' '.join(matcher.get_error().split())}")
    matcher.compute_bitmask()
    if matcher.is_error():  # a reference to itself, say
      raise ConfigError(f"{form.field}: no answer can be like that.")
    return Grammar(matcher)


def masks(paths: Mapping[int, Path], slots: int, vocab: int) -> np.ndarray:
  """Bits of the tokens that may come next in each slot, as `sampling.choose` reads them: all without a path."""
  bits = anything(slots, vocab)
  fill_next_token_bitmask_par(_workers(), [(path.matcher, slot) for slot, path in paths.items()], bits.view(np.int32))
  return bits


@cache
def _workers() -> llguidance.LLExecutor:
  return llguidance.LLExecutor()
