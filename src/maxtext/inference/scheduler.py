"""Continuous batching: requests join and leave the batch between steps, each in a slot of its own.

Requests are served first come, first served. Between two steps at most one chunk of a prompt is prefilled (chunked
prefill), or one of its images, frames or sounds encoded, so running requests never wait longer than for one of them.
One thread drives the scheduler; other threads may call `submit` and `cancel`.

Paged KV cache: a request is admitted when there are pages for its tokens, and gets more pages as it grows. When pages
run out, the request that was admitted last is preempted: its pages are freed, it becomes the first of the queue, and
its prompt and output are prefilled again when there is room. So the oldest request always makes progress, and no
request waits for one that came later.

A step is started before the tokens of the one before it are read, so the devices never wait for the host. Which request
reaches its length is known ahead: it takes no part in the next step. Who ends otherwise takes part in one step more,
whose token for it is dropped. A step that depends on the tokens before it (a grammar's bitmask, the positions of draft
tokens, preemption) is started after they were read.

The engine's parameters may be swapped between two steps (`Engine.update_params`). Running requests keep their KV cache,
even in the middle of their prompt; a preempted request is prefilled again with the new parameters. Rows computed with
older parameters, in part or as a whole, are not reused for later requests.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import numpy as np

from maxtext.inference.adapters import Adapter
from maxtext.inference.decode_state import Caches
from maxtext.inference.disk_prefill_cache import DiskPrefillCache
from maxtext.inference.engine import EncodedMedia, Engine, PrefillChunk, StepOutput
from maxtext.inference.multimodal import PromptMedia
from maxtext.inference.prefix_cache import PrefixCache
from maxtext.inference.sampling import SamplerOutput, SamplingParams

if TYPE_CHECKING:
  from maxtext.inference.grammar import CompiledGrammar, GrammarMatcher, MatchEnd

FinishReason = Literal["stop", "length", "cancelled", "grammar_error", "failed"]


@dataclass(eq=False)
class Request:
  """A prompt with its media, its sampling parameters, and its adapter, if any. Requests are compared by identity."""

  prompt: Sequence[int]
  sampling_params: SamplingParams = field(default_factory=SamplingParams)
  grammar: "CompiledGrammar | None" = None
  adapter: Adapter | None = None
  media: PromptMedia | None = None

  @property
  def adapter_slot(self) -> int:
    """The slot of its adapter in the engine's tables; 0 is the base."""
    return 0 if self.adapter is None else self.adapter.slot

  @property
  def keys(self) -> Sequence[int]:
    """What tells its KV cache from those of other prompts: its tokens, or numbers made of media in their places."""
    return self.prompt if self.media is None else self.media.keys.tolist()

  @property
  def adapter_checksum(self) -> str:
    """What tells its KV cache from that of the same tokens by another adapter; empty for the base."""
    return "" if self.adapter is None else self.adapter.checksum


class PromptLogprob(NamedTuple):
  """The log-probability of a token of a prompt, its rank, and the most likely tokens at its position with theirs."""

  logprob: float
  rank: int
  top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenOutput:
  """One generated token of a request, the end of the request, or both; or the log-probabilities of its prompt.

  Attributes:
    token: the token; None if the request ends without one.
    logprob: the model's log-probability of the token.
    top_logprobs: the most likely tokens at this position with their log-probabilities, as many as were requested.
    finish_reason: why the request ends here; None if it continues. "grammar_error": its grammar allows no next token,
      or its grammar process ended.
    version: the version of the parameters that generated the token (`Engine.update_params`).
    prompt_logprobs: those of all tokens of the prompt but the first, once, if they were requested.
    routed_experts: [tokens, N] the experts, as vectors, of the tokens in front of this one that none was reported with:
      the whole prompt for the first, the token before for others. None where the engine does not keep them.
  """

  request: Request
  token: int | None = None
  logprob: float = 0.0
  top_logprobs: tuple[tuple[int, float], ...] = ()
  finish_reason: FinishReason | None = None
  version: int = 0
  prompt_logprobs: tuple[PromptLogprob, ...] | None = None
  routed_experts: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class _PromptExperts:
  """The experts [S,N] of the tokens of each prefilled chunk, with the number of those that are not padding."""

  chunks: tuple[tuple[jax.Array, int], ...] = ()

  def followed_by(self, last: np.ndarray, count: int) -> np.ndarray:
    """Those of a prompt of `count` tokens, of which the last has been fed by a step. Tokens whose rows were found in
    a cache have negative numbers."""
    found = [np.asarray(chunk)[:size] for chunk, size in self.chunks]
    unknown = count - 1 - sum(map(len, found))
    return np.concatenate([np.full((unknown, last.size), -1, last.dtype), *found, last[None]])


_NO_EXPERTS = _PromptExperts()


@dataclass(eq=False)
class _RunningRequest:
  """A request with its output so far. While it is queued it has no slot."""

  request: Request
  remaining: int  # tokens that it may still generate
  output: list[int] = field(default_factory=list)
  unread: int = 0  # tokens of steps that were started, but not read
  ended: bool = False
  prompt_experts: _PromptExperts = _NO_EXPERTS
  prompt_reported: bool = False  # its log-probabilities, which a preempted request does not report again
  matcher: "GrammarMatcher | None" = None

  @property
  def tokens(self) -> list[int]:
    return [*self.request.prompt, *self.output]

  @property
  def keys(self) -> list[int]:
    return [*self.request.keys, *self.output]

  @property
  def reports_prompt(self) -> bool:
    """Whether its prompt is prefilled for its log-probabilities, too, and so as a whole and for this request alone."""
    return self.request.sampling_params.prompt_logprobs is not None and not self.prompt_reported


@dataclass
class _PrefillingRequest:
  """The request whose prompt is being prefilled."""

  running: _RunningRequest
  slot: int
  chunks: deque[PrefillChunk] | None  # None until the media are encoded
  num_updates: int  # of the engine's parameters, when prefill began
  row: Caches | None = None
  start: int = 0
  encoding: Iterator[EncodedMedia | None] | None = None
  media: EncodedMedia | None = None
  prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
  experts: _PromptExperts = _NO_EXPERTS


class _StartedStep(NamedTuple):
  """A step whose tokens were not read: the request of each slot, the parameters' version, and what waits for them."""

  running: Sequence[_RunningRequest | None]
  version: int
  result: Callable[[], StepOutput]


class _LastPrefill(NamedTuple):
  """The keys of the tokens that were prefilled last, by which adapter, their row, and their experts."""

  keys: Sequence[int]
  adapter: str
  row: Caches | None
  experts: _PromptExperts = _NO_EXPERTS


class Scheduler:
  """Assigns requests to the slots of an engine.

  Args:
    engine: the engine; nothing else may step it.
    prefix_cache: the prefix cache, in memory or on disk; the engine needs `reuse_rows` for one in memory.
    share_last_prefill: whether consecutive requests with the same prompt share one prefill (`multi_sampling`).

  Attributes:
    num_preemptions: how often a running request was preempted.
  """

  def __init__(
    self,
    engine: Engine,
    prefix_cache: PrefixCache | DiskPrefillCache | None = None,
    share_last_prefill: bool = False,
  ) -> None:
    self._engine, self._prefix_cache, self._lock = engine, prefix_cache, threading.Lock()
    self._share_last_prefill, self._last_prefill = share_last_prefill, _LastPrefill([], "", None)
    self._num_updates = engine.num_updates
    self._waiting: deque[_RunningRequest] = deque()
    self._cancelled: set[Request] = set()
    self._prefilling: _PrefillingRequest | None = None
    self._started: _StartedStep | None = None
    self._slots: list[_RunningRequest | None] = [None] * engine.slots
    self._block_table, self.num_preemptions = engine.block_table, 0
    self._block_table.clear()

  @property
  def busy(self) -> bool:
    """Whether any request is queued, prefilling or running."""
    queued = bool(self._waiting) or self._prefilling is not None
    return queued or self.num_running > 0 or self._started is not None

  @property
  def num_waiting(self) -> int:
    """Number of queued requests, which have no slot yet."""
    return len(self._waiting)

  @property
  def num_running(self) -> int:
    """Number of requests that are being decoded."""
    return sum(running is not None for running in self._slots)

  @property
  def num_free_pages(self) -> int:
    """Free pages of the KV cache."""
    return self._block_table.num_free_pages

  def max_output_len(self, prompt_len: int) -> int:
    """Most output tokens for a prompt of this length; 0 if the prompt is empty or too long."""
    fits = 0 < prompt_len <= self._engine.max_prompt_len
    return max(self._engine.max_model_len - prompt_len, 0) if fits else 0

  def submit(self, request: Request) -> None:
    """Appends a request to the queue. Its prompt must fit (`max_output_len`)."""
    fits, most = self.max_output_len(len(request.prompt)), request.sampling_params.max_tokens
    assert fits > 0
    with self._lock:
      self._waiting.append(_RunningRequest(request, fits if most is None else min(fits, most)))

  def cancel(self, request: Request) -> None:
    """Ends a request before the next step. A finished request is ignored."""
    with self._lock:
      self._cancelled.add(request)

  def step(self) -> list[TokenOutput]:
    """Ends cancelled requests, prefills one chunk, starts a step of all slots, and reads the one before."""
    with self._engine.hold_params():
      outputs = self._end_cancelled()
      self._drop_stale_rows()
      outputs += self._prefill()
      outputs += self._decode()
      if self._started is not None and all(one is None or one.ended for one in self._started.running):
        self._started = None  # nobody waits for its tokens
      return outputs

  def run(self) -> Iterator[TokenOutput]:
    """Steps until no request is left, and yields all token outputs."""
    while self.busy:
      yield from self.step()

  def _end_cancelled(self) -> list[TokenOutput]:
    with self._lock:
      cancelled, self._cancelled = self._cancelled, set()
      ended = [waiting for waiting in self._waiting if waiting.request in cancelled]
      self._waiting = deque(waiting for waiting in self._waiting if waiting.request not in cancelled)
    for slot in self._block_table.allocated_slots:
      if self._request_of(slot).request in cancelled:
        ended.append(self._end(slot))
    return [TokenOutput(running.request, finish_reason="cancelled") for running in ended]

  def _drop_stale_rows(self) -> None:
    """Drops the rows kept for later requests once the parameters that computed them were replaced."""
    if self._num_updates == self._engine.num_updates:
      return
    self._num_updates, self._last_prefill = self._engine.num_updates, _LastPrefill([], "", None)
    if self._prefix_cache:
      self._prefix_cache.clear()

  def _prefill(self) -> list[TokenOutput]:
    """Prefills a chunk. Returns what there is to report when the prompt is complete."""
    if self._prefilling is None:
      free = [slot for slot, running in enumerate(self._slots) if running is None]
      with self._lock:
        if not self._waiting or not free or not self._allocate(free[0], self._waiting[0]):
          return []
        running = self._waiting.popleft()
      keys, adapter = running.keys, running.request.adapter_checksum
      shares = not running.reports_prompt
      if shares and self._share_last_prefill and self._last_prefill[:2] == (keys, adapter):
        self._prefilling = _PrefillingRequest(running, free[0], deque(), self._num_updates, self._last_prefill.row)
        self._prefilling.experts = self._last_prefill.experts
      else:
        start, row = self._prefix_cache.lookup(keys, adapter) if self._prefix_cache and shares else (0, None)
        self._prefilling = _PrefillingRequest(running, free[0], None, self._num_updates, row, start)
    prefilling = self._prefilling
    if prefilling.chunks is None and not self._encode_media(prefilling):
      return []
    assert prefilling.chunks is not None
    running, slot, current = prefilling.running, prefilling.slot, prefilling.num_updates == self._num_updates
    request, shares = running.request, not running.reports_prompt
    if prefilling.chunks:
      chunk = prefilling.chunks.popleft()
      if not shares:
        self._prefill_with_logprobs(prefilling, chunk)
      elif self._engine.keeps_routed_experts:
        self._prefill_with_routed_experts(prefilling, chunk)
      else:
        prefilling.row = self._engine.prefill_chunk(chunk, prefilling.row, request.adapter_slot, prefilling.media)
      if self._prefix_cache and current and shares and chunk.tokens and not running.output:
        end = chunk.start + len(chunk.tokens)
        assert prefilling.row is not None
        self._prefix_cache.store(request.keys, end, prefilling.row, request.adapter_checksum)
    if prefilling.chunks:
      return []
    assert prefilling.row is not None
    outputs = []
    if running.reports_prompt:
      outputs.append(TokenOutput(request, prompt_logprobs=tuple(prefilling.prompt_logprobs)))
      running.prompt_reported = True
    if running.remaining == 0:
      self._release(slot)
      return [*outputs, TokenOutput(request, finish_reason="length")]
    self._engine.insert(
      prefilling.row,
      slot,
      request.prompt,
      request.sampling_params,
      running.output,
      request.adapter_slot,
      0 if request.media is None else request.media.rotary_offset,
    )
    if self._share_last_prefill and current and shares:
      self._last_prefill = _LastPrefill(running.keys, request.adapter_checksum, prefilling.row, prefilling.experts)
    if not running.output:
      running.prompt_experts = prefilling.experts
    if request.grammar and not running.output:
      running.matcher = request.grammar.start_matcher()
    self._slots[slot], self._prefilling = running, None
    return outputs

  def _prefill_with_logprobs(self, prefilling: _PrefillingRequest, chunk: PrefillChunk) -> None:
    request = prefilling.running.request
    most, end = request.sampling_params.prompt_logprobs, chunk.start + len(chunk.tokens)
    prefilling.row, found = self._engine.prefill_with_logprobs(
      chunk, request.prompt[chunk.start + 1 : end + 1], prefilling.row, request.adapter_slot, prefilling.media
    )
    columns = (column[0, : len(chunk.tokens)].tolist() for column in found)
    for logprob, rank, top_ids, top in zip(*columns, strict=True):
      prefilling.prompt_logprobs.append(PromptLogprob(logprob, rank, tuple(zip(top_ids, top, strict=True))[:most]))

  def _prefill_with_routed_experts(self, prefilling: _PrefillingRequest, chunk: PrefillChunk) -> None:
    slot = prefilling.running.request.adapter_slot
    prefilling.row, routed = self._engine.prefill_with_routed_experts(chunk, prefilling.row, slot, prefilling.media)
    prefilling.experts = _PromptExperts((*prefilling.experts.chunks, (routed, len(chunk.tokens))))

  def _encode_media(self, prefilling: _PrefillingRequest) -> bool:
    """Encodes one image, frame or sound of the prompt; True once all were, and the chunks are known."""
    running, media = prefilling.running, prefilling.running.request.media
    if media is not None:
      prefilling.encoding = prefilling.encoding or self._engine.encode_media(media, prefilling.start)
      if (encoded := next(prefilling.encoding)) is None:
        return False
      prefilling.media = encoded.with_output(len(running.output))
    spans = None if prefilling.media is None else prefilling.media.spans
    prefilling.chunks = deque(self._engine.prefill_chunks(running.tokens, prefilling.start, spans))
    return True

  def _allocate(self, slot: int, running: _RunningRequest) -> bool:
    """Allocates the pages that the next step writes to: for all tokens of the request and its draft tokens."""
    num_tokens = len(running.request.prompt) + len(running.output) + running.unread
    return self._block_table.allocate(slot, num_tokens + self._engine.num_speculative_tokens)

  def _allocate_or_preempt(self) -> list[TokenOutput]:
    """Allocates the pages of the next step for all running requests, oldest first; preempts the newest if needed, once
    its tokens were read. Returns these."""
    outputs: list[TokenOutput] = []
    for slot in self._block_table.allocated_slots:
      while (running := self._slots[slot]) is not None and not self._allocate(slot, running):
        if self._started is not None:
          outputs += self._read()
          continue
        preempted = self._release(self._block_table.allocated_slots[-1])
        self.num_preemptions += 1
        with self._lock:
          self._waiting.appendleft(preempted)
    return outputs

  def _request_of(self, slot: int) -> _RunningRequest:
    """The request that runs in a slot, or is being prefilled for it."""
    running = self._slots[slot]
    if running is None:
      assert self._prefilling is not None
      running = self._prefilling.running
    return running

  def _release(self, slot: int) -> _RunningRequest:
    """Frees a slot and its pages, and returns its request."""
    running = self._request_of(slot)
    if self._slots[slot] is None:
      self._prefilling = None
    self._slots[slot] = None
    self._block_table.free(slot)
    return running

  def _end(self, slot: int) -> _RunningRequest:
    """Ends the request of a slot, whose tokens that were not read yet are dropped."""
    running = self._release(slot)
    running.ended = True
    return running

  def _decode(self) -> list[TokenOutput]:
    """Starts a step, and reads the one before it, or both where the next one depends on it."""
    outputs = self._read() if self._reads_at_once else []
    outputs += self._allocate_or_preempt()
    before, self._started = self._started, self._start() if self.num_running else None
    if before is not None:
      outputs += self._process(before)
    return [*outputs, *self._read()] if self._reads_at_once else outputs

  @property
  def _reads_at_once(self) -> bool:
    """Whether a step must be read before the next one can start."""
    matched = any(running and running.matcher for running in self._slots)
    return matched or self._engine.num_speculative_tokens > 0

  def _start(self) -> _StartedStep:
    """Starts a step of all running requests. A slot whose request gets its last token is free for what comes after."""
    running = list(self._slots)
    result = self._engine.start_step([one is not None for one in running], self._token_bitmask())
    for slot, one in enumerate(running):
      if one is not None:
        one.unread += 1
        if one.unread == one.remaining:
          self._release(slot)
    return _StartedStep(running, self._engine.version, result)

  def _read(self) -> list[TokenOutput]:
    """The token outputs of the step that was started last, if it was not read."""
    started, self._started = self._started, None
    return [] if started is None else self._process(started)

  def _process(self, step: _StartedStep) -> list[TokenOutput]:
    outputs = list[TokenOutput]()
    for sampled, committed in step.result():
      outputs += self._process_position(step, sampled, committed)
    for running in step.running:
      if running is not None:
        running.unread -= 1
    return outputs

  def _process_position(self, step: _StartedStep, sampled: SamplerOutput, committed: np.ndarray) -> list[TokenOutput]:
    """The token outputs of one position in the slots that commit it. A request that has ended takes no more tokens."""
    outputs = []
    taking = {
      slot: running
      for slot, running in enumerate(step.running)
      if running is not None and not running.ended and committed[slot]
    }
    ends = self._accept_tokens(sampled, taking)
    for slot, running in taking.items():
      request, token = running.request, int(sampled.token_ids[slot])
      routed = (
        None if sampled.routed_experts is None else _new_experts(running, np.asarray(sampled.routed_experts[slot]))
      )
      running.remaining -= 1
      running.output.append(token)
      finish_reason: FinishReason | None = ends.get(running.matcher) if running.matcher else None
      if finish_reason is None and token in request.sampling_params.stop_token_ids:
        finish_reason = "stop"
      if finish_reason is None and running.remaining == 0:
        finish_reason = "length"
      count = request.sampling_params.logprobs or 0
      top = zip(sampled.top_token_ids[slot, :count].tolist(), sampled.top_logprobs[slot, :count].tolist(), strict=True)
      logprob = float(sampled.logprobs[slot])
      outputs.append(
        TokenOutput(request, token, logprob, tuple(top), finish_reason, step.version, routed_experts=routed)
      )
      if finish_reason:
        running.ended = True
        if self._slots[slot] is running:
          self._release(slot)
    return outputs

  def _accept_tokens(
    self, sampled: SamplerOutput, taking: Mapping[int, _RunningRequest]
  ) -> "Mapping[GrammarMatcher, MatchEnd | None]":
    """Passes the tokens to all grammar matchers at once; returns which matchers ended, and how."""
    tokens = {
      running.matcher: int(sampled.token_ids[slot]) for slot, running in taking.items() if running.matcher is not None
    }
    if not tokens:
      return {}
    from maxtext.inference.grammar import accept_tokens

    return accept_tokens(tokens)

  def _token_bitmask(self) -> np.ndarray | None:
    """The token bitmask of the next step; None where no running request has a grammar."""
    matchers = {slot: running.matcher for slot, running in enumerate(self._slots) if running and running.matcher}
    if not matchers:
      return None
    from maxtext.inference.grammar import token_bitmask

    return token_bitmask(matchers, self._engine.slots, self._engine.vocab)


def _new_experts(running: _RunningRequest, last: np.ndarray) -> np.ndarray:
  """The experts of what is in front of the next token: of the whole prompt, or else of the token before it, whose
  experts `last` are."""
  return last[None] if running.output else running.prompt_experts.followed_by(last, len(running.request.prompt))
