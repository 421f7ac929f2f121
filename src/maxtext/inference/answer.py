"""An answer's text as it grows: tokens to whole characters, up to the first stop text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference.scheduler import Event, Finish, Request

_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(eq=False)
class Answer:
  """What has come of a request's answer.

  Attributes:
    text: what may be shown: the rest of the tokens may yet be part of a character, or of a stop text.
    tokens: all but a stop token; those of a stop text are among them.
    events: what came, in order.
    finish: why it ended; None while it grows.
  """

  request: Request
  tokenizer: TextTokenizer
  text: str = ""
  finish: Finish | None = None
  tokens: list[int] = field(default_factory=list)
  events: list[Event] = field(default_factory=list)
  _decoded: str = ""  # the text of all tokens but the last few
  _settled: int = 0  # tokens that are in it

  def add(self, event: Event) -> str:
    """Takes an event of the request; returns the text that may now be shown. After `finish` nothing is taken."""
    if self.finish is not None:
      return ""
    self.events.append(event)
    if event.token is not None and event.token not in self.request.sampling_params.stop_token_ids:
      self.tokens.append(event.token)
    self.finish = event.finish
    text = self._read(whole=event.finish is not None)
    for stop in self.request.sampling_params.stop:
      # Shown text holds none, and what was held back may begin one, so the search starts where the last one ended.
      if (end := text.find(stop, max(0, len(self.text) - len(stop) + 1))) >= 0:
        text, self.finish = text[:end], "stop"
    shown = text if self.finish else text[: len(text) - _overlap(text, self.request.sampling_params.stop)]
    new, self.text = shown[len(self.text) :], shown
    return new

  def _read(self, whole: bool) -> str:
    """The text of all tokens. What is settled is not decoded again; a word's space may depend on the one before."""
    first = max(self._settled - _CONTEXT, 0)
    before = self.tokenizer.decode(self.tokens[first : self._settled])
    tail = self.tokenizer.decode(self.tokens[first:])[len(before) :]
    if not whole and tail.endswith(_BROKEN):  # a character whose bytes are not all there
      return self._decoded + tail.rstrip(_BROKEN)
    self._decoded, self._settled = self._decoded + tail, len(self.tokens)
    return self._decoded


_CONTEXT = 4


def _overlap(text: str, stops: Sequence[str]) -> int:
  """Characters at the end of a text that may be the beginning of a stop text."""
  return max((_begun(text[-len(stop) + 1 :] if len(stop) > 1 else "", stop) for stop in stops), default=0)


def _begun(tail: str, stop: str) -> int:
  """Characters at the end of a tail, shorter than the stop text, that it begins with."""
  start = tail.find(stop[0])
  while start >= 0 and not stop.startswith(tail[start:]):
    start = tail.find(stop[0], start + 1)
  return len(tail) - start if start >= 0 else 0
