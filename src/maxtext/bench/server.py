"""How long the clients of a running server wait: requests that arrive at a rate, each streamed by a thread of its own.

It speaks OpenAI's protocol, so that any server of it can be measured; nothing here imports JAX.
"""

import http.client
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from maxtext.bench.load import Load
from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError

_PATIENCE = 600  # seconds for one request


@dataclass
class Exchange:
  """One request.

  Attributes:
    started: seconds on the clock of this process.
    times: when text came.
    tokens: of the answer, as the server counts them.
    failure: why there is no whole answer.
  """

  started: float = 0.0
  times: list[float] = field(default_factory=list)
  tokens: int = 0
  failure: str = ""


@dataclass(frozen=True)
class Waits:
  """Milliseconds that so many percent of the requests were below."""

  p50: float
  p90: float
  p99: float

  @staticmethod
  def of(seconds: Iterable[float]) -> "Waits":
    """Of one number for each request."""
    known = [1e3 * second for second in seconds]
    cuts = statistics.quantiles(known, n=100, method="inclusive") if len(known) > 1 else known * 99
    return Waits(cuts[49], cuts[89], cuts[98])


@dataclass(frozen=True)
class Report:
  """What came of a load.

  Attributes:
    answered: requests that have a whole answer; `failed`: the others.
    seconds: from the first request to the last token.
    tokens_per_second: of all answers; `requests_per_second`.
    first_token: from a request to its first text; `next_token`: between two tokens; `whole`: to the end.
  """

  answered: int
  failed: int
  seconds: float
  requests_per_second: float
  tokens_per_second: float
  first_token: Waits
  next_token: Waits
  whole: Waits


class Server:
  """A server of OpenAI's protocol, at the address before `/v1`."""

  def __init__(self, address: str, key: str = "") -> None:
    self._address = address.rstrip("/")
    self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

  def model(self) -> str:
    """The first that it has."""
    try:
      with urllib.request.urlopen(self._request("/v1/models"), timeout=10) as reply:
        return json.load(reply)["data"][0]["id"]
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
      raise ConfigError(f"--url {self._address}: no server of OpenAI's protocol answers there: {error}.") from None

  def complete(self, body: dict[str, Any], exchange: Exchange) -> None:
    """Streams one answer, and notes when it came."""
    exchange.started = time.perf_counter()
    try:
      with urllib.request.urlopen(self._request("/v1/completions", body), timeout=_PATIENCE) as reply:
        for line in reply:
          self._note(line, exchange)
    except (OSError, ValueError, http.client.HTTPException) as error:
      exchange.failure = str(error)

  def _note(self, line: bytes, exchange: Exchange) -> None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
      return
    piece = json.loads(line.removeprefix(b"data: "))
    if "error" in piece:
      exchange.failure = piece["error"]["message"]
    elif piece.get("usage"):
      exchange.tokens = piece["usage"]["completion_tokens"]
    if piece.get("choices"):
      exchange.times.append(time.perf_counter())

  def _request(self, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
    return urllib.request.Request(self._address + path, json.dumps(body).encode() if body else None, self._headers)


def bench_server(server: Server, model: str, load: Load, rate: float | None) -> Report:
  """Sends a load and waits for all of it.

  Args:
    server: where to.
    model: that is asked.
    load: the requests; each answer is as long as it may be.
    rate: requests a second on average, with exponential times between them; None sends all at once.
  """
  draw, exchanges, threads = random.Random(load.seed), [], []
  start = time.perf_counter()
  due = start
  for number, prompt in enumerate(load.prompts()):
    body = {
      "model": model, "prompt": prompt, "seed": number, "stream": True, "stream_options": {"include_usage": True},
      "min_tokens": load.max_tokens, "max_tokens": load.max_tokens,
    }  # fmt: skip
    exchanges.append(Exchange())
    threads.append(threading.Thread(target=server.complete, args=(body, exchanges[-1]), daemon=True))
    time.sleep(max(0.0, due - time.perf_counter()))
    threads[-1].start()
    due += draw.expovariate(rate) if rate else 0
  for thread in threads:
    thread.join()
  return _report(exchanges, start)


def _report(exchanges: list[Exchange], start: float) -> Report:
  whole = [exchange for exchange in exchanges if exchange.times and exchange.tokens and not exchange.failure]
  if not whole:
    raise RunError(f"no request was answered: {exchanges[0].failure or 'the answers were empty'}.")
  seconds = max(exchange.times[-1] for exchange in whole) - start
  return Report(
    len(whole),
    len(exchanges) - len(whole),
    seconds,
    len(whole) / seconds,
    sum(exchange.tokens for exchange in whole) / seconds,
    Waits.of(exchange.times[0] - exchange.started for exchange in whole),
    Waits.of((exchange.times[-1] - exchange.times[0]) / max(exchange.tokens - 1, 1) for exchange in whole),
    Waits.of(exchange.times[-1] - exchange.started for exchange in whole),
  )
