"""Connections of the server: how many there may be, and how long a client may keep one waiting.

A connection that waits for its client (idle, or with a request that is not whole) has a deadline, and where there are
too many it makes room for a new one, oldest first; one whose request is being answered never does. So clients that
send slowly, or nothing, cannot keep others out. A client that does not read is dropped, so its answer is not kept.
"""

import asyncio
import ipaddress
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from maxtext.serving.limits import ConnectionLimits

_SPARE_FILES = 128  # of the process, beside connections
_MIN_READ_RATE = 1024  # bytes a second that a client must read of what waits for it
_MAX_CHUNKS = 64  # of a request's body; each costs more than its bytes
_ACCEPTED = 32  # connections that are taken before others have their turn
_MIN_WAIT = 0.5  # seconds in which nobody has to make room
_SEND_BUFFER = 2**17  # bytes of an answer that the kernel keeps for a client; it would grow to megabytes


class Connections:
  """All connections of a server."""

  def __init__(self, limits: ConnectionLimits) -> None:
    self.limits = limits
    self._by_address: dict[str, set[LimitedProtocol]] = {}
    self._full_until: dict[str, float] = {}  # by address, and of all under ""

  def __len__(self) -> int:
    return sum(map(len, self._by_address.values()))

  def make_room(self, address: str) -> bool:
    """Whether a connection from there can be taken, in place of another one where there are too many."""
    own = self._by_address.get(address, set())
    if len(own) >= self.limits.per_address:
      return self._evict(own, address)
    return len(self) < self.limits.total or self._evict(set().union(*self._by_address.values()), "")

  def add(self, new: "LimitedProtocol") -> None:
    """There must be room."""
    self._by_address.setdefault(new.address, set()).add(new)

  def forget(self, gone: "LimitedProtocol") -> None:
    """Its connection is closed."""
    own = self._by_address.get(gone.address, set())
    own.discard(gone)
    self._full_until.pop(gone.address, None)
    if not own:
      self._by_address.pop(gone.address, None)

  def _evict(self, some: "set[LimitedProtocol]", whose: str) -> bool:
    """Closes the one that has waited for its client the longest, if it was long enough to send something."""
    now = time.monotonic()
    if now < self._full_until.get(whose, now):
      return False
    oldest = min((one for one in some if one.waits_for_client), key=lambda one: one.waits_since, default=None)
    if oldest is None or now < oldest.waits_since + _MIN_WAIT:
      self._full_until[whose] = now + _MIN_WAIT / 10  # until then a flood of others costs no search
      return False
    self.forget(oldest)
    oldest.transport.abort()
    return True


class Listener:
  """Takes connections from a socket, a few at a time, and closes those for which there is no room at no cost.

  To uvicorn it is one of asyncio's servers, which would take as many at a time as may wait, and build what handles a
  connection before anyone can refuse it.
  """

  def __init__(self, listening: socket.socket, connections: Connections, make: "Callable[[], LimitedProtocol]") -> None:
    self._socket, self._connections, self._make = listening, connections, make
    self._loop, self._tasks = asyncio.get_running_loop(), set[asyncio.Task[Any]]()
    listening.setblocking(False)
    self._loop.add_reader(listening.fileno(), self._accept)

  def close(self) -> None:
    """Takes no more."""
    self._loop.remove_reader(self._socket.fileno())

  async def wait_closed(self) -> None:
    """Nothing of it is left."""

  def _accept(self) -> None:
    for _ in range(_ACCEPTED):
      try:
        taken, peer = self._socket.accept()
      except OSError:  # there is none, or the one that was there has left, or files have run out
        return
      address = network(peer[0] if isinstance(peer, tuple) else "")
      if not self._connections.make_room(address):
        taken.close()
        continue
      taken.setblocking(False)
      taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
      protocol = self._make()
      protocol.address = address
      self._connections.add(protocol)
      task = self._loop.create_task(self._connect(protocol, taken))
      self._tasks.add(task)
      task.add_done_callback(self._tasks.discard)

  async def _connect(self, protocol: "LimitedProtocol", taken: socket.socket) -> None:
    try:
      await self._loop.connect_accepted_socket(lambda: protocol, taken)
    except OSError:  # it has left
      self._connections.forget(protocol)


class LimitedProtocol(H11Protocol):
  """HTTP/1.1 of uvicorn, with limits."""

  def __init__(self, connections: Connections, config: Config, **kwargs: Any) -> None:
    super().__init__(config, **kwargs)
    self._connections, self._limits = connections, connections.limits
    self.conn = _FewChunks(h11.SERVER, config.h11_max_incomplete_event_size or 2**14)
    self.address = ""
    self._phase: tuple[Any, Any] | None = None
    self.waits_since = time.monotonic()
    self._deadline: asyncio.TimerHandle | None = None
    self._write_deadline: asyncio.TimerHandle | None = None

  @property
  def waits_for_client(self) -> bool:
    """Whether the next to act is the client."""
    return self.transport is not None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    super().connection_made(transport)
    # Whatever the kernel does not take makes the application wait, and starts the client's time to read it.
    transport.set_write_buffer_limits(high=0)
    self.app_state["abort"] = transport.abort  # `scope["state"]` is made of it
    self._watch()

  def connection_lost(self, exc: Exception | None) -> None:
    self._connections.forget(self)
    for timer in (self._deadline, self._write_deadline):
      if timer is not None:
        timer.cancel()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if not self.transport.is_closing():
      super().data_received(data)
      self._watch()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._watch()

  def send_400_response(self, msg: str) -> None:
    self._refuse(400, msg)

  def pause_writing(self) -> None:
    super().pause_writing()
    self._expect_reading()

  def resume_writing(self) -> None:
    super().resume_writing()
    if self._write_deadline is not None:
      self._write_deadline.cancel()
      self._write_deadline = None

  def _watch(self) -> None:
    """Starts the time of a header or a body when it begins, and stops it when it is there."""
    phase = (self.conn.their_state, self.cycle)
    if phase == self._phase:
      return
    self._phase, self.waits_since = phase, time.monotonic()
    if self._deadline is not None:
      self._deadline.cancel()
      self._deadline = None
    if self.waits_for_client and not self.transport.is_closing():
      head = self.conn.their_state is h11.IDLE
      seconds = self._limits.head_seconds if head else self._limits.body_seconds
      self._deadline = self.loop.call_later(seconds, self._refuse, 408, "The request took too long to arrive.")

  def _refuse(self, status: int, message: str) -> None:
    """Answers, where a request has begun and no answer has, and closes."""
    idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
    answered = self.cycle is not None and self.cycle.response_started and self.conn.their_state is not h11.IDLE
    if not idle and not answered:
      head = f"HTTP/1.1 {status} {message}\r\ncontent-type: text/plain\r\nconnection: close\r\nretry-after: 1\r\n"
      self.transport.write(f"{head}content-length: {len(message)}\r\n\r\n{message}".encode())
    self.transport.close()

  def _expect_reading(self) -> None:
    if self._write_deadline is not None:
      self._write_deadline.cancel()
    waiting = self.transport.get_write_buffer_size()
    self._write_deadline = self.loop.call_later(self._limits.write_seconds, self._look_at_reading, waiting)

  def _look_at_reading(self, before: int) -> None:
    read = before - self.transport.get_write_buffer_size()
    if read < _MIN_READ_RATE * self._limits.write_seconds:
      self.transport.abort()
    else:
      self._expect_reading()


class _FewChunks(h11.Connection):
  """Refuses bodies in many small chunks: parsing those of one megabyte would take seconds."""

  _chunks = 0

  def next_event(self) -> Any:
    event = super().next_event()
    if isinstance(event, h11.Request):
      self._chunks = 0
    elif isinstance(event, h11.Data):
      self._chunks += event.chunk_start
      if self._chunks > _MAX_CHUNKS:
        raise h11.RemoteProtocolError("too many chunks")
    return event


def network(host: str) -> str:
  """What counts as one client: an IPv4 address, or the /64 network that an IPv6 customer has."""
  try:
    address = ipaddress.ip_address(host.partition("%")[0])
  except ValueError:  # a Unix socket
    return host
  if isinstance(address, ipaddress.IPv6Address):
    if address.ipv4_mapped is None:
      return str(ipaddress.ip_network((address, 64), strict=False))
    address = address.ipv4_mapped
  return str(address)


def reserve_files(connections: int) -> int:
  """Raises the limit of open files so that it does not shut out clients; returns how many connections it allows."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = connections + _SPARE_FILES
  if soft != resource.RLIM_INFINITY and soft < wanted:
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - _SPARE_FILES))
