"""The processes that compile and match grammars, so that none of them can take the server down.

A schema of 45 bytes can ask for more memory than there is, and the library ends its process when there is none left. So
a small interpreter, without JAX and without threads, reads the tokenizer once and forks a process for every grammar: a
fork server. Each has limits of memory and processor time of its own, compiles one grammar, keeps the matchers of all
answers that follow it, and ends when its socket closes. The processes of all grammars end with the fork server, and
that one with the server.

This file is run by its path and imports nothing of the package, so that it starts in a moment.
`maxtext.inference.grammar` is the other end of the sockets.
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
  """What a server gives grammars.

  Attributes:
    memory: bytes that the process of one grammar may add to what it shares with the others.
    compile_seconds: processor time to compile one.
    step_seconds: processor time of one step of all answers that follow one.
    wall_seconds: time by the clock for either, since a process may also be stopped, or starve.
    total: bytes of all grammars together; those that nobody follows go first, then whoever has most.
  """

  memory: int = 256 * MIB
  compile_seconds: int = 3
  step_seconds: int = 2
  wall_seconds: float = 20.0
  total: int = 1024 * MIB


class Order(IntEnum):
  """What the fork server is asked to do."""

  FORK = 0
  KILL = 1


class Act(IntEnum):
  """What happens to one answer."""

  BEGIN = 0
  TAKE = 1
  END = 2


class Status(IntEnum):
  """How far an answer has come."""

  GOES_ON = 0
  STOP = 1
  MISFIT = 2


Kind = Literal["json", "regex"]
TO_FORK_SERVER = struct.Struct("<BQ")  # order, number of the grammar
LENGTH = struct.Struct("<Q")
ACT = struct.Struct("<BII")  # act, number of the answer, token

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # of prctl: the signal that comes when the parent ends
_MOST_THREADS = 8
_NICENESS = 5  # where cores are short, the front process and the engine come first

# JSON as Python writes it. Free whitespace would be a way on that never ends.
_JSON: Any = {
  "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False,
}  # fmt: skip


def receive(source: socket.socket, count: int) -> bytearray:
  """So many bytes of a stream."""
  found = bytearray(count)
  view = memoryview(found)
  while view:
    taken = source.recv_into(view)
    if not taken:
      raise EOFError
    view = view[taken:]
  return found


def send_text(target: socket.socket, *texts: str) -> None:
  """Texts, each behind its length."""
  encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
  target.sendall(b"".join(LENGTH.pack(len(text)) + text for text in encoded))


def receive_text(source: socket.socket) -> str:
  """The next text of `send_text`."""
  (length,) = LENGTH.unpack(receive(source, LENGTH.size))
  return receive(source, length).decode("utf-8", "surrogatepass")


def open_tokens(kind: str, values: tuple[Any, ...], size: int) -> Any:
  """The bytes of all tokens, as llguidance takes them, among `size` logits; the end of a document ends an answer."""
  return _OPEN_TOKENS[kind](*values, size)


def _serve_forks(control: socket.socket) -> None:
  """The fork server: reads what it must know of tokens, and limits, from its input; then forks and kills as told."""
  (kind, values), size, limits = pickle.load(sys.stdin.buffer)
  limits = GrammarLimits(*limits)
  try:
    tokens = open_tokens(kind, values, size)
  except ValueError as error:
    send_text(control, f"Answers of a given form need tokens whose bytes are known: {error}.")
    return
  gc.freeze()  # so that the forks share what is there
  send_text(control, "")
  children: dict[int, int] = {}
  while True:
    readable, _, _ = select.select([control], [], [], 1.0)
    if readable:
      order, sockets, _, _ = socket.recv_fds(control, TO_FORK_SERVER.size, 1)
      if not order:
        return
      what, number = TO_FORK_SERVER.unpack(order)
      if what == Order.FORK:
        with suppress(OSError):  # no process is to be had: the socket closes, and the other end knows
          if (pid := os.fork()) == 0:
            _become(sockets[0], control, tokens, size, limits)
          children[number] = pid
        os.close(sockets[0])
      elif number in children:  # not waited for yet, so the number is still its own
        os.kill(children[number], signal.SIGKILL)
    for number, pid in list(children.items()):
      if os.waitpid(pid, os.WNOHANG)[0]:
        del children[number]


def _become(file: int, control: socket.socket, tokens: Any, size: int, limits: GrammarLimits) -> NoReturn:
  """The process of one grammar, from its fork to its end."""
  try:
    control.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the library says as it aborts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    if _LINUX:
      ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
      with open("/proc/self/oom_score_adj", "w") as score:  # where memory is short, this goes and not the server
        score.write("1000")
      _limit(resource.RLIMIT_AS, _address_space() + limits.memory)
    with socket.socket(fileno=file) as pipe:
      _GrammarProcess(pipe, tokens, size, limits).run()
  except (EOFError, OSError):
    pass  # the server has left
  except BaseException:
    os._exit(1)  # no memory, or a panic
  os._exit(0)


class _GrammarProcess:
  """Compiles one grammar and holds the matchers of its answers."""

  def __init__(self, pipe: socket.socket, tokens: Any, size: int, limits: GrammarLimits) -> None:
    self._pipe, self._tokens, self._limits = pipe, tokens, limits
    self._width = mask_bytes(size)
    self._matchers: dict[int, Any] = {}
    self._executor: Any = None

  def run(self) -> None:
    """Until the socket closes."""
    kind, text = receive_text(self._pipe), receive_text(self._pipe)
    _limit_seconds(self._limits.compile_seconds)
    matcher, refusal = self._compile(kind, text)
    send_text(self._pipe, refusal)
    if matcher is None:
      return
    first = self._mask(matcher)
    private, before = _private_memory(), _address_space()
    while True:
      used = max(private + _address_space() - before, private)
      self._pipe.sendall(LENGTH.pack(used))
      (count,) = LENGTH.unpack(receive(self._pipe, LENGTH.size))
      acts = [*ACT.iter_unpack(receive(self._pipe, count * ACT.size))]
      _limit_seconds(self._limits.step_seconds)
      self._pipe.sendall(b"".join(self._do(acts, matcher, first)))

  def _compile(self, kind: str, text: str) -> tuple[Any, str]:
    """A matcher and nothing to say, or why there is none."""
    from llguidance import LLMatcher

    try:
      if kind == "json":
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
      else:
        grammar = LLMatcher.grammar_from_regex(text)
    except ValueError as error:  # NaN, or half of a surrogate pair
      return None, f"{error}."
    matcher = LLMatcher(self._tokens, grammar, log_level=0)
    if matcher.is_error():
      return None, " ".join(matcher.get_error().split())
    matcher.compute_bitmask()
    if matcher.is_error():  # a reference to itself, say
      return None, "no answer can be like that."
    return matcher, ""

  def _do(self, acts: list[tuple[int, int, int]], matcher: Any, first: bytes) -> list[bytes]:
    """For every answer that begins or goes on: its status, and the bits of what may come next."""
    replies: dict[int, tuple[Status, bytes]] = {}
    going: list[tuple[int, int]] = []
    for act, number, token in acts:
      if act == Act.END:
        self._matchers.pop(number, None)
      elif act == Act.BEGIN:
        self._matchers[number] = matcher.deep_copy()
        replies[number] = (Status.GOES_ON, first)
      else:
        going.append((number, token))
    if going:
      replies |= self._take(going)
    answered = (number for act, number, _ in acts if act != Act.END)
    return [part for number in answered for part in (bytes([replies[number][0]]), replies[number][1])]

  def _take(self, tokens: list[tuple[int, int]]) -> dict[int, tuple[Status, bytes]]:
    """Goes on by a token in each of several answers, at once where there are cores."""
    matchers = {number: self._matchers[number] for number, _ in tokens}
    if len(tokens) == 1:
      (number, token), *_ = tokens
      fits = [matchers[number].consume_token(token)]
    else:
      fits = self._threads().consume_token_par([(matchers[number], token) for number, token in tokens])
    statuses = {
      number: Status.MISFIT if not fit else Status.STOP if matchers[number].is_stopped() else Status.GOES_ON
      for (number, _), fit in zip(tokens, fits, strict=True)
    }
    open_answers = [number for number, status in statuses.items() if status == Status.GOES_ON]
    masks = dict.fromkeys(statuses, bytes(self._width))
    if len(open_answers) == 1:
      masks[open_answers[0]] = self._mask(matchers[open_answers[0]])
    elif open_answers:
      bits = ctypes.create_string_buffer(len(open_answers) * self._width)
      places = [(matchers[number], place) for place, number in enumerate(open_answers)]
      self._threads().unsafe_compute_mask_ptr(places, ctypes.addressof(bits), self._width, len(open_answers))
      whole = bits.raw
      masks |= {n: whole[i * self._width : (i + 1) * self._width] for i, n in enumerate(open_answers)}
    for number in open_answers:
      if matchers[number].is_error():  # nothing can follow, or it takes too much work to know
        statuses[number], masks[number] = Status.MISFIT, bytes(self._width)
    return {number: (status, masks[number]) for number, status in statuses.items()}

  def _mask(self, matcher: Any) -> bytes:
    return matcher.compute_bitmask()[: self._width]  # the library's may have a word more

  def _threads(self) -> Any:
    if self._executor is None:
      from llguidance import LLExecutor

      self._executor = LLExecutor(min(os.cpu_count() or 1, _MOST_THREADS))
    return self._executor


def mask_bytes(size: int) -> int:
  """Of the bits of a vocabulary: whole words of 32."""
  return -(-size // 32) * 4


def _open_hugging_face(text: str, eos: int, size: int) -> Any:
  from llguidance import LLTokenizer

  return LLTokenizer(text, n_vocab=size, eos_token=eos)


def _open_tiktoken(name: str, split: str, ranks: dict[bytes, int], special: dict[str, int], eos: int, size: int) -> Any:
  from llguidance.tiktoken import lltokenizer_from_encoding
  from tiktoken import Encoding

  encoding = Encoding(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)
  return lltokenizer_from_encoding(encoding, n_vocab=size, eos_token=eos)


def _open_sentence_piece(model: bytes, size: int) -> Any:
  from llguidance import LLTokenizer
  from sentencepiece import SentencePieceProcessor

  return LLTokenizer(cast(Any, _Pieces(SentencePieceProcessor(model_proto=model), size)))


class _Pieces:
  """A SentencePiece vocabulary as llguidance's `TokenizerWrapper` describes one; what is no token has no bytes."""

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


_OPEN_TOKENS: dict[str, Callable[..., Any]] = {
  "huggingface": _open_hugging_face,
  "tiktoken": _open_tiktoken,
  "sentencepiece": _open_sentence_piece,
}


def _limit(which: int, most: int) -> None:
  """Lowers a limit, where a lower one does not hold already."""
  _, hard = resource.getrlimit(which)
  resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _limit_seconds(seconds: int) -> None:
  """Ends this process once it has computed for so many more seconds."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def _address_space() -> int:
  if not _LINUX:
    return 0
  with open("/proc/self/statm", "rb") as file:
    return int(file.read().split()[0]) * resource.getpagesize()


def _private_memory() -> int:
  """Bytes that this process shares with no other."""
  if not _LINUX:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with open("/proc/self/smaps_rollup", "rb") as file:
    lines = file.read().decode().splitlines()
  return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


if __name__ == "__main__":
  _serve_forks(socket.socket(fileno=int(sys.argv[1])))
