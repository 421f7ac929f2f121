"""The engine process: it loads the model and handles the requests that the frontend forwards (`frontend.py`).

It ends when the frontend ends, for any reason, and when the engine fails.
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
from maxtext.serving.limits import ServerLimits

if TYPE_CHECKING:
  from maxtext.inference.inference_model import InferenceModel
  from maxtext.serving.engine_thread import EngineThread

_STATE_INTERVAL = 0.1  # seconds between two reports of the engine's state
_STOP_SECONDS = 5  # for the current step
_NICENESS = 5  # lower priority than the frontend, which does little


def run(end: socket.socket, load: "Callable[[], InferenceModel]", name: str, limits: ServerLimits) -> None:
  """The entry point of the process."""
  for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the frontend decides
    signal.signal(number, signal.SIG_IGN)
  os.nice(_NICENESS)
  asyncio.run(_serve(end, load, name, limits))


async def _serve(end: socket.socket, load: "Callable[[], InferenceModel]", name: str, limits: ServerLimits) -> None:
  channel, failed, loop = await Channel.of(end), asyncio.Event(), asyncio.get_running_loop()
  requests = _RequestDispatcher(channel)
  dispatching = asyncio.create_task(requests.dispatch())
  importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, "maxtext.serving.server"))
  await asyncio.wait((dispatching, importing), return_when=asyncio.FIRST_COMPLETED)
  if not importing.done():
    os._exit(0)  # the frontend has ended already
  from maxtext.serving.engine_thread import EngineThread
  from maxtext.serving.server import make_app, prepare

  engine = EngineThread(lambda: prepare(load(), limits), limits.max_queued_requests, limits.queue_share)
  requests.app = make_app(name, engine, limits)

  def ended() -> None:
    with suppress(RuntimeError):  # the loop has ended
      loop.call_soon_threadsafe(failed.set)

  engine.start(ended=ended)
  reporting = asyncio.create_task(_report_state(channel, engine))
  failing = asyncio.create_task(failed.wait())
  await asyncio.wait((dispatching, failing), return_when=asyncio.FIRST_COMPLETED)
  reporting.cancel()
  if engine.failure is not None:
    await requests.finish(_STOP_SECONDS)  # their clients get the error
    channel.send("failed", _as_error(engine.failure))
    await channel.flush()
    # If this end closed first, a message that the frontend sends meanwhile would discard the unread ones.
    await asyncio.wait((dispatching,), timeout=_STOP_SECONDS)
  seconds = 0 if engine.status == "starting" else _STOP_SECONDS
  if not await asyncio.to_thread(engine.stop, seconds):  # it is still loading, or hangs in a step
    sys.stdout.flush()
    os._exit(1)


async def _report_state(channel: Channel, engine: "EngineThread") -> None:
  while True:
    if engine.status != "failed":  # reported once all requests have their errors
      slots = engine.model.engine.slots if engine.model else 0
      channel.send("state", engine.status, engine.busy, engine.seconds_since_last_step, slots)
    await asyncio.sleep(_STATE_INTERVAL)


def _as_error(failure: BaseException) -> Exception:
  if isinstance(failure, ConfigError | RunError):
    return failure
  return RunError(f"the engine has failed: {type(failure).__name__}: {failure}.")


class _RequestDispatcher:
  """Calls the ASGI application for each request of the frontend, as a server would."""

  def __init__(self, channel: Channel) -> None:
    self._channel, self.app = channel, cast(Any, None)
    self._inboxes: dict[int, asyncio.Queue[Any]] = {}
    self._tasks: set[asyncio.Task[None]] = set()

  async def dispatch(self) -> None:
    """Runs until the frontend ends."""
    while (message := await self._channel.receive()) is not None:
      kind, number, *rest = message
      if kind == "disconnect":
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
    """Waits for the current requests."""
    if self._tasks:
      await asyncio.wait(self._tasks, timeout=seconds)

  async def _call(self, number: int, scope: dict[str, Any], inbox: "asyncio.Queue[Any]") -> None:
    async def send(message: Any) -> None:
      self._channel.send("reply", number, message)

    disconnect: Any = None

    async def receive() -> Any:
      nonlocal disconnect
      if disconnect is not None:  # every later call must see it too
        return disconnect
      message = await inbox.get()
      disconnect = message if message["type"] == "http.disconnect" else None
      return message

    try:
      await self.app(scope, receive, send)
    except Exception as error:  # the client got a 500
      traceback.print_exception(error)
    finally:
      del self._inboxes[number]
      self._channel.send("reply", number, None)
