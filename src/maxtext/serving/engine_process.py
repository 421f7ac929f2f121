"""The process that answers: it loads the model, and does what the front process passes on (`front.py`).

It ends when the front process does, however that ended, and when the engine fails.
"""

import asyncio
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from maxtext.configs import ConfigError
from maxtext.configs.errors import RunError
from maxtext.serving.channel import Channel
from maxtext.serving.limits import Limits

if TYPE_CHECKING:
  from maxtext.inference.loading import Loaded
  from maxtext.serving.worker import Worker

_TELL_EVERY = 0.1  # seconds between two words about the engine
_END_SECONDS = 5  # for the step that is under way
_NICENESS = 5  # where cores are few, the front process, which does little, goes first


def run(end: socket.socket, load: "Callable[[], Loaded]", name: str, limits: Limits) -> None:
  """What the process does."""
  for number in (signal.SIGINT, signal.SIGTERM):  # terminals and supervisors send them to all; the front decides
    signal.signal(number, signal.SIG_IGN)
  os.nice(_NICENESS)
  asyncio.run(_answer(end, load, name, limits))


async def _answer(end: socket.socket, load: "Callable[[], Loaded]", name: str, limits: Limits) -> None:
  channel, over, loop = await Channel.of(end), asyncio.Event(), asyncio.get_running_loop()
  requests = _Requests(channel)
  takes = asyncio.create_task(requests.take())
  imports = asyncio.create_task(asyncio.to_thread(importlib.import_module, "maxtext.serving.server"))
  await asyncio.wait((takes, imports), return_when=asyncio.FIRST_COMPLETED)
  if not imports.done():
    os._exit(0)  # the front has ended already
  from maxtext.serving.server import make_app, prepare
  from maxtext.serving.worker import Worker

  worker = Worker(lambda: prepare(load(), limits), limits.waiting, limits.share)
  requests.app = make_app(name, worker, limits)

  def ended() -> None:
    with suppress(RuntimeError):  # the loop has ended too
      loop.call_soon_threadsafe(over.set)

  worker.start(ended=ended)
  tells = asyncio.create_task(_tell(channel, worker))
  failing = asyncio.create_task(over.wait())
  await asyncio.wait((takes, failing), return_when=asyncio.FIRST_COMPLETED)
  tells.cancel()
  if worker.failure is not None:
    await requests.finish(_END_SECONDS)  # they have been told, and tell their clients
    channel.send("failed", _named(worker.failure))
    await channel.flush()
  seconds = 0 if worker.status == "starting" else _END_SECONDS
  if not await asyncio.to_thread(worker.stop, seconds):  # it loads, or hangs in a step; nothing is lost
    sys.stdout.flush()
    os._exit(1)


async def _tell(channel: Channel, worker: "Worker") -> None:
  while True:
    if worker.status != "failed":  # the front learns of that when nobody waits any more
      channel.send(
        "state", worker.status, worker.busy, worker.step_age, worker.loaded.engine.slots if worker.loaded else 0
      )
    await asyncio.sleep(_TELL_EVERY)


def _named(failure: BaseException) -> Exception:
  if isinstance(failure, ConfigError | RunError):
    return failure
  return RunError(f"the engine has failed: {type(failure).__name__}: {failure}.")


class _Requests:
  """Requests under way: the application is called for each as a server would; none comes before it is there."""

  def __init__(self, channel: Channel) -> None:
    self._channel, self.app = channel, cast(Any, None)
    self._inboxes: dict[int, asyncio.Queue[Any]] = {}
    self._tasks: set[asyncio.Task[None]] = set()

  async def take(self) -> None:
    """Until the front process ends."""
    while (message := await self._channel.receive()) is not None:
      kind, number, *rest = message
      if kind == "leave":
        if number in self._inboxes:
          self._inboxes[number].put_nowait({"type": "http.disconnect"})
        continue
      scope, body = rest
      inbox: asyncio.Queue[Any] = asyncio.Queue()
      self._inboxes[number] = inbox
      inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
      task = asyncio.create_task(self._call(number, scope, inbox))
      self._tasks.add(task)
      task.add_done_callback(self._tasks.discard)

  async def finish(self, seconds: float) -> None:
    """Waits for those that are there."""
    if self._tasks:
      await asyncio.wait(self._tasks, timeout=seconds)

  async def _call(self, number: int, scope: dict[str, Any], inbox: "asyncio.Queue[Any]") -> None:
    async def send(message: Any) -> None:
      self._channel.send("reply", number, message)

    gone: Any = None

    async def receive() -> Any:
      nonlocal gone
      if gone is not None:  # whoever asks again must see it too
        return gone
      message = await inbox.get()
      gone = message if message["type"] == "http.disconnect" else None
      return message

    try:
      await self.app(scope, receive, send)
    except Exception as error:  # it has answered with a 500
      traceback.print_exception(error)
    finally:
      del self._inboxes[number]
      self._channel.send("reply", number, None)
