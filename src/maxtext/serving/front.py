"""What `maxtext serve` does: the process that clients talk to, in front of the one that answers.

It imports no JAX and does little, so that it always has time: connections, API keys, `/health`, and bytes that it
passes on. The engine's process does the rest (`server.py`): neither a thread that computes there, nor a body that is
dear to parse, nor even its end keeps anybody here waiting. Until the model is ready, and after the engine has ended,
requests get a 503.

SIGTERM ends the server after the requests that it has accepted; an engine that ends takes the server with it.
"""

import asyncio
import itertools
import logging
import multiprocessing
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.logs import ON_STDERR
from maxtext.serving.access import Access, refusal
from maxtext.serving.channel import Channel
from maxtext.serving.connections import Connections, LimitedProtocol, Listener, reserve_files
from maxtext.serving.limits import Limits

_LOG = logging.getLogger(__name__)

Client = Hashable  # as `Access` tells them apart
if TYPE_CHECKING:
  from maxtext.inference.loading import Loaded

_LISTEN = 1024  # connections that the kernel holds meanwhile
_FAILED_GRACE = 5  # seconds to tell clients that the engine has failed
_END_SECONDS = 10  # for the engine's process, when it is told to
_RETRY, _RETRY_SOON = {"Retry-After": "5"}, {"Retry-After": "1"}
_SPARE_PLACES = 64  # of a client, beside slots and its places to wait: pages, and requests that will be refused
_MAX_QUEUED = 2**23  # bytes of an answer that wait for a client, behind which no more are kept
_ABSENT = {
  "starting": "The model is being loaded: try again later.",
  "failed": "The engine has failed; the server must be started again.",
}
_FULL = "Too many of your requests are under way, those that were left before their answer among them: try again later."
_PASSED_ON = (
  "type",
  "asgi",
  "http_version",
  "method",
  "scheme",
  "path",
  "raw_path",
  "query_string",
  "headers",
)


def serve(load: "Callable[[], Loaded]", name: str, host: str, port: int, limits: Limits) -> None:
  """Serves until SIGTERM or SIGINT; returns when the last request has ended, or the grace is over.

  Args:
    load: makes what answers, in the engine's process, so it must be picklable.
    name: of the model, for clients.
    host: address to listen on.
    port: 0 takes a free one.
    limits: what is taken.

  Raises:
    ConfigError: as `load` has it, or where nothing can listen there.
    RunError: when the engine has failed.
  """
  try:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_LISTEN)
  except OSError as error:
    raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}.") from None
  address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
  _LOG.info(f"maxtext: listening on {address}; loading {name}", extra=ON_STDERR)
  engine = EngineProcess(load, name, limits)
  try:
    asyncio.run(_run(engine, listening, f"serving {name} on {address}", limits))
  finally:
    engine.end()
  if engine.failure is not None:
    raise engine.failure


async def _run(engine: "EngineProcess", listening: socket.socket, ready: str, limits: Limits) -> None:
  connections = Connections(replace(limits.connections, total=reserve_files(limits.connections.total)))
  settings = uvicorn.Config(
    Access(Front(engine, limits), limits.keys),
    ws="none",
    proxy_headers=False,  # whoever comes from this machine could say that it is someone else
    server_header=False,
    log_level="error",  # a client can cause warnings, as many as it likes
    # Longer than clients keep one, so that they close it; any number of seconds will do, also half of one.
    timeout_keep_alive=cast(Any, limits.connections.head_seconds),
    timeout_graceful_shutdown=cast(Any, limits.grace),
    lifespan="off",
  )
  server = _Server(settings, connections)
  listens = asyncio.create_task(engine.listen(lambda: _LOG.info(ready), server.fail))
  await server.serve(sockets=[listening])
  listens.cancel()


class EngineProcess:
  """The process that answers, as seen from here.

  Attributes:
    status: "starting", "ok" or "failed".
    failure: why it ended by itself; None while it works, and where it was told to end.
  """

  def __init__(self, load: "Callable[[], Loaded]", name: str, limits: Limits) -> None:
    from maxtext.serving import engine_process

    self.status, self.failure = "starting", cast("Exception | None", None)
    self._busy, self._step_age, self._heard = False, cast("float | None", None), time.monotonic()
    self._replies: dict[int, _Reply] = {}
    self._clients: dict[int, Client] = {}  # of requests that have not ended there, also where the client has left
    self._slots, self._under_way = 0, Counter[Client]()
    self._share = limits.share
    # It needs no keys, but what follows from their number.
    told = replace(limits, waiting_per_client=limits.share, keys=())
    self._numbers = itertools.count()
    self._channel: Channel | None = None
    self._end, theirs = socket.socketpair()
    spawn = multiprocessing.get_context("spawn")  # what is imported here must not matter there
    self._process: BaseProcess = spawn.Process(target=engine_process.run, args=(theirs, load, name, told))
    self._process.start()
    theirs.close()

  def health(self) -> dict[str, Any]:
    """What `/health` shows. The age of the last step grows on while nothing is heard."""
    age = None if self._step_age is None else round(self._step_age + time.monotonic() - self._heard, 3)
    return {"status": self.status, "busy": self._busy, "last_step_seconds": age}

  async def listen(self, ready: Callable[[], None], ended: Callable[[], None]) -> None:
    """Takes what the process says, until it ends; all who wait for it are told."""
    self._channel = await Channel.of(self._end)
    while (message := await self._channel.receive()) is not None:
      kind, *rest = message
      if kind == "state":
        status, self._busy, self._step_age, self._slots = rest
        self._heard = time.monotonic()
        if status == "ok" and self.status == "starting":
          self.status = "ok"
          ready()
      elif kind == "failed":
        self.failure = rest[0]
      else:
        number, reply = rest
        if reply is None:
          self._forget(number)
        if number in self._replies:
          self._replies[number].put_nowait(reply)
    self.status = "failed"
    if self.failure is None:
      code = await asyncio.to_thread(self._exit_code)
      self.failure = RunError(f"the engine's process ended with code {code}.")
    for queue in self._replies.values():
      queue.put_nowait(None)
    ended()

  def full(self, client: Client) -> bool:
    """Whether a client has as many requests there as could be answered or wait, those that it left included."""
    return self._under_way[client] >= self._slots + self._share + _SPARE_PLACES

  def _forget(self, number: int) -> None:
    client = self._clients.pop(number)
    self._under_way[client] -= 1
    if not self._under_way[client]:
      del self._under_way[client]

  @contextmanager
  def request(self, scope: Scope, body: bytes) -> "Iterator[_Reply]":
    """The messages of an answer; None is that there will be no more. Leaving the context cancels what has not ended."""
    assert self._channel is not None
    state = scope.get("state", {})
    number, queue, client = next(self._numbers), _Reply(state.get("abort")), state.get("client")
    self._replies[number], self._clients[number] = queue, client
    self._under_way[client] += 1
    passed_on = {key: scope[key] for key in _PASSED_ON if key in scope} | {"state": {"client": client}}
    self._channel.send("request", number, passed_on, body)
    try:
      yield queue
    finally:
      del self._replies[number]
      self._channel.send("leave", number)

  def end(self) -> None:
    """Ends the process: it ends by itself when this end is closed."""
    self._end.close()
    self._process.join(_END_SECONDS)
    if self._process.is_alive():
      self._process.kill()
      self._process.join()

  def _exit_code(self) -> int | None:
    self._process.join(_END_SECONDS)
    return self._process.exitcode


class _Reply(asyncio.Queue[Message | None]):
  """The messages of an answer that wait for its client; one that reads slower than it is written to is given up.

  A single message may be as long as it is: an answer that is no stream has but one.
  """

  def __init__(self, abort: Callable[[], None] | None) -> None:
    super().__init__()
    self._abort, self._bytes = abort, 0

  def put_nowait(self, item: Message | None) -> None:
    if item is not None and self._bytes > _MAX_QUEUED:
      if self._abort is not None:
        self._abort()  # what has been written is not kept either
      self.give_up()
      return
    super().put_nowait(item)
    self._bytes += _length(item)

  def give_up(self) -> None:
    """Nobody takes what is there."""
    while not self.empty():
      self.get_nowait()
    self.put_nowait(None)

  def get_nowait(self) -> Message | None:
    item = super().get_nowait()  # `get` takes it with this too
    self._bytes -= _length(item)
    return item


def _length(message: Message | None) -> int:
  return len(message.get("body", b"")) if message else 0


class Front:
  """The application of the front process."""

  def __init__(self, engine: EngineProcess, limits: Limits) -> None:
    self._engine, self._max_body = engine, limits.body

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    client = scope.get("state", {}).get("client")
    if scope["path"] == "/health" and scope["method"] not in ("GET", "HEAD"):
      response: Response = refusal(405, "/health takes GET and HEAD.", {"Allow": "GET, HEAD"})
    elif scope["path"] == "/health":
      ok = self._engine.status == "ok"
      response = JSONResponse(self._engine.health(), 200 if ok else 503, None if ok else _RETRY)
    elif absent := _ABSENT.get(self._engine.status):
      response = refusal(503, absent, _RETRY)
    elif self._engine.full(client):
      response = refusal(429, _FULL, _RETRY_SOON)
    elif (body := await self._read(scope, receive)) is None:
      response = refusal(413, f"The request has more than {self._max_body} bytes.")
    elif self._engine.full(client):  # others of it have come meanwhile
      response = refusal(429, _FULL, _RETRY_SOON)
    else:
      return await self._pass_on(scope, body, receive, send)
    await response(scope, receive, send)

  async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
    """The body, whatever its length is said to be; None where it is too long, or the client left."""
    said = dict(scope["headers"]).get(b"content-length", b"")
    if said.isdigit() and int(said) > self._max_body:
      return None
    taken, more = bytearray(), True
    while more:
      message = await receive()
      taken += message.get("body", b"")
      more = message.get("more_body", False)
      if message["type"] == "http.disconnect" or len(taken) > self._max_body:
        return None
    return bytes(taken)

  async def _pass_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    started = False
    with self._engine.request(scope, body) as messages:
      leaving = asyncio.create_task(_left(receive, messages))
      try:
        while (message := await messages.get()) is not None:
          started = True
          await send(message)
          if message["type"] == "http.response.body" and not message.get("more_body"):
            return
      finally:
        leaving.cancel()
    if not started:
      await refusal(503, _ABSENT["failed"], _RETRY)(scope, receive, send)
    # An answer that was begun stays without its end, which uvicorn makes a closed connection.


async def _left(receive: Receive, messages: _Reply) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass
  messages.give_up()


class _Server(uvicorn.Server):
  """Ends well on a signal, with exit code 0; uvicorn by itself would raise the signal again at the end."""

  def __init__(self, settings: uvicorn.Config, connections: Connections) -> None:
    super().__init__(settings)
    self._connections = connections

  @contextmanager
  def capture_signals(self) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
      loop.add_signal_handler(number, self._end)
    yield

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    def protocol() -> LimitedProtocol:
      return LimitedProtocol(self._connections, self.config, server_state=self.server_state, app_state={})

    self.servers = [cast(Any, Listener(listening, self._connections, protocol)) for listening in sockets or ()]
    self.started = True

  def fail(self) -> None:
    """Ends after every request has been told that the engine has failed."""
    self.config.timeout_graceful_shutdown = _FAILED_GRACE
    self.should_exit = True

  def _end(self) -> None:
    if self.should_exit:
      self.force_exit = True
    _LOG.warning("maxtext: ending after the requests that are there; once more ends at once.", extra=ON_STDERR)
    self.should_exit = True
