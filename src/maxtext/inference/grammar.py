"""Structured outputs: token bitmasks for outputs that match a JSON schema or a regular expression, with llguidance.

A grammar is compiled once, in a process of its own with limits (`grammar_process`). That process also holds the
matchers of all outputs that use the grammar; a `GrammarMatcher` is the handle of one. The scheduler sends the sampled
tokens of all matchers and gets the bitmasks of the next step with the reply, so a step costs one message exchange with
each process, all in parallel. A process that exceeds its limits ends alone: the outputs of its grammar end with
"grammar_error", and no other request is affected. Nothing here touches a device. llguidance comes with the extra
`serve`, so the scheduler imports this module only for a request with a grammar.
"""

import asyncio
import dataclasses
import json
import math
import os
import pickle
import re
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from decimal import Decimal
from itertools import count
from typing import Any, Literal

import numpy as np

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.tokenizers import TextTokenizer
from maxtext.inference import grammar_process
from maxtext.inference.grammar_process import (
  FORK_COMMAND,
  LENGTH,
  MATCHER_COMMAND,
  MIB,
  ForkCommand,
  GrammarKind,
  GrammarLimits,
  MatcherCommand,
  MatcherStatus,
  bitmask_bytes,
  receive,
  receive_text,
  send_text,
)
from maxtext.inference.sampling import full_token_bitmask

MatchEnd = Literal["stop", "grammar_error"]
_MATCH_ENDS: dict[int, MatchEnd | None] = {
  MatcherStatus.ACTIVE: None,
  MatcherStatus.STOPPED: "stop",
  MatcherStatus.ERROR: "grammar_error",
}


@dataclass(frozen=True)
class GrammarSpec:
  """What an output must match: the request field that sets it, and a JSON schema as text or a regular expression."""

  field: str = dataclasses.field(compare=False)
  kind: GrammarKind
  text: str


class GrammarMatcher:
  """The position of one output in its grammar.

  Attributes:
    bitmask: the token bitmask of the next token; None if the grammar's process has ended.
  """

  def __init__(self, grammar: "CompiledGrammar", number: int) -> None:
    self.grammar, self.number = grammar, number
    self.bitmask: np.ndarray | None = None

  def __del__(self) -> None:
    self.grammar.release(self.number)


class CompiledGrammar:
  """A handle of the process that holds a compiled grammar. The process ends with the last reference to the handle.

  Only one thread at a time may use it, except for `release`.
  """

  def __init__(
    self, compiler: "GrammarCompiler", number: int, pipe: socket.socket, width: int, bytes_used: int
  ) -> None:
    self.compiler, self.number, self.bytes_used, self.alive = compiler, number, bytes_used, True
    self._pipe, self._width = pipe, width
    self._numbers = count()
    self._commands: list[tuple[MatcherCommand, GrammarMatcher, int]] = []
    self._pending: list[GrammarMatcher] = []
    self._released: deque[int] = deque()  # appended by any thread that drops a matcher

  def start_matcher(self) -> GrammarMatcher:
    """The matcher of a new output."""
    matcher = GrammarMatcher(self, next(self._numbers))
    self._commands.append((MatcherCommand.START, matcher, 0))
    return matcher

  def accept_token(self, matcher: GrammarMatcher, token: int) -> None:
    """Advances a matcher by a token, with the next `send`."""
    self._commands.append((MatcherCommand.ACCEPT, matcher, token))

  def release(self, number: int) -> None:
    """Drops a matcher, with the next `send`."""
    self._released.append(number)

  def send(self) -> None:
    """Sends the collected commands. Releases have no reply, so they wait for a command that has one."""
    if not self._commands:
      return
    commands = [(MatcherCommand.RELEASE, self._released.popleft(), 0) for _ in range(len(self._released))]
    commands += [(command, matcher.number, token) for command, matcher, token in self._commands]
    self._pending, self._commands = [matcher for _, matcher, _ in self._commands], []
    if self.alive:
      try:
        self._pipe.sendall(LENGTH.pack(len(commands)) + b"".join(MATCHER_COMMAND.pack(*c) for c in commands))
      except OSError:
        self.compiler.kill(self)

  def receive(self) -> dict[GrammarMatcher, MatchEnd | None]:
    """Receives the reply to `send`: how each matcher ended, if it did. Sets the bitmask of every matcher."""
    pending, self._pending = self._pending, []
    if self.alive and pending:
      try:
        reply = np.frombuffer(receive(self._pipe, len(pending) * (1 + self._width) + LENGTH.size), np.uint8)
      except (EOFError, OSError):
        self.compiler.kill(self)
      else:
        (self.bytes_used,) = LENGTH.unpack(reply[-LENGTH.size :].tobytes())
        rows = reply[: -LENGTH.size].reshape(len(pending), 1 + self._width)
        for matcher, row in zip(pending, rows, strict=True):
          matcher.bitmask = row[1:]
        return {matcher: _MATCH_ENDS[int(row[0])] for matcher, row in zip(pending, rows, strict=True)}
    for matcher in pending:
      matcher.bitmask = None
    return dict.fromkeys(pending, "grammar_error")

  def __del__(self) -> None:
    self._pipe.close()


class GrammarCompiler:
  """Compiles grammars for one tokenizer, and caches the most recent ones within a memory limit.

  Args:
    tokenizer: the tokenizer; it must have an end-of-sequence token.
    vocab: number of logits of the model, which may be more than the tokenizer's tokens.
    limits: limits of memory and time.
  """

  def __init__(self, tokenizer: TextTokenizer, vocab: int, limits: GrammarLimits | None = None) -> None:
    self._tokenizer, self._vocab, self._limits = tokenizer, vocab, limits or GrammarLimits()
    self._fork_server: _ForkServer | None = None
    self._start_lock, self._lock = threading.Lock(), threading.Lock()
    self._cache: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
    self._errors: OrderedDict[GrammarSpec, str] = OrderedDict()
    self._grammars: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
    self._numbers = count()
    # Half of the cores: slow grammars queue here, and the other cores stay free for the server.
    self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "grammar")

  @property
  def bytes_used(self) -> int:
    """Memory of all grammars that are cached or in use."""
    return sum(grammar.bytes_used for grammar in self._alive())

  def start(self) -> None:
    """Starts the fork server before the first grammar is compiled. If that fails, `compile` raises."""
    self._threads.submit(self._server)

  async def compile_async(self, spec: GrammarSpec) -> CompiledGrammar:
    """`compile` in an event loop. Cancelling it ends the compilation."""
    if (cached := self._cached(spec)) is not None:
      return cached
    cancelled = threading.Event()
    try:
      return await asyncio.get_running_loop().run_in_executor(self._threads, self.compile, spec, cancelled)
    finally:
      cancelled.set()

  def compile(self, spec: GrammarSpec, cancelled: threading.Event | None = None) -> CompiledGrammar:
    """The compiled grammar of a spec, from the cache if possible.

    Args:
      spec: the schema or the regular expression.
      cancelled: when it is set, this raises `CompilationCancelledError`.

    Raises:
      ConfigError: the grammar is invalid or exceeds a limit; the message names its field.
    """
    if (cached := self._cached(spec)) is not None:
      return cached
    _check_limits(spec)
    try:
      try:
        grammar = self._compile(spec, cancelled)
      except _ForkServerLostError:  # the grammar was not the cause
        grammar = self._compile(spec, cancelled)
    except _LimitExceededError:
      message = (
        f"compiling it takes more than the limit of {self._limits.memory // MIB} MiB or {self._limits.compile_seconds} "
        "seconds: simplify it."
      )
      self._remember_error(spec, message)
      raise ConfigError(f"{spec.field}: {message}") from None
    with self._lock:
      self._cache[spec] = grammar
      self._grammars.add(grammar)
    self.enforce_limit()
    return grammar

  def enforce_limit(self) -> None:
    """Enforces the memory limit of all grammars: evicts the oldest of the cache, then ends the largest process."""
    while self.bytes_used > self._limits.total:
      with self._lock:
        evicted = self._cache.popitem(last=False)[1] if self._cache else None
      if evicted is None:
        largest = max(self._alive(), key=lambda grammar: grammar.bytes_used, default=None)
        if largest is None:
          return
        self.kill(largest)
      del evicted  # its process ends here, unless the grammar is in use

  def kill(self, grammar: CompiledGrammar) -> None:
    """Ends the process of a grammar; its outputs end with "grammar_error"."""
    grammar.alive = False
    if self._fork_server is not None:
      self._fork_server.kill(grammar.number)

  def _alive(self) -> list[CompiledGrammar]:
    """The grammars whose process runs. Other threads add to the set, so it is read under the lock."""
    with self._lock:
      return [grammar for grammar in self._grammars if grammar.alive]

  def _cached(self, spec: GrammarSpec) -> CompiledGrammar | None:
    with self._lock:
      if spec in self._errors:
        self._errors.move_to_end(spec)
        raise ConfigError(f"{spec.field}: {self._errors[spec]}")
      grammar = self._cache.pop(spec, None)
      if grammar is None or not grammar.alive:
        return None
      self._cache[spec] = grammar
      return grammar

  def _remember_error(self, spec: GrammarSpec, message: str) -> None:
    """Remembers a grammar that exceeded its limits, so that it is not compiled again."""
    with self._lock:
      self._errors[spec] = message
      if len(self._errors) > _MAX_REMEMBERED_ERRORS:
        self._errors.popitem(last=False)

  def _server(self) -> "_ForkServer":
    with self._start_lock:
      if self._fork_server is None or not self._fork_server.alive:
        self._fork_server = _ForkServer(self._tokenizer, self._vocab, self._limits)
      return self._fork_server

  def _compile(self, spec: GrammarSpec, cancelled: threading.Event | None) -> CompiledGrammar:
    number, server = next(self._numbers), self._server()
    here, there = socket.socketpair()
    try:
      with there:
        server.fork(number, there)
      here.settimeout(self._limits.wall_seconds)
      send_text(here, spec.kind, spec.text)
      _wait_readable(here, self._limits.wall_seconds, cancelled)
      error_message = receive_text(here)
      if error_message:
        raise ConfigError(f"{spec.field}: {error_message}")
      (used,) = LENGTH.unpack(receive(here, LENGTH.size))
      return CompiledGrammar(self, number, here, bitmask_bytes(self._vocab), used)
    except BaseException as error:
      here.close()
      server.kill(number)
      if isinstance(error, EOFError | OSError):
        raise (_LimitExceededError if server.survives() else _ForkServerLostError) from None
      raise


class CompilationCancelledError(Exception):
  """The compilation of a grammar was cancelled."""


def token_bitmask(matchers: Mapping[int, GrammarMatcher], slots: int, vocab: int) -> np.ndarray:
  """The token bitmask of all slots for `sampling.sample`; slots without a matcher allow all tokens."""
  _exchange({matcher.grammar for matcher in matchers.values()})  # for matchers that were just started
  bitmask = full_token_bitmask(slots, vocab)
  rows = bitmask.view(np.uint8)
  for slot, matcher in matchers.items():
    if matcher.bitmask is not None:
      rows[slot] = matcher.bitmask
  return bitmask


def accept_tokens(tokens: Mapping[GrammarMatcher, int]) -> dict[GrammarMatcher, MatchEnd | None]:
  """Advances each matcher by a token; returns "stop", "grammar_error", or None where more tokens may follow."""
  for matcher, token in tokens.items():
    matcher.grammar.accept_token(matcher, token)
  return _exchange({matcher.grammar for matcher in tokens})


def _exchange(grammars: Collection[CompiledGrammar]) -> dict[GrammarMatcher, MatchEnd | None]:
  """Sends to all grammar processes before it receives, so that they compute in parallel."""
  for grammar in grammars:
    grammar.send()
  ends = {matcher: end for grammar in grammars for matcher, end in grammar.receive().items()}
  for compiler in {grammar.compiler for grammar in grammars}:
    compiler.enforce_limit()
  return ends


class _LimitExceededError(Exception):
  """The process of a grammar ended before the grammar was compiled."""


class _ForkServerLostError(Exception):
  """The fork server ended, and with it all grammar processes."""


class _ForkServer:
  """A handle of the process that forks the grammar processes."""

  def __init__(self, tokenizer: TextTokenizer, vocab: int, limits: GrammarLimits) -> None:
    message = pickle.dumps((tokenizer.for_grammars(), vocab, astuple(limits)))
    self._control, theirs = socket.socketpair()
    with theirs:
      # In a new session, so that Ctrl-C does not end it while the server still finishes requests. With one malloc
      # arena, since the address space of more would count against the memory limit.
      self._process = subprocess.Popen(
        [sys.executable, "-P", grammar_process.__file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
      )
    self._lock = threading.Lock()
    self._control.settimeout(_START_SECONDS)
    weakref.finalize(self, _stop, self._process, self._control)
    assert self._process.stdin is not None
    try:
      with self._process.stdin as pipe:
        pipe.write(message)
      error_message = receive_text(self._control)
    except (EOFError, OSError):
      raise RunError("The process that compiles grammars did not start: see its output on stderr.") from None
    if error_message:
      raise ConfigError(error_message)

  @property
  def alive(self) -> bool:
    """Whether the fork server runs."""
    return self._process.poll() is None

  def survives(self) -> bool:
    """Whether the fork server still runs shortly after a grammar process ended."""
    with suppress(subprocess.TimeoutExpired):
      self._process.wait(0.2)
    return self.alive

  def fork(self, number: int, pipe: socket.socket) -> None:
    """Starts a grammar process with its end of a socket."""
    with self._lock:
      socket.send_fds(self._control, [FORK_COMMAND.pack(ForkCommand.FORK, number)], [pipe.fileno()])

  def kill(self, number: int) -> None:
    """Ends a grammar process if it still runs."""
    with self._lock, suppress(OSError):
      self._control.sendall(FORK_COMMAND.pack(ForkCommand.KILL, number))


def _stop(process: subprocess.Popen, control: socket.socket) -> None:
  """Ends a fork server, and with it all grammar processes."""
  control.close()
  process.kill()
  process.wait()


def _wait_readable(source: socket.socket, seconds: float, cancelled: threading.Event | None) -> None:
  """Waits until a socket is readable."""
  end = time.monotonic() + seconds
  while not select.select([source], [], [], _POLL_SECONDS)[0]:
    if cancelled is not None and cancelled.is_set():
      raise CompilationCancelledError
    if time.monotonic() > end:
      raise TimeoutError


_POLL_SECONDS = 0.05  # seconds between two checks for cancellation
_START_SECONDS = 120.0  # for a fork server to load its tokenizer
_MAX_REMEMBERED_ERRORS = 256
# The environment of the fork server: without API keys and access tokens.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
# Limits of what multiplies the states of a grammar. A grammar within them compiles in about a second.
_MAX_CHARACTERS = {"json": 256 * 1024, "regex": 16 * 1024}  # characters
_MAX_DEPTH = 64
_MAX_PATTERN = 4096  # characters
_MAX_REPETITIONS = 100_000  # in an expression
_MAX_MULTIPLE_OF = 10_000  # of multipleOf without its decimal point: there is a state for each remainder
_MAX_VALUES = dict.fromkeys(
  ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), 1_000_000
)
_MAX_ENTRIES = {"enum": 16_384, "anyOf": 1024, "oneOf": 1024, "allOf": 256, "properties": 1024, "prefixItems": 1024}
_DATA_KEYWORDS = frozenset({"enum", "const", "default", "examples"})  # keywords whose values are not schemas
_REPETITIONS = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def _check_limits(spec: GrammarSpec) -> None:
  """Raises `ConfigError` for a grammar that would exceed the limits of its process."""
  if len(spec.text) > _MAX_CHARACTERS[spec.kind]:
    raise ConfigError(f"{spec.field}: {len(spec.text)} characters are more than {_MAX_CHARACTERS[spec.kind]}.")
  if spec.kind == "regex":
    _check_regex(spec.field, spec.text)
    return
  try:
    schema = json.loads(spec.text)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{spec.field}: {error}.") from None
  for name, value, depth in _keywords(schema):
    where = f"{spec.field}: {name}"
    if depth > _MAX_DEPTH:
      raise ConfigError(f"{spec.field}: it is nested deeper than {_MAX_DEPTH}.")
    if isinstance(value, int | float) and value > _MAX_VALUES.get(name, math.inf):
      raise ConfigError(f"{where}={value} is more than {_MAX_VALUES[name]}.")
    if name == "multipleOf" and isinstance(value, int | float) and _num_remainders(value) > _MAX_MULTIPLE_OF:
      raise ConfigError(f"{where}={value} has more remainders than {_MAX_MULTIPLE_OF}.")
    if isinstance(value, list | dict) and len(value) > _MAX_ENTRIES.get(name, math.inf):
      raise ConfigError(f"{where} has {len(value)} entries, more than {_MAX_ENTRIES[name]}.")
    patterns = [value] if name == "pattern" else value if name == "patternProperties" else ()
    for pattern in patterns if isinstance(patterns, list | dict) else ():
      if isinstance(pattern, str):
        _check_regex(where, pattern, _MAX_PATTERN)


def _num_remainders(value: float) -> float:
  """A number without its decimal point: the number of remainders of its multiples."""
  if isinstance(value, int):  # an int may be too large for a float
    value = min(abs(value), 10**10)
  if not math.isfinite(value):
    return 0  # llguidance reports it
  _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
  assert isinstance(exponent, int)
  return math.inf if exponent > 9 else int("".join(map(str, digits))) * 10 ** max(exponent, 0)


def _check_regex(where: str, regex: str, limit: float = math.inf) -> None:
  if len(regex) > limit:
    raise ConfigError(f"{where} has {len(regex)} characters, more than {limit}.")
  for found in _REPETITIONS.finditer(regex):
    times = max(int(number or 0) if len(number or "") < 9 else math.inf for number in found.groups())
    if times > _MAX_REPETITIONS:
      raise ConfigError(f"{where}: {found[0]} repeats more than {_MAX_REPETITIONS} times.")


def _keywords(schema: Any) -> Iterator[tuple[str, Any, int]]:
  """Every (keyword, value, depth) of a schema. Property names and lists are yielded too; they match no limit."""
  stack = [(schema, 0)]
  while stack:
    value, depth = stack.pop()
    inner: list[Any] = []
    if isinstance(value, list):
      yield "", None, depth
      inner = value
    elif isinstance(value, dict):
      for name, of in value.items():
        yield name, of, depth
        inner += [] if name in _DATA_KEYWORDS else [of]
    stack += [(one, depth + 1) for one in inner if isinstance(one, list | dict)]
