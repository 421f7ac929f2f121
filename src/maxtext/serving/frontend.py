"""`maxtext serve`: the frontend process, which clients connect to, in front of the engine process.

It imports no JAX and does little work, so it always responds: connections, API keys, `/health`, and forwarding. The
engine process does the rest (`server.py`), so neither a long computation, nor a body that is slow to parse, nor a crash
of the engine blocks the frontend. While the model is loading, and after the engine has ended, requests get a 503.

SIGTERM ends the server after the accepted requests; when the engine ends, the server ends too.
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.logs import ON_STDERR
from maxtext.serving.auth import AuthenticationMiddleware
from maxtext.serving.channel import Channel
from maxtext.serving.chat_page import chat_page_response
from maxtext.serving.connections import Connections, LimitedProtocol, Listener, reserve_file_descriptors
from maxtext.serving.errors import error_response
from maxtext.serving.limits import ServerLimits
from maxtext.serving.request_log import RequestLogMiddleware

_LOG = logging.getLogger(__name__)

Client = Hashable  # as `AuthenticationMiddleware` identifies them
if TYPE_CHECKING:
  from maxtext.inference.inference_model import InferenceModel

_BACKLOG = 1024  # connections that the kernel queues
_FAILURE_TIMEOUT = 5  # seconds to report a failure of the engine to clients
_STOP_SECONDS = 10  # for the engine process to end
_RETRY, _RETRY_SOON = {"Retry-After": "5"}, {"Retry-After": "1"}
_EXTRA_REQUESTS = 64  # of a client, besides slots and its share of the queue: for /metrics and invalid requests
_MAX_BUFFERED = 2**23  # bytes of a response that may wait for a slow client
_UNAVAILABLE = {
  "starting": "The model is loading: try again later.",
  "failed": "The engine has failed: restart the server.",
}
_TOO_MANY = "You have too many open requests (disconnected ones count until they end): try again later."
_FORWARDED_SCOPE = (
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


def serve(
  load: "Callable[[], InferenceModel]",
  name: str,
  host: str,
  port: int,
  limits: ServerLimits,
  access_log: bool = False,
  chat_page: bool = True,
) -> None:
  """Serves until SIGTERM or SIGINT; returns when the last request has finished, or after the shutdown timeout.

  Args:
    load: loads the model in the engine process, so it must be picklable.
    name: the served model name.
    host: address to listen on.
    port: port to listen on; 0 chooses a free one.
    limits: limits of the server.
    access_log: whether every response is logged.
    chat_page: whether there is a page to chat at `/`.

  Raises:
    ConfigError: raised by `load`, or the address cannot be used.
    RunError: the engine has failed.
  """
  try:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
  except OSError as error:
    raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}.") from None
  address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
  _LOG.info(f"maxtext: listening on {address}; loading {name}", extra=ON_STDERR)
  engine = EngineClient(load, name, limits)
  try:
    frontend = Frontend(engine, limits, chat_page)
    app = RequestLogMiddleware(AuthenticationMiddleware(frontend, limits.api_keys, frontend.open_paths), access_log)
    asyncio.run(_run(app, engine, listening, f"serving {name} on {address}", limits))
  finally:
    engine.stop()
  if engine.failure is not None:
    raise engine.failure


async def _run(
  app: ASGIApp, engine: "EngineClient", listening: socket.socket, ready: str, limits: ServerLimits
) -> None:
  connections = Connections(replace(limits.connections, total=reserve_file_descriptors(limits.connections.total)))
  config = uvicorn.Config(
    app,
    ws="none",
    proxy_headers=False,  # a local client could forge its address
    server_header=False,
    log_level="error",  # clients can cause any number of warnings
    # A float is fine, although uvicorn's type says int.
    timeout_keep_alive=cast(Any, limits.connections.header_seconds),
    timeout_graceful_shutdown=cast(Any, limits.shutdown_timeout),
    lifespan="off",
  )
  server = _UvicornServer(config, connections)
  listening_task = asyncio.create_task(engine.listen(lambda: _LOG.info(ready), server.fail))
  await server.serve(sockets=[listening])
  listening_task.cancel()


class EngineClient:
  """Starts the engine process and forwards requests to it.

  Attributes:
    status: "starting", "ok" or "failed".
    failure: why the process ended by itself; None while it works, and after `stop`.
  """

  def __init__(self, load: "Callable[[], InferenceModel]", name: str, limits: ServerLimits) -> None:
    from maxtext.serving import engine_process

    self.status, self.failure = "starting", cast("Exception | None", None)
    self._busy, self._seconds_since_step, self._last_report = False, cast("float | None", None), time.monotonic()
    self._replies: dict[int, _Reply] = {}
    # Of all requests that have not ended in the engine, including those whose client has disconnected.
    self._clients: dict[int, Client] = {}
    self._slots, self._num_open = 0, Counter[Client]()
    self._queue_share = limits.queue_share
    # The engine process does not need the keys, only the share of the queue that follows from their number.
    engine_limits = replace(limits, max_queued_requests_per_client=limits.queue_share, api_keys=())
    self._numbers = itertools.count()
    self._channel: Channel | None = None
    self._socket, theirs = socket.socketpair()
    spawn = multiprocessing.get_context("spawn")  # without the modules imported here
    self._process: BaseProcess = spawn.Process(target=engine_process.run, args=(theirs, load, name, engine_limits))
    self._process.start()
    theirs.close()

  def health(self) -> dict[str, Any]:
    """The body of `/health`. The time since the last step keeps growing while the engine process sends no report."""
    age = self._seconds_since_step
    if age is not None:
      age = round(age + time.monotonic() - self._last_report, 3)
    return {"status": self.status, "busy": self._busy, "seconds_since_last_step": age}

  async def listen(self, ready: Callable[[], None], ended: Callable[[], None]) -> None:
    """Receives messages of the engine process until it ends or fails; then ends all open responses."""
    self._channel = await Channel.of(self._socket)
    while (message := await self._channel.receive()) is not None:
      kind, *rest = message
      if kind == "state":
        status, self._busy, self._seconds_since_step, self._slots = rest
        self._last_report = time.monotonic()
        if status == "ok" and self.status == "starting":
          self.status = "ok"
          ready()
      elif kind == "failed":
        self.failure = rest[0]
        break  # the last message; the process waits for this end to close
      else:
        number, reply = rest
        if reply is None:
          self._remove(number)
        if number in self._replies:
          self._replies[number].put_nowait(reply)
    self.status = "failed"
    if self.failure is None:
      code = await asyncio.to_thread(self._exit_code)
      self.failure = RunError(f"the engine process ended with code {code}.")
    for queue in self._replies.values():
      queue.put_nowait(None)
    ended()

  def is_full(self, client: Client) -> bool:
    """Whether a client has as many open requests as could run or wait; disconnected ones count until they end."""
    return self._num_open[client] >= self._slots + self._queue_share + _EXTRA_REQUESTS

  def _remove(self, number: int) -> None:
    client = self._clients.pop(number)
    self._num_open[client] -= 1
    if not self._num_open[client]:
      del self._num_open[client]

  @contextmanager
  def request(self, scope: Scope, body: bytes) -> "Iterator[_Reply]":
    """Forwards a request; yields the messages of its response, then None. Leaving the context cancels the request."""
    assert self._channel is not None
    state = scope.get("state", {})
    number, queue, client = next(self._numbers), _Reply(state.get("abort")), state.get("client")
    self._replies[number], self._clients[number] = queue, client
    self._num_open[client] += 1
    forwarded = {key: scope[key] for key in _FORWARDED_SCOPE if key in scope} | {"state": {"client": client}}
    self._channel.send("request", number, forwarded, body)
    try:
      yield queue
    finally:
      del self._replies[number]
      self._channel.send("disconnect", number)

  def stop(self) -> None:
    """Ends the process, which ends by itself when its socket closes."""
    self._socket.close()
    self._process.join(_STOP_SECONDS)
    if self._process.is_alive():
      self._process.kill()
      self._process.join()

  def _exit_code(self) -> int | None:
    self._process.join(_STOP_SECONDS)
    return self._process.exitcode


class _Reply(asyncio.Queue[Message | None]):
  """The messages of a response that wait for a client; a client that reads too slowly is disconnected.

  A single message may be of any size: a response that is not a stream has only one.
  """

  def __init__(self, abort: Callable[[], None] | None) -> None:
    super().__init__()
    self._abort, self._bytes = abort, 0

  def put_nowait(self, item: Message | None) -> None:
    if item is not None and self._bytes > _MAX_BUFFERED:
      if self._abort is not None:
        self._abort()  # drops what uvicorn has buffered, too
      self.discard()
      return
    super().put_nowait(item)
    self._bytes += _length(item)

  def discard(self) -> None:
    """Drops all messages and ends the response."""
    while not self.empty():
      self.get_nowait()
    self.put_nowait(None)

  def get_nowait(self) -> Message | None:
    item = super().get_nowait()  # `get` calls this, too
    self._bytes -= _length(item)
    return item


def _length(message: Message | None) -> int:
  return len(message.get("body", b"")) if message else 0


class Frontend:
  """The ASGI application of the frontend process.

  Attributes:
    open_paths: paths that need no API key.
  """

  def __init__(self, engine: EngineClient, limits: ServerLimits, chat_page: bool) -> None:
    self._engine, self._max_body = engine, limits.max_body_bytes
    self._chat_page = chat_page_response(bool(limits.api_keys)) if chat_page else None
    self.open_paths = ("/health", "/") if chat_page else ("/health",)

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    client = scope.get("state", {}).get("client")
    if scope["path"] in self.open_paths and scope["method"] not in ("GET", "HEAD"):
      response: Response = error_response(405, f"{scope['path']} takes GET and HEAD.", {"Allow": "GET, HEAD"})
    elif scope["path"] == "/health":
      ok = self._engine.status == "ok"
      response = JSONResponse(self._engine.health(), 200 if ok else 503, None if ok else _RETRY)
    elif scope["path"] == "/" and self._chat_page:
      response = self._chat_page
    elif unavailable := _UNAVAILABLE.get(self._engine.status):
      response = error_response(503, unavailable, _RETRY)
    elif self._engine.is_full(client):
      response = error_response(429, _TOO_MANY, _RETRY_SOON)
    elif (body := await self._read(scope, receive)) is None:
      response = error_response(413, f"The request has more than {self._max_body} bytes.")
    elif self._engine.is_full(client):  # more requests of the client may have arrived
      response = error_response(429, _TOO_MANY, _RETRY_SOON)
    else:
      return await self._forward(scope, body, receive, send)
    await response(scope, receive, send)

  async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
    """The body; None if it is too large or the client has disconnected."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    if length.isdigit() and int(length) > self._max_body:
      return None
    body, more = bytearray(), True
    while more:
      message = await receive()
      body += message.get("body", b"")
      more = message.get("more_body", False)
      if message["type"] == "http.disconnect" or len(body) > self._max_body:
        return None
    return bytes(body)

  async def _forward(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    started = False
    with self._engine.request(scope, body) as messages:
      watching = asyncio.create_task(_watch_disconnect(receive, messages))
      try:
        while (message := await messages.get()) is not None:
          started = True
          await send(message)
          if message["type"] == "http.response.body" and not message.get("more_body"):
            return
      finally:
        watching.cancel()
    if not started:
      await error_response(503, _UNAVAILABLE["failed"], _RETRY)(scope, receive, send)
    # A started response without an end makes uvicorn close the connection.


async def _watch_disconnect(receive: Receive, messages: _Reply) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass
  messages.discard()


class _UvicornServer(uvicorn.Server):
  """Exits with code 0 on a signal; uvicorn by itself raises the signal again at the end."""

  def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
    super().__init__(config)
    self._connections = connections

  @contextmanager
  def capture_signals(self) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
      loop.add_signal_handler(number, self._shut_down)
    yield

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    def protocol() -> LimitedProtocol:
      return LimitedProtocol(self._connections, self.config, server_state=self.server_state, app_state={})

    self.servers = [cast(Any, Listener(listening, self._connections, protocol)) for listening in sockets or ()]
    self.started = True

  def fail(self) -> None:
    """Shuts down after every request got the error."""
    self.config.timeout_graceful_shutdown = _FAILURE_TIMEOUT
    self.should_exit = True

  def _shut_down(self) -> None:
    if self.should_exit:
      self.force_exit = True
    _LOG.warning("maxtext: finishing accepted requests; a second signal ends at once.", extra=ON_STDERR)
    self.should_exit = True
