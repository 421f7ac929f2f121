"""What `maxtext serve` does: an HTTP server that speaks OpenAI's protocol, for one model.

A request is refused (400), turned away while too many wait (429), or answered. When its client leaves, its slot is free
before the next step. SIGTERM ends the server after the requests that it has accepted.
"""

import asyncio
import hmac
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxtext.configs import ConfigError
from maxtext.inference import scheduler
from maxtext.inference.answer import Answer
from maxtext.inference.loading import Loaded
from maxtext.inference.meters import Meters
from maxtext.inference.protocol import Body, Chat, Completion
from maxtext.inference.worker import FailedError, FullError, Worker

_FAILED = "The engine has failed; the server must be started again."
_BROKEN = {
  "failed": (503, _FAILED),
  "misfit": (400, "The form that was asked for cannot be kept: it has no end, or takes too much work."),
}
_LOOK_EVERY = 0.05  # seconds between two looks whether a client is still there


@dataclass(frozen=True)
class Limits:
  """What one server takes.

  Attributes:
    waiting: requests without a slot, beyond which others get a 429.
    body: bytes of a request.
    seconds: for one request, from its arrival to its last token.
    grace: seconds that accepted requests have to end after SIGTERM.
    keys: of the API; without any, everyone may ask.
  """

  waiting: int = 256
  body: int = 2**20
  seconds: float = 600.0
  grace: float = 60.0
  keys: tuple[str, ...] = ()


def serve(loaded: Loaded, name: str, host: str, port: int, limits: Limits) -> None:
  """Serves until SIGTERM or SIGINT; returns when the last request has ended, or the grace is over."""
  worker = Worker(loaded.scheduler(), limits.waiting)
  app = make_app(loaded, name, worker, limits)
  try:
    listening = socket.create_server((host, port), backlog=1024)
  except OSError as error:
    raise ConfigError(f"--host {host} --port {port}: {error.strerror}.") from None
  if loaded.config.enable_model_warmup:
    loaded.engine.warm_up()
  worker.start()
  print(f"serving {name} on http://{host}:{listening.getsockname()[1]}", flush=True)
  settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(limits.grace), lifespan="off")
  asyncio.run(_Server(settings).serve(sockets=[listening]))
  worker.stop()


def make_app(loaded: Loaded, name: str, worker: Worker, limits: Limits) -> FastAPI:
  """The routes; the worker is the caller's to start and to stop."""
  app = FastAPI(title="maxtext", docs_url=None, redoc_url=None)
  app.add_middleware(_BodyLimit, most=limits.body)
  meters = Meters(worker.scheduler)
  desk = _Desk(loaded, name, worker, limits, meters)

  def allowed(http: Request) -> None:
    given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
    if limits.keys and not any(hmac.compare_digest(given, key.encode()) for key in limits.keys):
      raise HTTPException(401, "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.")

  guarded = [Depends(allowed)]

  @app.post("/v1/completions", dependencies=guarded)
  async def completions(asked: Completion, http: Request) -> Response:
    return await desk.answer(asked, http)

  @app.post("/v1/chat/completions", dependencies=guarded)
  async def chat(asked: Chat, http: Request) -> Response:
    return await desk.answer(asked, http)

  @app.get("/v1/models", dependencies=guarded)
  async def models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "maxtext"}]}

  @app.post("/v1/embeddings", dependencies=guarded)
  async def embeddings() -> Response:
    raise HTTPException(400, f"{name} writes text and has no embeddings of texts: use an embedding model's server.")

  @app.get("/health")
  async def health() -> Response:
    failed = worker.failure is not None
    return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

  @app.get("/metrics")
  async def metrics() -> Response:
    return PlainTextResponse(meters.page(), media_type=meters.media_type)

  @app.exception_handler(StarletteError)
  async def refused(http: Request, error: StarletteError) -> Response:
    return _refusal(error.status_code, error.detail, dict(error.headers or {}))

  @app.exception_handler(ConfigError)
  async def mistaken(http: Request, error: ConfigError) -> Response:
    return _refusal(400, str(error))

  @app.exception_handler(RequestValidationError)
  async def malformed(http: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    return _refusal(400, f"{where}: {first['msg']}" if where else first["msg"])

  return app


class _Desk:
  """Takes requests to the worker and brings answers back."""

  def __init__(self, loaded: Loaded, name: str, worker: Worker, limits: Limits, meters: Meters) -> None:
    self._loaded, self._name, self._worker, self._limits, self._meters = loaded, name, worker, limits, meters

  async def answer(self, asked: Completion | Chat, http: Request) -> Response:
    """The whole answer, or a stream of it."""
    if asked.model != self._name:
      raise HTTPException(404, f"model: there is no '{asked.model}' here; this is '{self._name}'.")
    loaded = self._loaded
    prompts = asked.prompts(loaded.tokenizer)
    places = [(prompt, place) for prompt in prompts for place in range(asked.n)]
    form = asked.form
    grammar = await asyncio.to_thread(lambda: loaded.grammars.compile(form)) if form else None
    requests = [loaded.request(prompt, asked.settings(loaded.settings, place), grammar) for prompt, place in places]
    going = _Going(loaded, requests, self._worker, self._meters)
    try:
      going.submit()
    except FullError:
      self._meters.turned_away()
      raise HTTPException(429, "Too many requests wait already: try again later.", {"Retry-After": "1"}) from None
    except FailedError:
      raise HTTPException(503, _FAILED) from None
    body, used = Body(asked, loaded.tokenizer), sum(map(len, prompts))
    if asked.stream:
      return _Stream(self._events(asked, body, going, used), going)
    with going:
      while not await going.finished(_LOOK_EVERY, self._limits.seconds):
        if await http.is_disconnected():
          return Response(status_code=499)
    return JSONResponse(body.whole(going.answers, used))

  async def _events(self, asked: Completion | Chat, body: Body, going: "_Going", used: int) -> AsyncIterator[str]:
    """Server-sent events."""
    if isinstance(asked, Chat):
      for place in range(len(going.answers)):
        yield _event(body.opening(place))
    try:
      async for place, text, event in going.pieces(self._limits.seconds):
        answer = going.answers[place]
        if text or answer.finish or asked.logprobs:
          yield _event(body.piece(place, answer, text, event))
    except HTTPException as error:
      yield _event(_error(error.status_code, error.detail))
      return
    if asked.stream_options and asked.stream_options.include_usage:
      yield _event(body.closing(going.answers, used))
    yield "data: [DONE]\n\n"


class _Going:
  """Requests of one client, from `submit` on; leaving its context cancels what has not ended."""

  def __init__(self, loaded: Loaded, requests: list[scheduler.Request], worker: Worker, meters: Meters) -> None:
    self.answers = [Answer(request, loaded.tokenizer) for request in requests]
    self._requests, self._worker, self._meters = requests, worker, meters
    self._places = {request: place for place, request in enumerate(requests)}
    self._events: asyncio.Queue[scheduler.Event] = asyncio.Queue()
    self._timer, self._start = meters.timer(), asyncio.get_running_loop().time()

  def submit(self) -> None:
    """Begins; raises `FullError` where there is no place to wait."""
    loop = asyncio.get_running_loop()

    def deliver(event: scheduler.Event) -> None:
      with suppress(RuntimeError):  # a server that was told to end at once has closed its loop
        loop.call_soon_threadsafe(self._events.put_nowait, event)

    self._worker.submit(self._requests, deliver)

  def __enter__(self) -> "_Going":
    return self

  def __exit__(self, *_: object) -> None:
    self._worker.cancel([answer.request for answer in self.answers if answer.finish is None])
    for answer in self.answers:
      self._meters.ended(answer)

  async def finished(self, wait: float, seconds: float) -> bool:
    """Takes what comes for a while; whether all answers have ended."""
    try:
      async with asyncio.timeout(wait):
        async for _ in self.pieces(seconds):
          pass
    except TimeoutError:
      return False
    return True

  async def pieces(self, seconds: float) -> AsyncIterator[tuple[int, str, scheduler.Event]]:
    """(place, new text, event) until all answers have ended; there are so many seconds for it."""
    while any(answer.finish is None for answer in self.answers):
      event = await self._next(self._start + seconds)
      place = self._places[event.request]
      answer = self.answers[place]
      if answer.finish is not None:  # ended by a stop text, a token ago
        continue
      text = answer.add(event)
      if event.finish in _BROKEN:
        raise HTTPException(*_BROKEN[event.finish])
      self._timer.token()
      if answer.finish and not event.finish:
        self._worker.cancel([answer.request])
      yield place, text, event

  async def _next(self, end: float) -> scheduler.Event:
    try:
      async with asyncio.timeout_at(end):
        return await self._events.get()
    except TimeoutError:
      raise HTTPException(408, "The answer took longer than this server gives it: ask for fewer tokens.") from None


class _Stream(StreamingResponse):
  """Server-sent events about what is going on, which ends with them, also where the client left before the first."""

  def __init__(self, events: AsyncIterator[str], going: _Going) -> None:
    super().__init__(events, media_type="text/event-stream")
    self._going = going

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    with self._going:
      await super().__call__(scope, receive, send)


class _Server(uvicorn.Server):
  """Ends well on a signal, with exit code 0; uvicorn by itself would raise the signal again at the end."""

  @contextmanager
  def capture_signals(self) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
      loop.add_signal_handler(number, self._end)
    yield

  def _end(self) -> None:
    if self.should_exit:
      self.force_exit = True
    print("maxtext: ending after the requests that are there; once more ends at once.", file=sys.stderr, flush=True)
    self.should_exit = True


class _BodyLimit:
  """Refuses bodies that are too large, whatever their length is said to be."""

  def __init__(self, app: ASGIApp, most: int) -> None:
    self._app, self._most = app, most

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    taken = 0

    async def counted() -> Message:
      nonlocal taken
      message = await receive()
      taken += len(message.get("body", b""))
      if taken > self._most:
        raise HTTPException(413, f"The request has more than {self._most} bytes.")
      return message

    await self._app(scope, counted if scope["type"] == "http" else receive, send)


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def _error(status: int, message: str) -> dict[str, Any]:
  kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
  return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
  body = json.dumps(_error(status, message))  # escaped: a message may quote half of a surrogate pair
  return Response(body, status, headers, media_type="application/json")


def _event(body: dict[str, Any]) -> str:
  return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
