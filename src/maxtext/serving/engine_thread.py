"""The thread that loads the model, drives the scheduler, and passes token outputs to callbacks.

Requests wait here in one queue per client, and are admitted to the scheduler round-robin over clients. A client with
many requests delays only itself, and no client can fill the whole queue.
"""

import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Literal

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.inference.inference_model import InferenceModel
from maxtext.inference.scheduler import Request, Scheduler, TokenOutput

OutputCallback = Callable[[TokenOutput], None]
Client = Hashable


class QueueFullError(Exception):
  """The request queue is full, for this client or for all."""


class EngineNotReadyError(Exception):
  """The model is still loading or warming up."""


class EngineFailedError(Exception):
  """Loading or a step has failed, so no request is processed any more."""


class EngineThread:
  """The engine thread. An exception in loading or in a step fails all requests, also later ones.

  Args:
    load: loads the model, in this thread; until it returns, `submit` raises `EngineNotReadyError`.
    max_queued_requests: length of the queue; `submit` raises `QueueFullError` beyond it.
    max_queued_requests_per_client: the same for one client.

  Attributes:
    model: the loaded model; None until it is ready.
    scheduler: its scheduler; None until it is ready.
    failure: the exception that ended the thread; None while it works.
  """

  def __init__(
    self, load: Callable[[], InferenceModel], max_queued_requests: int, max_queued_requests_per_client: int
  ) -> None:
    self._load = load
    self._max_queued, self._max_queued_per_client = max_queued_requests, max_queued_requests_per_client
    self.model: InferenceModel | None = None
    self.scheduler: Scheduler | None = None
    self.failure: BaseException | None = None
    self._callbacks: dict[Request, OutputCallback] = {}
    self._queues: dict[Client, deque[list[Request]]] = {}  # the next client is first
    self._last_step: float | None = None
    self._wake, self._stopping = threading.Condition(), False
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  def start(self, ready: Callable[[], None] = lambda: None, ended: Callable[[], None] = lambda: None) -> None:
    """Starts the thread. It calls `ready` when the model is loaded, and `ended` after a failure was reported to all."""
    self._ready, self._ended = ready, ended
    self._thread.start()

  def stop(self, seconds: float | None = None) -> bool:
    """Ends the thread after the current step; returns False if that takes longer than `seconds`."""
    with self._wake:
      self._stopping = True
      self._wake.notify()
    self._thread.join(seconds)
    return not self._thread.is_alive()

  @property
  def status(self) -> Literal["starting", "ok", "failed"]:
    """Whether requests are processed."""
    if self.failure is not None:
      return "failed"
    return "starting" if self.scheduler is None else "ok"

  @property
  def busy(self) -> bool:
    """Whether any request is queued or running."""
    return bool(self._queues) or (self.scheduler is not None and self.scheduler.busy)

  @property
  def num_waiting(self) -> int:
    """Number of queued requests."""
    with self._wake:
      return self._num_waiting()

  @property
  def seconds_since_last_step(self) -> float | None:
    """Seconds since the last step ended; None before the first."""
    return None if self._last_step is None else time.monotonic() - self._last_step

  def submit(self, requests: list[Request], callback: OutputCallback, client: Client = "") -> None:
    """Queues all requests or none. `callback` runs in this thread; its last call for a request has a `finish_reason`.

    Requests with the same prompt stay together, so that the scheduler can share one prefill.
    """
    with self._wake:
      if self.failure is not None:
        raise EngineFailedError
      if self.scheduler is None:
        raise EngineNotReadyError
      own = sum(map(len, self._queues.get(client, ())))
      if self._num_waiting() + len(requests) > self._max_queued or own + len(requests) > self._max_queued_per_client:
        raise QueueFullError
      groups = [list(group) for _, group in itertools.groupby(requests, key=lambda request: id(request.prompt))]
      self._queues.setdefault(client, deque()).extend(groups)
      self._callbacks.update(dict.fromkeys(requests, callback))
      self._wake.notify()

  def cancel(self, requests: list[Request]) -> None:
    """Removes queued requests, and frees the slots of running ones before the next step. Ignores finished ones."""
    with self._wake:
      pending = {request for request in requests if request in self._callbacks}
      for client, queue in list(self._queues.items()):
        remaining = [[request for request in group if request not in pending] for group in queue]
        if sum(map(len, remaining)) < sum(map(len, queue)):
          dropped = {request for group in queue for request in group} & pending
          pending -= dropped
          for request in dropped:
            del self._callbacks[request]
          self._set_queue(client, (group for group in remaining if group))
      for request in pending:
        assert self.scheduler is not None
        self.scheduler.cancel(request)

  def _num_waiting(self) -> int:
    queued = sum(len(group) for queue in self._queues.values() for group in queue)
    return queued + (self.scheduler.num_waiting if self.scheduler else 0)

  def _set_queue(self, client: Client, groups: Iterable[list[Request]]) -> None:
    self._queues[client] = deque(groups)
    if not self._queues[client]:
      del self._queues[client]

  def _run(self) -> None:
    try:
      model = self._load()
      self.model, self.scheduler = model, model.make_scheduler()
      self._ready()
      self._step_loop(self.scheduler)
    except BaseException as failure:  # a panic in a Rust library is not an Exception
      if not isinstance(failure, ConfigError | RunError):
        traceback.print_exception(failure)
      with self._wake:
        self.failure = failure
        callbacks, self._callbacks, self._queues = self._callbacks, {}, {}
      for request, callback in callbacks.items():
        callback(TokenOutput(request, finish_reason="failed"))
      self._ended()

  def _step_loop(self, scheduler: Scheduler) -> None:
    while True:
      with self._wake:
        self._wake.wait_for(lambda: self._stopping or self.busy)
        if self._stopping:
          return
        self._admit(scheduler)
      outputs = scheduler.step()
      self._last_step = time.monotonic()
      for output in outputs:
        with self._wake:
          callback = self._callbacks.pop(output.request) if output.finish_reason else self._callbacks[output.request]
        callback(output)

  def _admit(self, scheduler: Scheduler) -> None:
    """Submits the next prompt, of the client whose turn it is. The scheduler starts at most one per step."""
    if self._queues and not scheduler.num_waiting:
      client, queue = next(iter(self._queues.items()))
      for request in queue.popleft():
        scheduler.submit(request)
      del self._queues[client]
      if queue:
        self._queues[client] = queue  # after the other clients
