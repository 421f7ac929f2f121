"""Prefetching in a thread."""

import queue
import threading
from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
  """An iterator over the items of a generator, `depth` items ahead. Errors of the generator are raised in their
  turn."""

  def __init__(self, items: Generator[T], depth: int) -> None:
    """Starts the thread, in which the generator runs and is closed."""
    self._items = items
    self._ready: queue.Queue[tuple[T] | BaseException] = queue.Queue(max(depth, 1))
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name="maxtext-data", daemon=True)
    self._thread.start()

  def __iter__(self) -> "Prefetcher[T]":
    return self

  def __next__(self) -> T:
    item = self._ready.get()
    if isinstance(item, BaseException):
      self._ready.put(item)
      raise item
    return item[0]

  def close(self) -> None:
    """Ends the thread and closes the generator."""
    self._closed.set()
    self._thread.join()

  def _run(self) -> None:
    try:
      for item in self._items:
        if not self._put((item,)):
          break
      else:
        self._put(StopIteration())
    except BaseException as error:
      self._put(error)
    finally:
      self._items.close()

  def _put(self, item: tuple[T] | BaseException) -> bool:
    while not self._closed.is_set():
      try:
        self._ready.put(item, timeout=0.1)
        return True
      except queue.Full:
        continue
    return False
