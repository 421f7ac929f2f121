"""The thread that drives the scheduler, and hands every request's events to whoever asked."""

import threading
import traceback
from collections.abc import Callable

from maxtext.inference.scheduler import Event, Request, Scheduler

Deliver = Callable[[Event], None]


class FullError(Exception):
  """Too many requests wait already."""


class FailedError(Exception):
  """A step has failed, so nothing is answered any more."""


class Worker:
  """Runs from `start` to `stop`. What a scheduler's step raises ends every request, and all that come later.

  Args:
    scheduler: nobody else steps it.
    most_waiting: requests without a slot, beyond which others are turned away.
  """

  def __init__(self, scheduler: Scheduler, most_waiting: int) -> None:
    self.scheduler, self._most_waiting = scheduler, most_waiting
    self.failure: Exception | None = None
    self._deliver: dict[Request, Deliver] = {}
    self._wake, self._over = threading.Condition(), False
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  def start(self) -> None:
    """Begins to work."""
    self._thread.start()

  def stop(self) -> None:
    """Ends after the step that is under way."""
    with self._wake:
      self._over = True
      self._wake.notify()
    self._thread.join()

  def submit(self, requests: list[Request], deliver: Deliver) -> None:
    """Takes all of them or none; `deliver` is called in the worker's thread, and for the last time with a `finish`."""
    with self._wake:
      if self.failure is not None:
        raise FailedError
      if self.scheduler.waiting + len(requests) > self._most_waiting:
        raise FullError
      for request in requests:
        self._deliver[request] = deliver
        self.scheduler.submit(request)
      self._wake.notify()

  def cancel(self, requests: list[Request]) -> None:
    """Frees their slots before the next step; those that have ended are left alone."""
    with self._wake:
      for request in requests:
        if request in self._deliver:
          self.scheduler.cancel(request)

  def _run(self) -> None:
    while True:
      with self._wake:
        self._wake.wait_for(lambda: self._over or self.scheduler.busy)
        if self._over:
          return
      try:
        events = self.scheduler.step()
      except Exception as failure:
        traceback.print_exception(failure)
        with self._wake:
          self.failure = failure
          events = [Event(request, finish="failed") for request in self._deliver]
          self._over = True
      for event in events:
        with self._wake:
          deliver = self._deliver.pop(event.request) if event.finish else self._deliver[event.request]
        deliver(event)
