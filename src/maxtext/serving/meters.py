"""Figures of a server, for Prometheus."""

import math
import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from maxtext.inference.answer import Answer
from maxtext.serving.worker import Worker

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Meters:
  """Counts of one server; a registry of their own, so that two servers in one process are two."""

  media_type = CONTENT_TYPE_LATEST

  def __init__(self, worker: Worker) -> None:
    self._registry = own = CollectorRegistry()
    active = Gauge("maxtext_requests_active", "Requests that have a slot", registry=own)
    waiting = Gauge("maxtext_requests_waiting", "Requests without a slot", registry=own)
    active.set_function(lambda: worker.scheduler.active if worker.scheduler else 0)
    waiting.set_function(lambda: worker.waiting)
    age = Gauge("maxtext_last_step_seconds", "Since the last step ended; NaN before the first", registry=own)
    age.set_function(lambda: math.nan if worker.step_age is None else worker.step_age)
    pages = Gauge("maxtext_pages_free", "Pages of the cache that nobody has", registry=own)
    pages.set_function(lambda: worker.scheduler.free_pages if worker.scheduler else 0)
    preempted = Gauge("maxtext_preemptions", "Times that a request gave its pages back", registry=own)
    preempted.set_function(lambda: worker.scheduler.preemptions if worker.scheduler else 0)
    self._requests = Counter("maxtext_requests", "Requests that have ended, by why", ["finish"], registry=own)
    self._prompt_tokens = Counter("maxtext_prompt_tokens", "Tokens of prompts", registry=own)
    self._tokens = Counter("maxtext_generated_tokens", "Tokens of answers", registry=own)
    self._first = Histogram("maxtext_first_token_seconds", "Until the first token", registry=own, buckets=_SECONDS)
    self._next = Histogram("maxtext_next_token_seconds", "Between two tokens", registry=own, buckets=_SECONDS)

  def page(self) -> bytes:
    """All figures as Prometheus reads them."""
    return generate_latest(self._registry)

  def turned_away(self) -> None:
    """Counts a request that found no place to wait."""
    self._requests.labels("turned_away").inc()

  def ended(self, answer: Answer) -> None:
    """Counts an answer; one that has no end was left by its client."""
    self._requests.labels(answer.finish or "left").inc()
    self._prompt_tokens.inc(len(answer.request.prompt))
    self._tokens.inc(len(answer.tokens))

  def timer(self) -> "Timer":
    """For the tokens of one client, from now on."""
    return Timer(self._first, self._next)


class Timer:
  """Times between tokens."""

  def __init__(self, first: Histogram, later: Histogram) -> None:
    self._histogram, self._later, self._last = first, later, time.perf_counter()

  def token(self) -> None:
    """Notes that one came."""
    now = time.perf_counter()
    self._histogram.observe(now - self._last)
    self._histogram, self._last = self._later, now
