"""The application that answers requests, in OpenAI's protocol, for one model; it runs in the engine's process.

A request is refused (400), turned away while too many wait (429), or answered. When its client leaves, its slot is free
before the next step. Bodies are parsed and tokenised, and long answers written, in a few threads beside the event loop;
what would hold the interpreter's lock there for long is refused before.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException as StarletteError
from starlette.types import Receive, Scope, Send

from maxtext.configs import ConfigError
from maxtext.inference import scheduler
from maxtext.inference.answer import Answer
from maxtext.inference.grammar import Form, Grammar
from maxtext.inference.loading import Loaded
from maxtext.serving.access import error_body, refusal
from maxtext.serving.limits import Limits
from maxtext.serving.meters import Meters
from maxtext.serving.protocol import Body, Bounds, Chat, Completion, parse
from maxtext.serving.worker import Client, FailedError, FullError, NotReadyError, Worker

_FAILED = "The engine has failed; the server must be started again."
_STARTING = "The model is being loaded: try again later."
_BROKEN = {
  "failed": (503, _FAILED),
  "misfit": (400, "The form that was asked for cannot be kept: it has no end, or takes too much work."),
}
_THREADS = 2  # that parse and tokenise
_Result = TypeVar("_Result")


def prepare(loaded: Loaded, limits: Limits) -> Loaded:
  """Does what the first requests would wait for."""
  _bounds(loaded, limits)
  if loaded.config.enable_model_warmup:
    loaded.engine.warm_up()
  if loaded.tokenizer.eos is not None:
    loaded.grammars.start()
  return loaded


def make_app(name: str, worker: Worker, limits: Limits) -> FastAPI:
  """The routes; the worker is the caller's to start and to stop."""
  app = FastAPI(title="maxtext", docs_url=None, redoc_url=None)
  meters = Meters(worker)
  desk = _Desk(name, worker, limits, meters)

  @app.post("/v1/completions", openapi_extra=_described_by(Completion))
  async def completions(http: Request) -> Response:
    return await desk.answer(Completion, http)

  @app.post("/v1/chat/completions", openapi_extra=_described_by(Chat))
  async def chat(http: Request) -> Response:
    return await desk.answer(Chat, http)

  @app.get("/v1/models")
  async def models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "maxtext"}]}

  @app.post("/v1/embeddings")
  async def embeddings() -> Response:
    raise HTTPException(400, f"{name} writes text and has no embeddings of texts: use an embedding model's server.")

  @app.get("/metrics")
  async def metrics() -> Response:
    return PlainTextResponse(meters.page(), media_type=meters.media_type)

  @app.exception_handler(StarletteError)
  async def refused(http: Request, error: StarletteError) -> Response:
    return refusal(error.status_code, error.detail, error.headers)

  @app.exception_handler(ConfigError)
  async def mistaken(http: Request, error: ConfigError) -> Response:
    return refusal(400, str(error))

  def description() -> dict[str, Any]:
    if app.openapi_schema is None:
      page = get_openapi(title=app.title, version=app.version, routes=app.routes)
      _, bodies = models_json_schema([(Completion, "validation"), (Chat, "validation")], ref_template=_SCHEMAS)
      page.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
      app.openapi_schema = page
    return app.openapi_schema

  app.openapi = description  # type: ignore[method-assign]
  return app


_SCHEMAS = "#/components/schemas/{model}"


def _described_by(body: type) -> dict[str, Any]:
  """Bodies are not read by FastAPI, which would do it in the event loop; its page describes them all the same."""
  schema = {"$ref": _SCHEMAS.format(model=body.__name__)}
  return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _bounds(loaded: Loaded, limits: Limits) -> Bounds:
  return Bounds.of(loaded.tokenizer, loaded.engine.longest_prompt, limits.share, loaded.engine.length)


class _Desk:
  """Takes requests to the worker and brings answers back."""

  def __init__(self, name: str, worker: Worker, limits: Limits, meters: Meters) -> None:
    self._name, self._worker, self._limits, self._meters = name, worker, limits, meters
    self._threads = ThreadPoolExecutor(_THREADS, "requests")

  async def answer(self, kind: type[Completion] | type[Chat], http: Request) -> Response:
    """The whole answer, or a stream of it."""
    start = asyncio.get_running_loop().time()
    if self._worker.status != "ok":
      raise _unavailable(self._worker)
    loaded = self._worker.loaded
    assert loaded is not None
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
      raise HTTPException(415, "The body must be JSON: send 'Content-Type: application/json'.")
    raw = await http.body()
    parsing = self._in_thread(lambda: self._parse(kind, raw, loaded))
    asked, form, prompts = await self._in_time(parsing, http, start, "Reading the request")
    places = [(prompt, place) for prompt in prompts for place in range(asked.n)]
    grammar: Grammar | None = None
    if form:
      grammar = await self._in_time(loaded.grammars.ready(form), http, start, f"{form.field}: compiling it")
    making = self._in_thread(
      lambda: [
        loaded.request(prompt, asked.sampling_params(loaded.sampling_params, place), grammar)
        for prompt, place in places
      ]
    )
    requests = await self._in_time(making, http, start, "Reading the request")
    going = _Going(loaded, requests, self._worker, self._meters, start)
    try:
      going.submit(http.scope.get("state", {}).get("client", ""))
    except FullError:
      self._meters.turned_away()
      raise HTTPException(429, "Too many requests wait already: try again later.", {"Retry-After": "1"}) from None
    except (FailedError, NotReadyError):
      raise _unavailable(self._worker) from None
    body, used = Body(asked, loaded.tokenizer), sum(map(len, prompts))
    if asked.stream:
      return _Stream(self._events(asked, body, going, used), going)
    with going:
      await _unless_left(going.finished(self._limits.seconds), http)
    text = await self._in_thread(lambda: "".join(_ENCODER.iterencode(body.whole(going.answers, used))))
    return Response(text, media_type="application/json")

  async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(self._threads, work)

  def _parse(
    self, kind: type[Completion] | type[Chat], raw: bytes, loaded: Loaded
  ) -> tuple[Completion | Chat, Form | None, list[list[int]]]:
    """What was asked, the form of answers, and the tokens of prompts."""
    asked: Completion | Chat = parse(kind, raw, _bounds(loaded, self._limits))  # type: ignore[type-var]
    if asked.model != self._name:
      raise HTTPException(404, f"model: there is no '{asked.model}' here; this is '{self._name}'.")
    try:
      return asked, asked.form, asked.prompts(loaded.tokenizer)
    except (ConfigError, MemoryError):
      raise
    except RecursionError:
      raise ConfigError("The request is nested too deeply.") from None
    except BaseException as error:  # a tokenizer's expression gives up, or its library panics, which is no Exception
      raise ConfigError(f"The tokenizer does not take this text: {error}.") from None

  async def _in_time(self, work: Coroutine[Any, Any, _Result], http: Request, start: float, what: str) -> _Result:
    """Work before an answer begins: part of the request's time, and ends, or never begins, when its client leaves."""
    try:
      async with asyncio.timeout_at(start + self._limits.seconds):
        return await _unless_left(work, http)
    except TimeoutError:
      raise HTTPException(408, f"{what} took longer than this server gives a request.") from None

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
      yield _event(error_body(error.status_code, error.detail))
      return
    if asked.stream_options and asked.stream_options.include_usage:
      yield _event(body.closing(going.answers, used))
    yield "data: [DONE]\n\n"


class _Going:
  """Requests of one client, from `submit` on; leaving its context cancels what has not ended."""

  def __init__(
    self, loaded: Loaded, requests: list[scheduler.Request], worker: Worker, meters: Meters, start: float
  ) -> None:
    self.answers = [Answer(request, loaded.tokenizer) for request in requests]
    self._requests, self._worker, self._meters = requests, worker, meters
    self._places = {request: place for place, request in enumerate(requests)}
    self._events: asyncio.Queue[scheduler.Event] = asyncio.Queue()
    self._timer, self._start = meters.timer(), start

  def submit(self, client: Client) -> None:
    """Begins; raises `FullError` where there is no place to wait."""
    loop = asyncio.get_running_loop()

    def deliver(event: scheduler.Event) -> None:
      with suppress(RuntimeError):  # a server that was told to end at once has closed its loop
        loop.call_soon_threadsafe(self._events.put_nowait, event)

    self._worker.submit(self._requests, deliver, client)

  def __enter__(self) -> "_Going":
    return self

  def __exit__(self, *_: object) -> None:
    self._worker.cancel([answer.request for answer in self.answers if answer.finish is None])
    for answer in self.answers:
      self._meters.ended(answer)

  async def finished(self, seconds: float) -> None:
    """Takes what comes until all answers have ended."""
    async for _ in self.pieces(seconds):
      pass

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


async def _unless_left(work: Coroutine[Any, Any, _Result], http: Request) -> _Result:
  """Its result; a client that leaves before ends it."""

  async def leave() -> None:
    while (await http.receive())["type"] != "http.disconnect":
      pass

  doing, leaving = asyncio.create_task(work), asyncio.create_task(leave())
  try:
    await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
    if doing.done():
      return doing.result()
    raise HTTPException(499, "The client has left.")
  finally:
    for task in (doing, leaving):
      task.cancel()
    await asyncio.gather(doing, leaving, return_exceptions=True)


def _unavailable(worker: Worker) -> HTTPException:
  return HTTPException(503, _FAILED if worker.status == "failed" else _STARTING, {"Retry-After": "5"})


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # piece by piece, between which others have the lock


def _event(body: dict[str, Any]) -> str:
  return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
