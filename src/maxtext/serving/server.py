"""The OpenAI-compatible API of one model and its LoRA adapters. It runs in the engine process.

An invalid request gets a 400, a request that finds the queue full a 429. When a client disconnects, its slot is free
before the next step. Bodies are parsed and tokenized, and long responses encoded, in a few threads besides the event
loop. What would hold Python's global lock for long is rejected first.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException as StarletteError
from starlette.types import Receive, Scope, Send

from maxtext.configs import ConfigError
from maxtext.inference import scheduler
from maxtext.inference.adapters import UnknownAdapterError
from maxtext.inference.detokenizer import IncrementalDetokenizer
from maxtext.inference.grammar import CompiledGrammar, GrammarSpec
from maxtext.inference.inference_model import InferenceModel
from maxtext.inference.multimodal import EncodedPrompt
from maxtext.serving.adapter_handler import AdapterHandler
from maxtext.serving.docs_page import docs_page_response
from maxtext.serving.engine_thread import Client, EngineFailedError, EngineNotReadyError, EngineThread, QueueFullError
from maxtext.serving.errors import error_body, error_response
from maxtext.serving.fetch import MediaFetcher
from maxtext.serving.limits import ServerLimits
from maxtext.serving.protocol import (
  ChatCompletionRequest,
  CompletionRequest,
  EmbeddingRequest,
  LoadAdapterRequest,
  RequestLimits,
  UnloadAdapterRequest,
  parse,
  template_answer_format,
)
from maxtext.serving.responses import ResponseBuilder
from maxtext.serving.server_metrics import ServerMetrics
from maxtext.serving.token_requests import DetokenizeRequest, TokenizeRequest, tokenizer_info

_FAILED = "The engine has failed: restart the server."
_STARTING = "The model is loading: try again later."
_ERRORS = {
  "failed": (503, _FAILED),
  "grammar_error": (400, "The grammar of the request cannot be matched: no finite text fits, or it exceeds a limit."),
}
_THREADS = 2  # that parse and tokenize
_MOST_MEDIA_BYTES = 1 << 30
_MOST_VIDEO_PIXELS = 1 << 32  # of a prompt: a minute in full HD, which takes some ten seconds to decode
_Result = TypeVar("_Result")
_Prompts = list[EncodedPrompt]
_PromptRequest = CompletionRequest | ChatCompletionRequest | TokenizeRequest


def prepare(model: InferenceModel, limits: ServerLimits) -> InferenceModel:
  """Warms up what the first requests would wait for."""
  _request_limits(model, limits)
  template_answer_format(model.tokenizer)
  if model.config.enable_model_warmup:
    model.engine.warm_up()
  if model.tokenizer.eos is not None:
    model.grammar_compiler.start()
  return model


def make_app(name: str, engine: EngineThread, limits: ServerLimits) -> FastAPI:
  """The ASGI application. The caller starts and stops the engine thread."""
  app = FastAPI(title="maxtext", docs_url=None, redoc_url=None)
  server_metrics = ServerMetrics(engine)
  handler = _RequestHandler(name, engine, limits, server_metrics)
  adapter_handler = AdapterHandler(name, limits)

  @app.post("/v1/completions", openapi_extra=_openapi_body(CompletionRequest))
  async def completions(http: Request) -> Response:
    return await handler.handle(CompletionRequest, http)

  @app.post("/v1/chat/completions", openapi_extra=_openapi_body(ChatCompletionRequest))
  async def chat(http: Request) -> Response:
    return await handler.handle(ChatCompletionRequest, http)

  @app.get("/v1/models")
  async def models() -> dict[str, Any]:
    found = engine.model and engine.model.adapters
    parents = {name: None} | dict.fromkeys(found.names if found else (), name)
    return {
      "object": "list",
      "data": [
        {"id": model, "object": "model", "created": 0, "owned_by": "maxtext", "parent": parent}
        for model, parent in parents.items()
      ],
    }

  @app.post("/v1/load_lora_adapter", openapi_extra=_openapi_body(LoadAdapterRequest))
  async def load_adapter(http: Request) -> Response:
    model = _ready_model(engine)
    return await adapter_handler.load(await _read_json(http), model, _request_limits(model, limits))

  @app.post("/v1/unload_lora_adapter", openapi_extra=_openapi_body(UnloadAdapterRequest))
  async def unload_adapter(http: Request) -> Response:
    model = _ready_model(engine)
    return await adapter_handler.unload(await _read_json(http), model, _request_limits(model, limits))

  @app.post("/v1/embeddings", openapi_extra=_openapi_body(EmbeddingRequest))
  async def embeddings(http: Request) -> Response:
    return await handler.embed(http)

  @app.post("/tokenize", openapi_extra=_openapi_body(TokenizeRequest))
  async def tokenize(http: Request) -> Response:
    return await handler.tokenize(http)

  @app.post("/detokenize", openapi_extra=_openapi_body(DetokenizeRequest))
  async def detokenize(http: Request) -> Response:
    return await handler.detokenize(http)

  @app.get("/tokenizer_info")
  async def tokenizer() -> dict[str, Any]:
    return tokenizer_info(_ready_model(engine))

  @app.get("/docs", include_in_schema=False)
  async def docs() -> Response:
    return docs_page_response(app.openapi())

  @app.get("/metrics")
  async def metrics() -> Response:
    return PlainTextResponse(server_metrics.render(), media_type=server_metrics.media_type)

  @app.exception_handler(StarletteError)
  async def http_error(http: Request, error: StarletteError) -> Response:
    return error_response(error.status_code, error.detail, error.headers)

  @app.exception_handler(ConfigError)
  async def invalid_request(http: Request, error: ConfigError) -> Response:
    return error_response(404 if isinstance(error, UnknownAdapterError) else 400, str(error))

  def openapi() -> dict[str, Any]:
    if app.openapi_schema is None:
      page = get_openapi(title=app.title, version=app.version, routes=app.routes)
      _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_SCHEMAS)
      page.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
      app.openapi_schema = page
    return app.openapi_schema

  app.openapi = openapi  # type: ignore[method-assign]
  return app


_BODIES = (
  CompletionRequest,
  ChatCompletionRequest,
  EmbeddingRequest,
  TokenizeRequest,
  DetokenizeRequest,
  LoadAdapterRequest,
  UnloadAdapterRequest,
)
_SCHEMAS = "#/components/schemas/{model}"


def _openapi_body(body: type) -> dict[str, Any]:
  """The OpenAPI description of a body. FastAPI does not parse bodies here: it would do so in the event loop."""
  schema = {"$ref": _SCHEMAS.format(model=body.__name__)}
  return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _request_limits(model: InferenceModel, limits: ServerLimits) -> RequestLimits:
  return RequestLimits.of(model.tokenizer, model.engine.max_prompt_len, limits.queue_share, model.engine.max_model_len)


class _RequestHandler:
  """Handles HTTP requests: parses them, submits them to the engine thread, and builds the responses."""

  def __init__(self, name: str, engine: EngineThread, limits: ServerLimits, metrics: ServerMetrics) -> None:
    self._name, self._engine, self._limits, self._metrics = name, engine, limits, metrics
    self._threads, self._media_thread = ThreadPoolExecutor(_THREADS, "requests"), ThreadPoolExecutor(1, "media")
    self._embedding, self._num_embedding = ThreadPoolExecutor(1, "embeddings"), 0
    self._media_bytes, self._fetcher = 0, MediaFetcher(limits.fetch)

  async def handle(self, kind: type[CompletionRequest] | type[ChatCompletionRequest], http: Request) -> Response:
    """The response of a request: the whole output, or a stream."""
    start = asyncio.get_running_loop().time()
    model, raw = _ready_model(self._engine), await _read_json(http)
    parsing = self._in_thread(lambda: self._parse(kind, raw, model))
    request, spec, prompts = await self._with_timeout(parsing, http, start, "Reading the request")
    if prompts is None:
      prompts = await self._with_timeout(self._encode_media(request, model), http, start, "Reading the media")
    choices = [(*prompt, index) for prompt in prompts for index in range(request.n)]
    with ExitStack() as in_use:
      in_use.enter_context(self._with_media(prompts))
      served = request.model or self._name
      adapter = in_use.enter_context(model.use_adapter(None if served == self._name else served))
      grammar: CompiledGrammar | None = None
      if spec:
        compiling = model.grammar_compiler.compile_async(spec)
        grammar = await self._with_timeout(compiling, http, start, f"{spec.field}: compiling it")
      creating = self._in_thread(
        lambda: [
          model.make_request(prompt, request.sampling_params(model.sampling_params, index), grammar, adapter, media)
          for prompt, media, index in choices
        ]
      )
      requests = await self._with_timeout(creating, http, start, "Reading the request")
      builder = ResponseBuilder(request, served, model.tokenizer, [item.prompt for item in requests])
      handle = _RequestHandle(model, requests, builder.shown, self._engine, self._metrics, start)
      try:
        handle.submit(http.scope.get("state", {}).get("client", ""))
      except QueueFullError:
        self._metrics.count_queue_full()
        raise HTTPException(429, "The request queue is full: try again later.", {"Retry-After": "1"}) from None
      except (EngineFailedError, EngineNotReadyError):
        raise _unavailable(self._engine) from None
      handle.in_use = in_use.pop_all()
    if request.stream:
      return _EventStream(self._events(request, builder, handle, prompts), handle)
    with handle:
      await _unless_disconnected(handle.wait(self._limits.request_timeout), http)
    text = await self._in_thread(lambda: "".join(_ENCODER.iterencode(builder.response(handle.outputs, prompts))))
    return Response(text, media_type="application/json")

  async def tokenize(self, http: Request) -> Response:
    """The tokens of a text or a chat, whose media are read as those of a chat that is answered."""
    start = asyncio.get_running_loop().time()
    model, raw = _ready_model(self._engine), await _read_json(http)

    def read() -> tuple[TokenizeRequest, _Prompts | None]:
      request = parse(TokenizeRequest, raw, _request_limits(model, self._limits))
      return request, self._encode_text(request, model)

    request, prompts = await self._with_timeout(self._in_thread(read), http, start, "Reading the request")
    if prompts is None:
      prompts = await self._with_timeout(self._encode_media(request, model), http, start, "Reading the media")
    ((tokens, _),) = prompts
    return await self._in_thread(lambda: _json_response(_tokenizing(lambda: request.response(model, tokens))))

  async def detokenize(self, http: Request) -> Response:
    """The text of tokens."""
    start = asyncio.get_running_loop().time()
    model, raw = _ready_model(self._engine), await _read_json(http)

    def work() -> Response:
      request = parse(DetokenizeRequest, raw, _request_limits(model, self._limits))
      self._check_model(request.model, model)
      return _json_response(_tokenizing(lambda: request.response(model)))

    return await self._with_timeout(self._in_thread(work), http, start, "Reading the request")

  async def embed(self, http: Request) -> Response:
    """The embeddings of a request, one after the other between the engine's steps."""
    start = asyncio.get_running_loop().time()
    model, raw = _ready_model(self._engine), await _read_json(http)

    def read() -> tuple[EmbeddingRequest, list[list[int]]]:
      request = parse(EmbeddingRequest, raw, _request_limits(model, self._limits))
      self._check_model(request.model, model)
      inputs = _tokenizing(lambda: request.encoded(model.tokenizer))
      for tokens in inputs:
        model.check_prompt(tokens, tokens)
      return request, inputs

    request, inputs = await self._with_timeout(self._in_thread(read), http, start, "Reading the request")
    if self._num_embedding + len(inputs) > self._limits.max_queued_requests:
      raise HTTPException(429, "The queue of embeddings is full: try again later.", {"Retry-After": "1"})
    served, found = request.model or self._name, list[np.ndarray]()
    self._num_embedding += len(inputs)
    try:
      with model.use_adapter(None if served == self._name else served) as adapter:
        for tokens in inputs:
          work = partial(model.engine.embed, tokens, 0 if adapter is None else adapter.slot)
          running = asyncio.get_running_loop().run_in_executor(self._embedding, work)
          found.append(await self._with_timeout(_awaited(running), http, start, "Embedding"))
    finally:
      self._num_embedding -= len(inputs)
    body = request.response(served, found, sum(map(len, inputs)))
    return Response(await self._in_thread(lambda: json.dumps(body)), media_type="application/json")

  async def _encode_media(self, request: _PromptRequest, model: InferenceModel) -> _Prompts:
    """The prompts of a request with media: one request after the other, so that memory is bounded, and apart from those
    of text."""
    encoder = replace(model.prompts, video_pixels=_MOST_VIDEO_PIXELS)
    async with self._fetcher.fetched(request.remote_media) as fetched:
      return await self._in_thread(lambda: _tokenizing(lambda: request.encoded(encoder, fetched)), self._media_thread)

  async def _in_thread(self, work: Callable[[], _Result], threads: ThreadPoolExecutor | None = None) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(threads or self._threads, work)

  @contextmanager
  def _with_media(self, prompts: _Prompts) -> Iterator[None]:
    """Counts the bytes of media that wait for the engine or are with it; they are many times those of the bodies."""
    size = sum(media.nbytes for _, media in prompts if media is not None)
    if size and self._media_bytes + size > _MOST_MEDIA_BYTES:
      self._metrics.count_queue_full()
      raise HTTPException(429, "The queue of media is full: try again later.", {"Retry-After": "1"})
    self._media_bytes += size
    try:
      yield
    finally:
      self._media_bytes -= size

  def _parse(
    self, kind: type[CompletionRequest] | type[ChatCompletionRequest], raw: bytes, model: InferenceModel
  ) -> tuple[CompletionRequest | ChatCompletionRequest, GrammarSpec | None, _Prompts | None]:
    """The parsed request, its grammar if any, and the tokens of its prompts; None where media must be decoded first."""
    request: CompletionRequest | ChatCompletionRequest = parse(kind, raw, _request_limits(model, self._limits))
    prompts = self._encode_text(request, model)
    return request, _tokenizing(lambda: request.grammar_spec), prompts

  def _encode_text(self, request: _PromptRequest, model: InferenceModel) -> _Prompts | None:
    """The tokens of the prompts of a request; None where media must be decoded first."""
    self._check_model(request.model, model)
    self._fetcher.check(request.remote_media)
    return None if request.has_media else _tokenizing(lambda: request.encoded(model.prompts))

  def _check_model(self, name: str | None, model: InferenceModel) -> None:
    """Raises a 404 if a request asks for another model than the base, which it need not name, and its adapters."""
    if name is not None and name not in (self._name, *(model.adapters.names if model.adapters else ())):
      others = " or one of its adapters (/v1/models)" if model.adapters else ""
      raise HTTPException(404, f"model: '{name[:100]}' is not served here; use '{self._name}'{others}.")

  async def _with_timeout(self, work: Coroutine[Any, Any, _Result], http: Request, start: float, what: str) -> _Result:
    """Awaits work within the request timeout, before generation starts; ends if the client disconnects."""
    try:
      async with asyncio.timeout_at(start + self._limits.request_timeout):
        return await _unless_disconnected(work, http)
    except TimeoutError:
      raise HTTPException(408, f"{what} took longer than the request timeout.") from None

  async def _events(
    self,
    request: CompletionRequest | ChatCompletionRequest,
    builder: ResponseBuilder,
    handle: "_RequestHandle",
    prompts: _Prompts,
  ) -> AsyncIterator[str]:
    """Server-sent events."""
    if isinstance(request, ChatCompletionRequest):
      for index in range(len(handle.outputs)):
        yield _event(builder.first_chunk(index))
    try:
      async for index, text, token_output in handle.stream(self._limits.request_timeout):
        if chunk := builder.chunk(index, handle.outputs[index], text, token_output):
          yield _event(chunk)
    except HTTPException as error:
      yield _event(error_body(error.status_code, error.detail))
      return
    if request.stream_options and request.stream_options.include_usage:
      yield _event(builder.usage_chunk(handle.outputs, prompts))
    yield "data: [DONE]\n\n"


class _RequestHandle:
  """The engine requests of one HTTP request, from `submit` on. Leaving its context cancels the unfinished ones.

  Attributes:
    in_use: what the requests need until they have ended or were cancelled: their adapter.
  """

  def __init__(
    self,
    model: InferenceModel,
    requests: list[scheduler.Request],
    shown: frozenset[int],
    engine: EngineThread,
    metrics: ServerMetrics,
    start: float,
  ) -> None:
    self.outputs = [IncrementalDetokenizer(request, model.tokenizer, shown) for request in requests]
    self._requests, self._engine, self._metrics = requests, engine, metrics
    self._indices = {request: index for index, request in enumerate(requests)}
    self._queue: asyncio.Queue[scheduler.TokenOutput] = asyncio.Queue()
    self._timer, self._start, self.in_use = metrics.latency_timer(), start, ExitStack()

  def submit(self, client: Client) -> None:
    """Submits the requests; raises `QueueFullError` if the queue is full."""
    loop = asyncio.get_running_loop()

    def callback(output: scheduler.TokenOutput) -> None:
      with suppress(RuntimeError):  # the loop is closed after a forced shutdown
        loop.call_soon_threadsafe(self._queue.put_nowait, output)

    self._engine.submit(self._requests, callback, client)

  def __enter__(self) -> "_RequestHandle":
    return self

  def __exit__(self, *_: object) -> None:
    self._engine.cancel([output.request for output in self.outputs if output.finish_reason is None])
    self.in_use.close()
    for output in self.outputs:
      self._metrics.count_finished(output)

  async def wait(self, seconds: float) -> None:
    """Waits until all outputs are finished."""
    async for _ in self.stream(seconds):
      pass

  async def stream(self, seconds: float) -> AsyncIterator[tuple[int, str, scheduler.TokenOutput]]:
    """Yields (index, new text, token output) until all outputs are finished, within `seconds` of the start."""
    while any(output.finish_reason is None for output in self.outputs):
      token_output = await self._next(self._start + seconds)
      index = self._indices[token_output.request]
      output = self.outputs[index]
      if output.finish_reason is not None:  # a stop string ended it one token ago
        continue
      text = output.add(token_output)
      if token_output.finish_reason in _ERRORS:
        raise HTTPException(*_ERRORS[token_output.finish_reason])
      if token_output.token is not None:
        self._timer.token()
      if output.finish_reason and not token_output.finish_reason:
        self._engine.cancel([output.request])
      yield index, text, token_output

  async def _next(self, end: float) -> scheduler.TokenOutput:
    try:
      async with asyncio.timeout_at(end):
        return await self._queue.get()
    except TimeoutError:
      raise HTTPException(408, "Generation took longer than the request timeout: lower max_tokens.") from None


class _EventStream(StreamingResponse):
  """Server-sent events of a request handle, whose context it holds even if the client disconnects before the first."""

  def __init__(self, events: AsyncIterator[str], handle: _RequestHandle) -> None:
    super().__init__(events, media_type="text/event-stream")
    self._handle = handle

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    with self._handle:
      await super().__call__(scope, receive, send)


def _tokenizing(work: Callable[[], _Result]) -> _Result:
  """The result of work with a tokenizer, whose failures are about the text."""
  try:
    return work()
  except (ConfigError, MemoryError):
    raise
  except RecursionError:
    raise ConfigError("The request is nested too deeply.") from None
  except BaseException as error:  # a regex limit, or a panic of the library, which is not an Exception
    raise ConfigError(f"The tokenizer cannot encode this text: {error}.") from None


async def _awaited(future: "asyncio.Future[_Result]") -> _Result:
  return await future


async def _unless_disconnected(work: Coroutine[Any, Any, _Result], http: Request) -> _Result:
  """Awaits work; cancels it and raises a 499 if the client disconnects first."""

  async def disconnect() -> None:
    while (await http.receive())["type"] != "http.disconnect":
      pass

  working, disconnecting = asyncio.create_task(work), asyncio.create_task(disconnect())
  try:
    await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
      return working.result()
    raise HTTPException(499, "The client has disconnected.")
  finally:
    for task in (working, disconnecting):
      task.cancel()
    await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _read_json(http: Request) -> bytes:
  """The body of a request, which must be sent as JSON."""
  if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
    raise HTTPException(415, "The body must be JSON: send 'Content-Type: application/json'.")
  return await http.body()


def _ready_model(engine: EngineThread) -> InferenceModel:
  if engine.status != "ok":
    raise _unavailable(engine)
  assert engine.model is not None
  return engine.model


def _unavailable(engine: EngineThread) -> HTTPException:
  return HTTPException(503, _FAILED if engine.status == "failed" else _STARTING, {"Retry-After": "5"})


_ENCODER = json.JSONEncoder(
  ensure_ascii=False, allow_nan=False
)  # incremental, so that other threads get the lock in between


def _json_response(body: dict[str, Any]) -> Response:
  return Response(json.dumps(body, ensure_ascii=False), media_type="application/json")


def _event(body: dict[str, Any]) -> str:
  return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
