"""Continuous batching: requests come and go, each in a slot of its own while the engine steps.

Whoever comes first is served first. Between two steps at most one piece of a prompt is prefilled, so that those who
are being answered never wait longer than for one piece. One thread drives it; others may `submit` and `cancel`.

A request is let in when there are pages for its text, and gets more as it grows. Where they run out, whoever was let in
last gives all of its pages back and is the first to wait; its text is prefilled again, prompt and answer, when there is
room. So the first always goes on, and nobody waits for one who came later.

The engine's parameters may be swapped between two steps (`Engine.update_params`). Requests that have begun go on with
the cache that they have, also half-way through their prompt; one that is prefilled again is so by the new parameters.
Rows that older parameters made, in part or as a whole, are not handed to requests that begin later.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from maxtext.inference.engine import Engine, Piece
from maxtext.inference.prefixes import Prefixes
from maxtext.inference.prompt_files import PromptFiles
from maxtext.inference.sampling import Chosen, SamplingParams
from maxtext.inference.state import Caches

if TYPE_CHECKING:
  from maxtext.inference.grammar import End, Grammar, Path

Finish = Literal["stop", "length", "cancelled", "misfit", "failed"]


@dataclass(eq=False)
class Request:
  """A prompt and how to answer it. Each is itself: two of the same content are two."""

  prompt: Sequence[int]
  sampling_params: SamplingParams = field(default_factory=SamplingParams)
  grammar: "Grammar | None" = None


@dataclass(frozen=True)
class Event:
  """A token of a request's answer, or its end, or both.

  Attributes:
    token: None where it only ends.
    log_prob: of the token, as the model has it.
    others: the likeliest tokens in its place with their log-probabilities, as many as were asked for.
    finish: why the answer ends here; None goes on. A "misfit" could not keep to its grammar.
    version: of the parameters that wrote the token (`Engine.update_params`).
  """

  request: Request
  token: int | None = None
  log_prob: float = 0.0
  others: tuple[tuple[int, float], ...] = ()
  finish: Finish | None = None
  version: int = 0


@dataclass
class _Answering:
  request: Request
  left: int  # tokens that it may still have
  answered: list[int] = field(default_factory=list)
  path: "Path | None" = None  # through the request's grammar

  @property
  def text(self) -> list[int]:
    return [*self.request.prompt, *self.answered]


@dataclass
class _Filling:
  answering: _Answering
  slot: int
  pieces: deque[Piece]
  updates: int  # of the engine's parameters, when it began
  row: Caches | None = None


class _Filled(NamedTuple):
  """The last text that was prefilled, and its row."""

  text: Sequence[int]
  row: Caches | None


class Scheduler:
  """Who waits, whose prompt is being prefilled, and who is in which slot.

  Args:
    engine: nobody else steps it.
    prefixes: beginnings that prompts share; the engine must keep rows for it.
    samples: requests that follow one of the same prompt are answered from its row.

  Attributes:
    preemptions: how often a request gave its pages back before its end.
  """

  def __init__(self, engine: Engine, prefixes: Prefixes | PromptFiles | None = None, samples: bool = False) -> None:
    self._engine, self._prefixes, self._lock = engine, prefixes, threading.Lock()
    self._samples, self._filled, self._updates = samples, _Filled([], None), engine.updates
    self._waiting: deque[_Answering] = deque()
    self._cancelled: set[Request] = set()
    self._filling: _Filling | None = None
    self._slots: list[_Answering | None] = [None] * engine.slots
    self._pages, self.preemptions = engine.pages, 0
    self._pages.clear()

  @property
  def busy(self) -> bool:
    """Whether there is anything to do."""
    return bool(self._waiting) or self._filling is not None or self.active > 0

  @property
  def waiting(self) -> int:
    """Requests that have no slot yet."""
    return len(self._waiting)

  @property
  def active(self) -> int:
    """Requests that are being answered."""
    return sum(slot is not None for slot in self._slots)

  @property
  def free_pages(self) -> int:
    """Pages of the cache that nobody has."""
    return self._pages.free

  def room(self, prompt_length: int) -> int:
    """Tokens that an answer to a prompt of this length can have; 0 where the prompt is too long, or empty."""
    fits = 0 < prompt_length <= self._engine.longest_prompt
    return max(self._engine.length - prompt_length, 0) if fits else 0

  def submit(self, request: Request) -> None:
    """Puts a request at the end of those that wait; there must be room for it."""
    room, most = self.room(len(request.prompt)), request.sampling_params.max_tokens
    assert room > 0
    with self._lock:
      self._waiting.append(_Answering(request, room if most is None else min(room, most)))

  def cancel(self, request: Request) -> None:
    """Ends a request before the next step; nothing happens to one that has ended."""
    with self._lock:
      self._cancelled.add(request)

  def step(self) -> list[Event]:
    """Does one round: ends what was cancelled, prefills a piece, and generates a token in every slot."""
    with self._engine.stepping():
      events = self._end_cancelled()
      self._forget_older()
      self._prefill()
      return [*events, *self._generate()] if self.active else events

  def run(self) -> Iterator[Event]:
    """Everything that happens until nobody is left."""
    while self.busy:
      yield from self.step()

  def _end_cancelled(self) -> list[Event]:
    with self._lock:
      cancelled, self._cancelled = self._cancelled, set()
      ended = [answering for answering in self._waiting if answering.request in cancelled]
      self._waiting = deque(answering for answering in self._waiting if answering.request not in cancelled)
    for slot in self._pages.holders:
      if self._at(slot).request in cancelled:
        ended.append(self._leave(slot))
    return [Event(answering.request, finish="cancelled") for answering in ended]

  def _forget_older(self) -> None:
    """Drops the rows that are kept for later requests, once the parameters that made them are no longer in use."""
    if self._updates == self._engine.updates:
      return
    self._updates, self._filled = self._engine.updates, _Filled([], None)
    if self._prefixes:
      self._prefixes.clear()

  def _prefill(self) -> None:
    if self._filling is None:
      free = [slot for slot, answering in enumerate(self._slots) if answering is None]
      with self._lock:
        if not self._waiting or not free or not self._take(free[0], self._waiting[0]):
          return
        answering = self._waiting.popleft()
      text = answering.text
      if self._samples and self._filled.text == text:
        self._filling = _Filling(answering, free[0], deque(), self._updates, self._filled.row)
      else:
        start, row = self._prefixes.find(text) if self._prefixes else (0, None)
        pieces = deque(self._engine.pieces(text, start))
        self._filling = _Filling(answering, free[0], pieces, self._updates, row)
    filling = self._filling
    answering, slot, current = filling.answering, filling.slot, filling.updates == self._updates
    if filling.pieces:
      piece = filling.pieces.popleft()
      filling.row = self._engine.prefill(piece, filling.row)
      if self._prefixes and current and piece.tokens and not answering.answered:
        self._prefixes.keep(answering.request.prompt, piece.start + len(piece.tokens), filling.row)
    if filling.pieces:
      return
    assert filling.row is not None
    request = answering.request
    self._engine.insert(filling.row, slot, request.prompt, request.sampling_params, answering.answered)
    if self._samples and current:
      self._filled = _Filled(answering.text, filling.row)
    if request.grammar and not answering.answered:
      answering.path = request.grammar.begin()
    self._slots[slot], self._filling = answering, None

  def _take(self, slot: int, answering: _Answering) -> bool:
    """Gets a slot the pages that the next step writes to: of the whole text, and of guesses behind it."""
    return self._pages.take(slot, len(answering.request.prompt) + len(answering.answered) + self._engine.ahead)

  def _grow(self) -> None:
    """Gets everyone in a slot the pages of the next step, the first to be let in first."""
    for slot in self._pages.holders:
      while (answering := self._slots[slot]) is not None and not self._take(slot, answering):
        last = self._leave(self._pages.holders[-1])
        self.preemptions += 1
        with self._lock:
          self._waiting.appendleft(last)

  def _at(self, slot: int) -> _Answering:
    """Who has a slot, or is about to."""
    answering = self._slots[slot]
    if answering is None:
      assert self._filling is not None
      answering = self._filling.answering
    return answering

  def _leave(self, slot: int) -> _Answering:
    """Frees a slot and its pages."""
    answering = self._at(slot)
    if self._slots[slot] is None:
      self._filling = None
    self._slots[slot] = None
    self._pages.give_back(slot)
    return answering

  def _generate(self) -> list[Event]:
    events: list[Event] = []
    self._grow()
    active = [answering is not None for answering in self._slots]
    for chosen, there in self._engine.write(active, self._allowed()):
      events += self._taken(chosen, there)
    return events

  def _taken(self, chosen: Chosen, there: np.ndarray) -> list[Event]:
    """What a token of each slot that it is for means to the requests; one that has ended takes no more."""
    events = []
    ends = self._followed(chosen, there)
    for slot, answering in enumerate(self._slots):
      if answering is None or not there[slot]:
        continue
      request, token = answering.request, int(chosen.tokens[slot])
      answering.left -= 1
      answering.answered.append(token)
      finish: Finish | None = ends.get(answering.path) if answering.path else None
      if finish is None and token in request.sampling_params.stop_token_ids:
        finish = "stop"
      if finish is None and answering.left == 0:
        finish = "length"
      count = request.sampling_params.logprobs or 0
      others = zip(chosen.others[slot, :count].tolist(), chosen.others_log_probs[slot, :count].tolist(), strict=True)
      log_prob, version = float(chosen.log_probs[slot]), self._engine.version
      events.append(Event(request, token, log_prob, tuple(others), finish, version))
      if finish:
        self._leave(slot)
    return events

  def _followed(self, chosen: Chosen, there: np.ndarray) -> "Mapping[Path, End | None]":
    """What the tokens mean to grammars, asked all at once."""
    tokens = {
      answering.path: int(chosen.tokens[slot])
      for slot, answering in enumerate(self._slots)
      if answering and answering.path and there[slot]
    }
    if not tokens:
      return {}
    from maxtext.inference.grammar import advance

    return advance(tokens)

  def _allowed(self) -> np.ndarray | None:
    """Bits of the tokens that grammars allow next; None where no request has one."""
    paths = {slot: answering.path for slot, answering in enumerate(self._slots) if answering and answering.path}
    if not paths:
      return None
    from maxtext.inference.grammar import masks

    return masks(paths, self._engine.slots, self._engine.vocab)
