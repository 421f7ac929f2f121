"""Incremental detokenization: the text of a request's output as its tokens arrive, up to the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from maxtext.data.special_tokens import partial_match_length
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.scheduler import FinishReason, PromptLogprob, Request, TokenOutput

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 16  # tokens whose text ends in an incomplete character; what goes on so is no text of any encoding
_CONTEXT = 4  # tokens decoded again in front of new ones: the space in front of a word may depend on the word before


@dataclass(eq=False)
class IncrementalDetokenizer:
  """The output of one request so far.

  Attributes:
    shown: special tokens whose names are part of the text.
    text: the text that can be shown. Characters that may still become part of a stop string, or of an incomplete
      character, are held back.
    token_ids: all generated tokens without a stop token. Tokens of a stop string are included.
    outputs: all token outputs in the order they arrived.
    prompt_logprobs: of the tokens of the prompt but the first, if they were requested and have arrived.
    finish_reason: why generation ended; None while the request runs.
  """

  request: Request
  tokenizer: TextTokenizer
  shown: frozenset[int] = frozenset()
  text: str = ""
  finish_reason: FinishReason | None = None
  token_ids: list[int] = field(default_factory=list)
  outputs: list[TokenOutput] = field(default_factory=list)
  prompt_logprobs: Sequence[PromptLogprob] | None = None
  _decoded: str = ""  # the text of the first `_num_decoded` tokens
  _num_decoded: int = 0

  def add(self, output: TokenOutput) -> str:
    """Takes a token output of the request and returns the newly shown text. Ignored once `finish_reason` is set."""
    if self.finish_reason is not None:
      return ""
    self.outputs.append(output)
    self.prompt_logprobs = output.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs
    if output.token is not None and output.token not in self.request.sampling_params.stop_token_ids:
      self.token_ids.append(output.token)
    self.finish_reason = output.finish_reason
    text = self._decode(final=output.finish_reason is not None)
    for stop in self.request.sampling_params.stop:
      # The shown text contains no stop string, so only the part that was held back needs a search.
      if (end := text.find(stop, max(0, len(self.text) - len(stop) + 1))) >= 0:
        text, self.finish_reason = text[:end], "stop"
    held = 0 if self.finish_reason else partial_match_length(text, self.request.sampling_params.stop)
    shown = text[: len(text) - held]
    new, self.text = shown[len(self.text) :], shown
    return new

  def _decode(self, final: bool) -> str:
    """The text of all tokens. Only the tokens after `_num_decoded`, and a few before them, are decoded again."""
    first = max(self._num_decoded - _CONTEXT, 0)
    before = self.tokenizer.decode(self.token_ids[first : self._num_decoded], self.shown)
    tail = self.tokenizer.decode(self.token_ids[first:], self.shown)[len(before) :]
    held = len(self.token_ids) - self._num_decoded
    if not final and held < _MOST_HELD and tail.endswith(_INCOMPLETE):  # some bytes of the last character are missing
      return self._decoded + tail.rstrip(_INCOMPLETE)
    self._decoded, self._num_decoded = self._decoded + tail, len(self.token_ids)
    return self._decoded
