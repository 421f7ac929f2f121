"""The processes that compile and match grammars, isolated so that no grammar can take the server down.

A schema of 45 bytes can need more memory than there is, and llguidance aborts its process when memory runs out. So a
small interpreter, without JAX and without threads, loads the tokenizer once and forks one process for every grammar: a
fork server. Each grammar process has its own limits of memory and processor time, compiles one grammar, holds the
matchers of all outputs that use it, and ends when its socket closes. All grammar processes end with the fork server,
and the fork server ends with the server.

This file is run by its path and imports nothing of the package, so that it starts fast. `maxtext.inference.grammar` is
the other end of the sockets.
"""

import ctypes
import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NoReturn, cast

MIB = 2**20


@dataclass(frozen=True)
class GrammarLimits:
  """Limits of grammars.

  Attributes:
    memory: bytes that a grammar process may use beyond what it shares with the fork server.
    compile_seconds: processor time to compile a grammar.
    step_seconds: processor time for one step of all matchers of a grammar.
    wall_seconds: wall-clock limit for either, since a process may also be stopped or starved.
    total: bytes of all grammars together; unused grammars are evicted first, then the largest is ended.
  """

  memory: int = 256 * MIB
  compile_seconds: int = 3
  step_seconds: int = 2
  wall_seconds: float = 20.0
  total: int = 1024 * MIB


class ForkCommand(IntEnum):
  """Commands to the fork server."""

  FORK = 0
  KILL = 1


class MatcherCommand(IntEnum):
  """Commands to a matcher."""

  START = 0
  ACCEPT = 1
  RELEASE = 2


class MatcherStatus(IntEnum):
  """The state of a matcher after a token."""

  ACTIVE = 0
  STOPPED = 1
  ERROR = 2


GrammarKind = Literal["json", "regex"]
FORK_COMMAND = struct.Struct("<BQ")  # command, number of the grammar
LENGTH = struct.Struct("<Q")
MATCHER_COMMAND = struct.Struct("<BII")  # command, number of the matcher, token

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # of prctl: the signal that comes when the parent ends
_MAX_THREADS = 8
_NICENESS = 5  # lower priority than the frontend and the engine

# JSON as `json.dumps` writes it. With flexible whitespace an output might never end.
_JSON_OPTIONS: Any = {
  "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False,
}  # fmt: skip


def receive(source: socket.socket, count: int) -> bytearray:
  """Reads exactly `count` bytes."""
  found = bytearray(count)
  view = memoryview(found)
  while view:
    taken = source.recv_into(view)
    if not taken:
      raise EOFError
    view = view[taken:]
  return found


def send_text(target: socket.socket, *texts: str) -> None:
  """Sends texts, each after its length."""
  encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
  target.sendall(b"".join(LENGTH.pack(len(text)) + text for text in encoded))


def receive_text(source: socket.socket) -> str:
  """Receives the next text of `send_text`."""
  (length,) = LENGTH.unpack(receive(source, LENGTH.size))
  return receive(source, length).decode("utf-8", "surrogatepass")


def load_token_table(kind: str, values: tuple[Any, ...], size: int) -> Any:
  """The tokenizer of llguidance: the bytes of all tokens among `size` logits, and the end-of-sequence token."""
  return _TOKEN_TABLE_LOADERS[kind](*values, size)


def _serve_forks(control: socket.socket) -> None:
  """The fork server: reads the tokenizer and the limits from stdin, then executes commands."""
  (kind, values), size, limits = pickle.load(sys.stdin.buffer)
  limits = GrammarLimits(*limits)
  try:
    tokens = load_token_table(kind, values, size)
  except ValueError as error:
    send_text(control, f"Structured outputs need a tokenizer whose token bytes are known: {error}.")
    return
  gc.freeze()  # so that forks share the memory
  send_text(control, "")
  children: dict[int, int] = {}
  while True:
    readable, _, _ = select.select([control], [], [], 1.0)
    if readable:
      message, sockets, _, _ = socket.recv_fds(control, FORK_COMMAND.size, 1)
      if not message:
        return
      command, number = FORK_COMMAND.unpack(message)
      if command == ForkCommand.FORK:
        with suppress(OSError):  # fork failed: the socket closes, which the other end notices
          if (pid := os.fork()) == 0:
            _run_grammar_process(sockets[0], control, tokens, size, limits)
          children[number] = pid
        os.close(sockets[0])
      elif number in children:  # not reaped yet, so the pid is still valid
        os.kill(children[number], signal.SIGKILL)
    for number, pid in list(children.items()):
      if os.waitpid(pid, os.WNOHANG)[0]:
        del children[number]


def _run_grammar_process(file: int, control: socket.socket, tokens: Any, size: int, limits: GrammarLimits) -> NoReturn:
  """The body of a grammar process, after the fork."""
  try:
    control.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the abort message of llguidance
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    if _LINUX:
      ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
      with open("/proc/self/oom_score_adj", "w") as score:  # out of memory, the kernel ends this process first
        score.write("1000")
      _limit(resource.RLIMIT_AS, _address_space() + limits.memory)
    with socket.socket(fileno=file) as pipe:
      _GrammarProcess(pipe, tokens, size, limits).run()
  except (EOFError, OSError):
    pass  # the server has ended
  except BaseException:
    os._exit(1)  # out of memory, or a panic
  os._exit(0)


class _GrammarProcess:
  """Compiles one grammar and holds its matchers."""

  def __init__(self, pipe: socket.socket, tokens: Any, size: int, limits: GrammarLimits) -> None:
    self._pipe, self._tokens, self._limits = pipe, tokens, limits
    self._width = bitmask_bytes(size)
    self._matchers: dict[int, Any] = {}
    self._executor: Any = None

  def run(self) -> None:
    """Runs until the socket closes."""
    kind, text = receive_text(self._pipe), receive_text(self._pipe)
    _limit_seconds(self._limits.compile_seconds)
    matcher, error = self._compile(kind, text)
    send_text(self._pipe, error)
    if matcher is None:
      return
    first = self._bitmask(matcher)
    private, before = _private_memory(), _address_space()
    while True:
      used = max(private + _address_space() - before, private)
      self._pipe.sendall(LENGTH.pack(used))
      (count,) = LENGTH.unpack(receive(self._pipe, LENGTH.size))
      commands = [*MATCHER_COMMAND.iter_unpack(receive(self._pipe, count * MATCHER_COMMAND.size))]
      _limit_seconds(self._limits.step_seconds)
      self._pipe.sendall(b"".join(self._execute(commands, matcher, first)))

  def _compile(self, kind: str, text: str) -> tuple[Any, str]:
    """A matcher and an empty text, or None and an error message."""
    from llguidance import LLMatcher

    try:
      if kind == "json":
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
      else:
        grammar = LLMatcher.grammar_from_regex(text)
    except ValueError as error:  # NaN, or half of a surrogate pair
      return None, f"{error}."
    matcher = LLMatcher(self._tokens, grammar, log_level=0)
    if matcher.is_error():
      return None, " ".join(matcher.get_error().split())
    matcher.compute_bitmask()
    if matcher.is_error():  # for example a schema that refers to itself
      return None, "no text matches it."
    return matcher, ""

  def _execute(self, commands: list[tuple[int, int, int]], matcher: Any, first: bytes) -> list[bytes]:
    """Executes commands; returns the status and the bitmask of every started or advanced matcher."""
    replies: dict[int, tuple[MatcherStatus, bytes]] = {}
    accepted: list[tuple[int, int]] = []
    for command, number, token in commands:
      if command == MatcherCommand.RELEASE:
        self._matchers.pop(number, None)
      elif command == MatcherCommand.START:
        self._matchers[number] = matcher.deep_copy()
        replies[number] = (MatcherStatus.ACTIVE, first)
      else:
        accepted.append((number, token))
    if accepted:
      replies |= self._accept(accepted)
    replied = (number for command, number, _ in commands if command != MatcherCommand.RELEASE)
    return [part for number in replied for part in (bytes([replies[number][0]]), replies[number][1])]

  def _accept(self, tokens: list[tuple[int, int]]) -> dict[int, tuple[MatcherStatus, bytes]]:
    """Advances several matchers by a token each, in parallel where there are cores."""
    matchers = {number: self._matchers[number] for number, _ in tokens}
    if len(tokens) == 1:
      (number, token), *_ = tokens
      fits = [matchers[number].consume_token(token)]
    else:
      fits = self._threads().consume_token_par([(matchers[number], token) for number, token in tokens])
    statuses = {
      number: MatcherStatus.ERROR
      if not fit
      else MatcherStatus.STOPPED
      if matchers[number].is_stopped()
      else MatcherStatus.ACTIVE
      for (number, _), fit in zip(tokens, fits, strict=True)
    }
    active = [number for number, status in statuses.items() if status == MatcherStatus.ACTIVE]
    bitmasks = dict.fromkeys(statuses, bytes(self._width))
    if len(active) == 1:
      bitmasks[active[0]] = self._bitmask(matchers[active[0]])
    elif active:
      bits = ctypes.create_string_buffer(len(active) * self._width)
      rows = [(matchers[number], row) for row, number in enumerate(active)]
      self._threads().unsafe_compute_mask_ptr(rows, ctypes.addressof(bits), self._width, len(active))
      whole = bits.raw
      bitmasks |= {n: whole[i * self._width : (i + 1) * self._width] for i, n in enumerate(active)}
    for number in active:
      if matchers[number].is_error():  # no token can follow, or finding one exceeds llguidance's limits
        statuses[number], bitmasks[number] = MatcherStatus.ERROR, bytes(self._width)
    return {number: (status, bitmasks[number]) for number, status in statuses.items()}

  def _bitmask(self, matcher: Any) -> bytes:
    return matcher.compute_bitmask()[: self._width]  # llguidance may return one word more

  def _threads(self) -> Any:
    if self._executor is None:
      from llguidance import LLExecutor

      self._executor = LLExecutor(min(os.cpu_count() or 1, _MAX_THREADS))
    return self._executor


def bitmask_bytes(size: int) -> int:
  """Bytes of a token bitmask: whole words of 32 bits."""
  return -(-size // 32) * 4


def _load_hugging_face(text: str, eos: int, size: int) -> Any:
  from llguidance import LLTokenizer

  return LLTokenizer(text, n_vocab=size, eos_token=eos)


def _load_tiktoken(name: str, split: str, ranks: dict[bytes, int], special: dict[str, int], eos: int, size: int) -> Any:
  from llguidance.tiktoken import lltokenizer_from_encoding
  from tiktoken import Encoding

  encoding = Encoding(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)
  return lltokenizer_from_encoding(encoding, n_vocab=size, eos_token=eos)


def _load_sentence_piece(model: bytes, size: int) -> Any:
  from llguidance import LLTokenizer
  from sentencepiece import SentencePieceProcessor

  return LLTokenizer(cast(Any, _SentencePieceTokens(SentencePieceProcessor(model_proto=model), size)))


class _SentencePieceTokens:
  """A SentencePiece vocabulary in the form of llguidance's `TokenizerWrapper`; unused ids have no bytes."""

  is_tokenizer_wrapper = True

  def __init__(self, processor: Any, size: int) -> None:
    count = processor.get_piece_size()
    self.bos_token_id, self.eos_token_id = processor.bos_id(), processor.eos_id()
    self.special_token_ids = [
      t for t in range(count) if processor.is_control(t) or processor.is_unknown(t) or processor.is_unused(t)
    ]
    self.tokens = [self._bytes(processor, token) for token in range(count)] + [b""] * (size - count)
    self._processor = processor

  def __call__(self, text: str) -> list[int]:
    return self._processor.encode(text)

  @staticmethod
  def _bytes(processor: Any, token: int) -> bytes:
    piece = processor.id_to_piece(token)
    return bytes([int(piece[3:-1], 16)]) if processor.is_byte(token) else piece.replace("\u2581", " ").encode()


_TOKEN_TABLE_LOADERS: dict[str, Callable[..., Any]] = {
  "huggingface": _load_hugging_face,
  "tiktoken": _load_tiktoken,
  "sentencepiece": _load_sentence_piece,
}


def _limit(which: int, value: int) -> None:
  """Sets a resource limit, unless a lower one is already set."""
  _, hard = resource.getrlimit(which)
  resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _limit_seconds(seconds: int) -> None:
  """Limits this process to `seconds` more of processor time."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def _address_space() -> int:
  if not _LINUX:
    return 0
  with open("/proc/self/statm", "rb") as file:
    return int(file.read().split()[0]) * resource.getpagesize()


def _private_memory() -> int:
  """Private memory of this process in bytes."""
  if not _LINUX:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with open("/proc/self/smaps_rollup", "rb") as file:
    lines = file.read().decode().splitlines()
  return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


if __name__ == "__main__":
  _serve_forks(socket.socket(fileno=int(sys.argv[1])))
