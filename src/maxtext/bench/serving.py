"""Online benchmark of a running server: TTFT, ITL, TPOT and throughput under a request rate.

Each request is streamed by a thread of its own. Any server of the OpenAI API can be measured. Imports no JAX.
"""

import http.client
import json
import random
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from maxtext.bench.workload import Workload
from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError

_TIMEOUT = 600  # seconds for one request
_MOST_SHOWN = 300  # bytes of what a server answers to a request that it refuses


@dataclass
class RequestTiming:
  """The timing of one request.

  Attributes:
    start: when the request was sent, by `time.perf_counter`.
    chunk_times: when each chunk of text arrived.
    output_tokens: tokens of the output as counted by the server.
    error: why the request failed; empty if it did not.
  """

  start: float = 0.0
  chunk_times: list[float] = field(default_factory=list)
  output_tokens: int = 0
  error: str = ""


@dataclass(frozen=True)
class LatencyPercentiles:
  """Percentiles of a latency in milliseconds."""

  p50: float
  p90: float
  p99: float

  @staticmethod
  def of(seconds: Iterable[float]) -> "LatencyPercentiles":
    """The percentiles of latencies in seconds; 0 without any."""
    known = [1e3 * second for second in seconds] or [0.0]
    cuts = statistics.quantiles(known, n=100, method="inclusive") if len(known) > 1 else known * 99
    return LatencyPercentiles(cuts[49], cuts[89], cuts[98])


@dataclass(frozen=True)
class ServingMetrics:
  """The result of a benchmark.

  Attributes:
    completed: requests with a whole response.
    failed: requests without.
    duration_seconds: from the first request to the last token.
    request_throughput: completed requests per second.
    output_throughput: output tokens per second.
    ttft_ms: time to first token.
    itl_ms: inter-token latency: the times between chunks of text of all requests.
    tpot_ms: time per output token: the mean time between tokens of each request.
    e2e_latency_ms: from a request to its last token.
  """

  completed: int
  failed: int
  duration_seconds: float
  request_throughput: float
  output_throughput: float
  ttft_ms: LatencyPercentiles
  itl_ms: LatencyPercentiles
  tpot_ms: LatencyPercentiles
  e2e_latency_ms: LatencyPercentiles


class CompletionsClient:
  """A client of a server of the OpenAI API at `base_url`, the address before `/v1`."""

  def __init__(self, base_url: str, api_key: str = "") -> None:
    self._base_url = base_url.rstrip("/")
    self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})

  def first_model(self) -> str:
    """The first model that the server lists."""
    try:
      with urllib.request.urlopen(self._request("/v1/models"), timeout=10) as reply:
        return json.load(reply)["data"][0]["id"]
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
      raise ConfigError(f"--base-url {self._base_url}: no server of the OpenAI API there: {error}.") from None

  def complete(self, body: dict[str, Any], timing: RequestTiming) -> None:
    """Streams one completion and records its timing."""
    timing.start = time.perf_counter()
    try:
      with urllib.request.urlopen(self._request("/v1/completions", body), timeout=_TIMEOUT) as reply:
        for line in reply:
          self._record(line, timing)
    except urllib.error.HTTPError as error:
      timing.error = f"{error}: {error.read(_MOST_SHOWN).decode(errors='replace')}"
    except (OSError, ValueError, http.client.HTTPException) as error:
      timing.error = str(error)

  def _record(self, line: bytes, timing: RequestTiming) -> None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
      return
    chunk = json.loads(line.removeprefix(b"data: "))
    if "error" in chunk:
      timing.error = chunk["error"]["message"]
    elif chunk.get("usage"):
      timing.output_tokens = chunk["usage"]["completion_tokens"]
    if chunk.get("choices"):
      timing.chunk_times.append(time.perf_counter())

  def _request(self, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
    return urllib.request.Request(self._base_url + path, json.dumps(body).encode() if body else None, self._headers)


def bench_serving(
  client: CompletionsClient,
  model: str,
  workload: Workload,
  request_rate: float | None,
  extra_body: Mapping[str, Any] | None = None,
) -> ServingMetrics:
  """Sends a workload and waits for all responses.

  Args:
    client: the client of the server.
    model: the served model name.
    workload: the requests; each generates `output_len` tokens.
    request_rate: mean requests per second with exponential inter-arrival times; None sends all at once.
    extra_body: more fields of every request.
  """
  rng, timings, threads = random.Random(workload.seed), [], []
  start = time.perf_counter()
  due = start
  for number, prompt in enumerate(workload.prompts()):
    body = {
      "model": model, "prompt": prompt, "seed": number, "stream": True, "stream_options": {"include_usage": True},
      "min_tokens": workload.output_len, "max_tokens": workload.output_len, **(extra_body or {}),
    }  # fmt: skip
    timings.append(RequestTiming())
    threads.append(threading.Thread(target=client.complete, args=(body, timings[-1]), daemon=True))
    time.sleep(max(0.0, due - time.perf_counter()))
    threads[-1].start()
    due += rng.expovariate(request_rate) if request_rate else 0
  for thread in threads:
    thread.join()
  return _metrics(timings, start)


def _metrics(timings: list[RequestTiming], start: float) -> ServingMetrics:
  done = [timing for timing in timings if timing.chunk_times and timing.output_tokens and not timing.error]
  if not done:
    raise RunError(f"no request was completed: {timings[0].error or 'the outputs were empty'}.")
  duration = max(timing.chunk_times[-1] for timing in done) - start
  return ServingMetrics(
    completed=len(done),
    failed=len(timings) - len(done),
    duration_seconds=duration,
    request_throughput=len(done) / duration,
    output_throughput=sum(timing.output_tokens for timing in done) / duration,
    ttft_ms=LatencyPercentiles.of(timing.chunk_times[0] - timing.start for timing in done),
    itl_ms=LatencyPercentiles.of(after - before for timing in done for before, after in pairwise(timing.chunk_times)),
    tpot_ms=LatencyPercentiles.of(
      (timing.chunk_times[-1] - timing.chunk_times[0]) / max(timing.output_tokens - 1, 1) for timing in done
    ),
    e2e_latency_ms=LatencyPercentiles.of(timing.chunk_times[-1] - timing.start for timing in done),
  )
