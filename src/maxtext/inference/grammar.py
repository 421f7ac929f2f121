"""Answers that keep a form, a JSON schema or a regular expression: which tokens may come next, on llguidance.

A grammar is compiled once, in a process of its own under limits (`grammar_process`), which also holds the matchers of
all answers that follow it; each goes through it with a `Path`. The scheduler tells all paths the tokens that were
chosen and has the masks of the next step with the reply, so a step costs one exchange with each process, all at once. A
process that outgrows its limits ends alone: whoever followed its grammar is a misfit, and nobody else notices. Nothing
here touches a device. The library comes with the extra `serve`, so the engine's side imports this only where there is a
grammar.
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
  ACT,
  LENGTH,
  MIB,
  TO_FORK_SERVER,
  Act,
  GrammarLimits,
  Kind,
  Order,
  Status,
  mask_bytes,
  receive,
  receive_text,
  send_text,
)
from maxtext.inference.sampling import anything

End = Literal["stop", "misfit"]
_ENDS: dict[int, End | None] = {Status.GOES_ON: None, Status.STOP: "stop", Status.MISFIT: "misfit"}


@dataclass(frozen=True)
class Form:
  """What an answer must be: the field of a request that says it, and a schema as JSON text or an expression."""

  field: str = dataclasses.field(compare=False)
  kind: Kind
  text: str


class Path:
  """How far one answer has come. `mask` is the bits of its next token; None where its grammar's process has ended."""

  def __init__(self, grammar: "Grammar", number: int) -> None:
    self.grammar, self.number = grammar, number
    self.mask: np.ndarray | None = None

  def __del__(self) -> None:
    self.grammar.leave(self.number)


class Grammar:
  """A compiled form: the process that holds it, which ends when nobody refers to it. One thread at a time drives it."""

  def __init__(self, owner: "Grammars", number: int, pipe: socket.socket, width: int, bytes_used: int) -> None:
    self.owner, self.number, self.bytes_used, self.alive = owner, number, bytes_used, True
    self._pipe, self._width = pipe, width
    self._numbers = count()
    self._acts: list[tuple[Act, Path, int]] = []
    self._awaited: list[Path] = []
    self._left: deque[int] = deque()  # from any thread that drops a path

  def begin(self) -> Path:
    """The path of a new answer."""
    path = Path(self, next(self._numbers))
    self._acts.append((Act.BEGIN, path, 0))
    return path

  def take(self, path: Path, token: int) -> None:
    """Goes on by a token, with the next `send`."""
    self._acts.append((Act.TAKE, path, token))

  def leave(self, number: int) -> None:
    """Forgets an answer, with the next `send`."""
    self._left.append(number)

  def send(self) -> None:
    """Tells the process what has happened; that answers have ended waits for something that is answered."""
    if not self._acts:
      return
    acts = [(Act.END, self._left.popleft(), 0) for _ in range(len(self._left))]
    acts += [(act, path.number, token) for act, path, token in self._acts]
    self._awaited, self._acts = [path for _, path, _ in self._acts], []
    if self.alive:
      try:
        self._pipe.sendall(LENGTH.pack(len(acts)) + b"".join(ACT.pack(*act) for act in acts))
      except OSError:
        self.owner.kill(self)

  def receive(self) -> dict[Path, End | None]:
    """What it has to say of the answers that were sent; with it every path has its next mask."""
    awaited, self._awaited = self._awaited, []
    if self.alive and awaited:
      try:
        reply = np.frombuffer(receive(self._pipe, len(awaited) * (1 + self._width) + LENGTH.size), np.uint8)
      except (EOFError, OSError):
        self.owner.kill(self)
      else:
        (self.bytes_used,) = LENGTH.unpack(reply[-LENGTH.size :].tobytes())
        rows = reply[: -LENGTH.size].reshape(len(awaited), 1 + self._width)
        for path, row in zip(awaited, rows, strict=True):
          path.mask = row[1:]
        return {path: _ENDS[int(row[0])] for path, row in zip(awaited, rows, strict=True)}
    for path in awaited:
      path.mask = None
    return dict.fromkeys(awaited, "misfit")

  def __del__(self) -> None:
    self._pipe.close()


class Grammars:
  """Compiles forms for one tokenizer, and keeps as many of the last ones as there is memory for.

  Args:
    tokenizer: must have an end of a document.
    vocab: logits of the model, which may be more than there are tokens.
    limits: of memory and time.
  """

  def __init__(self, tokenizer: TextTokenizer, vocab: int, limits: GrammarLimits | None = None) -> None:
    self._tokenizer, self._vocab, self._limits = tokenizer, vocab, limits or GrammarLimits()
    self._fork_server: _ForkServer | None = None
    self._starting, self._lock = threading.Lock(), threading.Lock()
    self._kept: OrderedDict[Form, Grammar] = OrderedDict()
    self._refused: OrderedDict[Form, str] = OrderedDict()
    self._living: weakref.WeakSet[Grammar] = weakref.WeakSet()
    self._numbers = count()
    # Half of the cores: forms that take long wait for each other, and the rest is the server's.
    self._compilers = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "grammar")

  @property
  def bytes_used(self) -> int:
    """By all grammars that are kept or followed."""
    return sum(grammar.bytes_used for grammar in self._alive())

  def start(self) -> None:
    """Has the fork server ready before the first form comes; if it cannot be had, `compile` says so."""
    self._compilers.submit(self._server)

  async def ready(self, form: Form) -> Grammar:
    """`compile` for an event loop: cancelling it ends the compilation."""
    if (known := self._known(form)) is not None:
      return known
    given_up = threading.Event()
    try:
      return await asyncio.get_running_loop().run_in_executor(self._compilers, self.compile, form, given_up)
    finally:
      given_up.set()

  def compile(self, form: Form, given_up: threading.Event | None = None) -> Grammar:
    """The grammar of a form; one that is wrong, or takes too much, is a `ConfigError` that names its field.

    Args:
      form: of the answers.
      given_up: set by whoever no longer wants it; then this raises `GivenUpError`.
    """
    if (known := self._known(form)) is not None:
      return known
    _check_size(form)
    try:
      try:
        grammar = self._compile(form, given_up)
      except _LostError:  # the form was not to blame
        grammar = self._compile(form, given_up)
    except _TooMuchError:
      refusal = (
        f"it takes more than the {self._limits.memory // MIB} MiB or {self._limits.compile_seconds} seconds that this "
        "server gives a form to be compiled: make it simpler."
      )
      self._remember(form, refusal)
      raise ConfigError(f"{form.field}: {refusal}") from None
    with self._lock:
      self._kept[form] = grammar
      self._living.add(grammar)
    self.trim()
    return grammar

  def trim(self) -> None:
    """Keeps to the limit of all grammars together: the oldest are forgotten, then whoever has most is ended."""
    while self.bytes_used > self._limits.total:
      with self._lock:
        forgotten = self._kept.popitem(last=False)[1] if self._kept else None
      if forgotten is None:
        largest = max(self._alive(), key=lambda grammar: grammar.bytes_used, default=None)
        if largest is None:
          return
        self.kill(largest)
      del forgotten  # its process ends here, unless it is followed

  def kill(self, grammar: Grammar) -> None:
    """Ends the process of a grammar; whoever follows it is a misfit."""
    grammar.alive = False
    if self._fork_server is not None:
      self._fork_server.kill(grammar.number)

  def _alive(self) -> list[Grammar]:
    """Those that have a process; other threads add to the set meanwhile, so it is read under the lock."""
    with self._lock:
      return [grammar for grammar in self._living if grammar.alive]

  def _known(self, form: Form) -> Grammar | None:
    with self._lock:
      if form in self._refused:
        self._refused.move_to_end(form)
        raise ConfigError(f"{form.field}: {self._refused[form]}")
      grammar = self._kept.pop(form, None)
      if grammar is None or not grammar.alive:
        return None
      self._kept[form] = grammar
      return grammar

  def _remember(self, form: Form, refusal: str) -> None:
    """What took too much is not tried again, while others do not crowd it out."""
    with self._lock:
      self._refused[form] = refusal
      if len(self._refused) > _REFUSALS:
        self._refused.popitem(last=False)

  def _server(self) -> "_ForkServer":
    with self._starting:
      if self._fork_server is None or not self._fork_server.alive:
        self._fork_server = _ForkServer(self._tokenizer, self._vocab, self._limits)
      return self._fork_server

  def _compile(self, form: Form, given_up: threading.Event | None) -> Grammar:
    number, server = next(self._numbers), self._server()
    here, there = socket.socketpair()
    try:
      with there:
        server.fork(number, there)
      here.settimeout(self._limits.wall_seconds)
      send_text(here, form.kind, form.text)
      _await(here, self._limits.wall_seconds, given_up)
      refusal = receive_text(here)
      if refusal:
        raise ConfigError(f"{form.field}: {refusal}")
      (used,) = LENGTH.unpack(receive(here, LENGTH.size))
      return Grammar(self, number, here, mask_bytes(self._vocab), used)
    except BaseException as error:
      here.close()
      server.kill(number)
      if isinstance(error, EOFError | OSError):
        raise (_TooMuchError if server.survives() else _LostError) from None
      raise


class GivenUpError(Exception):
  """Nobody wants the grammar any more."""


def masks(paths: Mapping[int, Path], slots: int, vocab: int) -> np.ndarray:
  """Bits of the tokens that may come next in each slot, as `sampling.choose` reads them: all without a path."""
  _exchange({path.grammar for path in paths.values()})  # of answers that begin
  bits = anything(slots, vocab)
  rows = bits.view(np.uint8)
  for slot, path in paths.items():
    if path.mask is not None:
      rows[slot] = path.mask
  return bits


def advance(tokens: Mapping[Path, int]) -> dict[Path, End | None]:
  """Goes on by a token in each path: to the end, to where its grammar cannot be followed, or to where more may come."""
  for path, token in tokens.items():
    path.grammar.take(path, token)
  return _exchange({path.grammar for path in tokens})


def _exchange(grammars: Collection[Grammar]) -> dict[Path, End | None]:
  """All processes compute at once."""
  for grammar in grammars:
    grammar.send()
  ends = {path: end for grammar in grammars for path, end in grammar.receive().items()}
  for owner in {grammar.owner for grammar in grammars}:
    owner.trim()
  return ends


class _TooMuchError(Exception):
  """The process of a grammar has ended before it was compiled."""


class _LostError(Exception):
  """The fork server has ended, and all processes of grammars with it."""


class _ForkServer:
  """The process that forks those of grammars."""

  def __init__(self, tokenizer: TextTokenizer, vocab: int, limits: GrammarLimits) -> None:
    message = pickle.dumps((tokenizer.for_grammars(), vocab, astuple(limits)))
    self._control, theirs = socket.socketpair()
    with theirs:
      # A session of its own, so that a Ctrl-C does not end answers that the server still finishes. One arena: the
      # address space of more would count against the limit.
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
      refusal = receive_text(self._control)
    except (EOFError, OSError):
      raise RunError("The process that compiles forms of answers did not start: see what it printed.") from None
    if refusal:
      raise ConfigError(refusal)

  @property
  def alive(self) -> bool:
    """Whether it still runs."""
    return self._process.poll() is None

  def survives(self) -> bool:
    """Whether it still runs a moment after the process of a grammar has ended."""
    with suppress(subprocess.TimeoutExpired):
      self._process.wait(0.2)
    return self.alive

  def fork(self, number: int, pipe: socket.socket) -> None:
    """Makes the process of a grammar, with its end of a socket."""
    with self._lock:
      socket.send_fds(self._control, [TO_FORK_SERVER.pack(Order.FORK, number)], [pipe.fileno()])

  def kill(self, number: int) -> None:
    """Ends the process of a grammar, if it still runs."""
    with self._lock, suppress(OSError):
      self._control.sendall(TO_FORK_SERVER.pack(Order.KILL, number))


def _stop(process: subprocess.Popen, control: socket.socket) -> None:
  """Ends a fork server, and with it the processes of all grammars."""
  control.close()
  process.kill()
  process.wait()


def _await(source: socket.socket, seconds: float, given_up: threading.Event | None) -> None:
  """Waits until something comes."""
  end = time.monotonic() + seconds
  while not select.select([source], [], [], _LOOK_EVERY)[0]:
    if given_up is not None and given_up.is_set():
      raise GivenUpError
    if time.monotonic() > end:
      raise TimeoutError


_LOOK_EVERY = 0.05  # seconds between two looks whether a form is still wanted
_START_SECONDS = 120.0  # for a fork server to read its tokenizer
_REFUSALS = 256
# What the fork server is given: no keys and no tokens, which it has no use for.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
# Caps of what multiplies states. All are above what the tests' limits take within a second.
_MOST_TEXT = {"json": 256 * 1024, "regex": 16 * 1024}  # characters
_MOST_DEPTH = 64
_MOST_PATTERN = 4096  # characters
_MOST_TIMES = 100_000  # in an expression
_MOST_DIGITS = 10_000  # of multipleOf, which has a state for each remainder
_MOST = dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), 1_000_000)
_MOST_ENTRIES = {"enum": 16_384, "anyOf": 1024, "oneOf": 1024, "allOf": 256, "properties": 1024, "prefixItems": 1024}
_DATA = frozenset({"enum", "const", "default", "examples"})  # keywords whose values are no schemas
_COUNTS = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def _check_size(form: Form) -> None:
  """Refuses at once, by name, what would only be found out by the limits of its process."""
  if len(form.text) > _MOST_TEXT[form.kind]:
    raise ConfigError(f"{form.field}: {len(form.text)} characters are more than {_MOST_TEXT[form.kind]}.")
  if form.kind == "regex":
    _check_expression(form.field, form.text)
    return
  try:
    schema = json.loads(form.text)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{form.field}: {error}.") from None
  for name, value, depth in _keywords(schema):
    where = f"{form.field}: {name}"
    if depth > _MOST_DEPTH:
      raise ConfigError(f"{form.field}: it is nested deeper than {_MOST_DEPTH}.")
    if isinstance(value, int | float) and value > _MOST.get(name, math.inf):
      raise ConfigError(f"{where}={value} is more than {_MOST[name]}.")
    if name == "multipleOf" and isinstance(value, int | float) and _digits(value) > _MOST_DIGITS:
      raise ConfigError(f"{where}={value} has more remainders than {_MOST_DIGITS}.")
    if isinstance(value, list | dict) and len(value) > _MOST_ENTRIES.get(name, math.inf):
      raise ConfigError(f"{where} has {len(value)} entries, more than {_MOST_ENTRIES[name]}.")
    patterns = [value] if name == "pattern" else value if name == "patternProperties" else ()
    for pattern in patterns if isinstance(patterns, list | dict) else ():
      if isinstance(pattern, str):
        _check_expression(where, pattern, _MOST_PATTERN)


def _digits(value: float) -> float:
  """A number without its decimal point: what a multiple of it is counted in."""
  if isinstance(value, int):  # as large as it likes, which no float is
    value = min(abs(value), 10**10)
  if not math.isfinite(value):
    return 0  # refused by the library, in its own words
  _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
  assert isinstance(exponent, int)
  return math.inf if exponent > 9 else int("".join(map(str, digits))) * 10 ** max(exponent, 0)


def _check_expression(where: str, expression: str, most: float = math.inf) -> None:
  if len(expression) > most:
    raise ConfigError(f"{where} has {len(expression)} characters, more than {most}.")
  for found in _COUNTS.finditer(expression):
    times = max(int(number or 0) if len(number or "") < 9 else math.inf for number in found.groups())
    if times > _MOST_TIMES:
      raise ConfigError(f"{where}: {found[0]} repeats more than {_MOST_TIMES} times.")


def _keywords(schema: Any) -> Iterator[tuple[str, Any, int]]:
  """Every (keyword, value, depth) of a schema; names of properties and lists are among them, and mean nothing."""
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
        inner += [] if name in _DATA else [of]
    stack += [(one, depth + 1) for one in inner if isinstance(one, list | dict)]
