"""The thread that loads the model and drives the scheduler, and hands every request's events to whoever asked.

Requests wait here, a queue for each client, and enter the scheduler in turns between clients: whoever has many waiting
delays only itself, and nobody can take all places to wait.
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
from maxtext.inference.loading import Loaded
from maxtext.inference.scheduler import Event, Request, Scheduler

Deliver = Callable[[Event], None]
Client = Hashable


class FullError(Exception):
  """Too many requests wait already, of this client or of all."""


class NotReadyError(Exception):
  """The model is being loaded or warmed up."""


class FailedError(Exception):
  """Loading or a step has failed, so nothing is answered any more."""


class Worker:
  """Runs from `start` to `stop`. What loading or a step raises, of any kind, ends every request and all later ones.

  Args:
    load: makes what answers, in the worker's thread; until it returns, `submit` refuses.
    max_waiting: requests without a slot, beyond which others are turned away.
    max_waiting_per_client: the same for one client.

  Attributes:
    loaded: what answers; None until it is ready.
    scheduler: the same.
    failure: what ended the thread; None while all is well.
  """

  def __init__(self, load: Callable[[], Loaded], max_waiting: int, max_waiting_per_client: int) -> None:
    self._load, self._max_waiting, self._max_per_client = load, max_waiting, max_waiting_per_client
    self.loaded: Loaded | None = None
    self.scheduler: Scheduler | None = None
    self.failure: BaseException | None = None
    self._deliver: dict[Request, Deliver] = {}
    self._queues: dict[Client, deque[list[Request]]] = {}  # the client whose turn is next is first
    self._last_step: float | None = None
    self._wake, self._over = threading.Condition(), False
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  def start(self, ready: Callable[[], None] = lambda: None, ended: Callable[[], None] = lambda: None) -> None:
    """Begins to load and then to work; the thread calls `ready` between, and `ended` when all know of a failure."""
    self._ready, self._ended = ready, ended
    self._thread.start()

  def stop(self, seconds: float | None = None) -> bool:
    """Ends after the step that is under way; False where that took longer than so many seconds."""
    with self._wake:
      self._over = True
      self._wake.notify()
    self._thread.join(seconds)
    return not self._thread.is_alive()

  @property
  def status(self) -> Literal["starting", "ok", "failed"]:
    """Whether requests are answered."""
    if self.failure is not None:
      return "failed"
    return "starting" if self.scheduler is None else "ok"

  @property
  def busy(self) -> bool:
    """Whether any request has not ended."""
    return bool(self._queues) or (self.scheduler is not None and self.scheduler.busy)

  @property
  def waiting(self) -> int:
    """Requests without a slot."""
    with self._wake:
      return self._waiting()

  @property
  def step_age(self) -> float | None:
    """Seconds since the last step ended; None before the first."""
    return None if self._last_step is None else time.monotonic() - self._last_step

  def submit(self, requests: list[Request], deliver: Deliver, client: Client = "") -> None:
    """Takes all of them or none; `deliver` is called in the worker's thread, and for the last time with a `finish`.

    Answers to one prompt stay together, so that the prompt is prefilled once where the engine can.
    """
    with self._wake:
      if self.failure is not None:
        raise FailedError
      if self.scheduler is None:
        raise NotReadyError
      own = sum(map(len, self._queues.get(client, ())))
      if self._waiting() + len(requests) > self._max_waiting or own + len(requests) > self._max_per_client:
        raise FullError
      groups = [list(group) for _, group in itertools.groupby(requests, key=lambda request: id(request.prompt))]
      self._queues.setdefault(client, deque()).extend(groups)
      self._deliver.update(dict.fromkeys(requests, deliver))
      self._wake.notify()

  def cancel(self, requests: list[Request]) -> None:
    """Frees their slots before the next step, or their places to wait at once; those that have ended are left alone."""
    with self._wake:
      gone = {request for request in requests if request in self._deliver}
      for client, queue in list(self._queues.items()):
        kept = [[request for request in group if request not in gone] for group in queue]
        if sum(map(len, kept)) < sum(map(len, queue)):
          dropped = {request for group in queue for request in group} & gone
          gone -= dropped
          for request in dropped:
            del self._deliver[request]
          self._set_queue(client, (group for group in kept if group))
      for request in gone:
        assert self.scheduler is not None
        self.scheduler.cancel(request)

  def _waiting(self) -> int:
    queued = sum(len(group) for queue in self._queues.values() for group in queue)
    return queued + (self.scheduler.waiting if self.scheduler else 0)

  def _set_queue(self, client: Client, groups: Iterable[list[Request]]) -> None:
    self._queues[client] = deque(groups)
    if not self._queues[client]:
      del self._queues[client]

  def _run(self) -> None:
    try:
      loaded = self._load()
      self.loaded, self.scheduler = loaded, loaded.scheduler()
      self._ready()
      self._work(self.scheduler)
    except BaseException as failure:  # a panic of a library in Rust is no Exception
      if not isinstance(failure, ConfigError | RunError):
        traceback.print_exception(failure)
      with self._wake:
        self.failure = failure
        left, self._deliver, self._queues = self._deliver, {}, {}
      for request, deliver in left.items():
        deliver(Event(request, finish="failed"))
      self._ended()

  def _work(self, scheduler: Scheduler) -> None:
    while True:
      with self._wake:
        self._wake.wait_for(lambda: self._over or self.busy)
        if self._over:
          return
        self._admit(scheduler)
      events = scheduler.step()
      self._last_step = time.monotonic()
      for event in events:
        with self._wake:
          deliver = self._deliver.pop(event.request) if event.finish else self._deliver[event.request]
        deliver(event)

  def _admit(self, scheduler: Scheduler) -> None:
    """Hands the scheduler the next prompt, of the client whose turn it is; it begins at most one in a step."""
    if self._queues and not scheduler.waiting:
      client, queue = next(iter(self._queues.items()))
      for request in queue.popleft():
        scheduler.submit(request)
      del self._queues[client]
      if queue:
        self._queues[client] = queue  # behind the others
