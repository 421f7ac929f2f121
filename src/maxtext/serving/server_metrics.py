"""Prometheus metrics of the server. The names follow vLLM's."""

import math
import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from maxtext.inference.detokenizer import IncrementalDetokenizer
from maxtext.serving.engine_thread import EngineThread

_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # seconds


class ServerMetrics:
  """The metrics of one server, in a registry of their own, so that one process can have several servers."""

  media_type = CONTENT_TYPE_LATEST

  def __init__(self, engine: EngineThread) -> None:
    self._registry = own = CollectorRegistry()
    running = Gauge("maxtext_num_requests_running", "Requests that are being decoded", registry=own)
    running.set_function(lambda: engine.scheduler.num_running if engine.scheduler else 0)
    waiting = Gauge("maxtext_num_requests_waiting", "Requests in the queue", registry=own)
    waiting.set_function(lambda: engine.num_waiting)
    age = Gauge("maxtext_seconds_since_last_step", "Since the last engine step; NaN before the first", registry=own)
    age.set_function(lambda: math.nan if engine.seconds_since_last_step is None else engine.seconds_since_last_step)
    pages = Gauge("maxtext_kv_cache_free_pages", "Free pages of the KV cache", registry=own)
    pages.set_function(lambda: engine.scheduler.num_free_pages if engine.scheduler else 0)
    preemptions = Gauge("maxtext_num_preemptions", "Preemptions of running requests", registry=own)
    preemptions.set_function(lambda: engine.scheduler.num_preemptions if engine.scheduler else 0)
    self._requests = Counter("maxtext_requests", "Finished requests", ["finish_reason"], registry=own)
    self._prompt_tokens = Counter("maxtext_prompt_tokens", "Prompt tokens of finished requests", registry=own)
    self._generation_tokens = Counter("maxtext_generation_tokens", "Tokens generated", registry=own)
    self._time_to_first_token = Histogram(
      "maxtext_time_to_first_token_seconds", "Time to first token (TTFT)", registry=own, buckets=_BUCKETS
    )
    self._inter_token_latency = Histogram(
      "maxtext_inter_token_latency_seconds", "Inter-token latency (ITL)", registry=own, buckets=_BUCKETS
    )

  def render(self) -> bytes:
    """All metrics in the text format of Prometheus."""
    return generate_latest(self._registry)

  def count_queue_full(self) -> None:
    """Counts a request that got a 429 because the queue was full."""
    self._requests.labels("queue_full").inc()

  def count_finished(self, output: IncrementalDetokenizer) -> None:
    """Counts a request and its tokens; one without a finish reason was aborted because its client disconnected."""
    self._requests.labels(output.finish_reason or "client_disconnected").inc()
    self._prompt_tokens.inc(len(output.request.prompt))
    self._generation_tokens.inc(len(output.token_ids))

  def latency_timer(self) -> "LatencyTimer":
    """A timer for the tokens of one HTTP request, started now."""
    return LatencyTimer(self._time_to_first_token, self._inter_token_latency)


class LatencyTimer:
  """Observes the time to the first token, then the times between tokens."""

  def __init__(self, time_to_first_token: Histogram, inter_token_latency: Histogram) -> None:
    self._histogram, self._inter_token_latency = time_to_first_token, inter_token_latency
    self._last = time.perf_counter()

  def token(self) -> None:
    """Records that a token arrived."""
    now = time.perf_counter()
    self._histogram.observe(now - self._last)
    self._histogram, self._last = self._inter_token_latency, now
