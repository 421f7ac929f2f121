"""Connections of the server: how many there may be, and how long a client may keep one waiting.

A connection that waits for its client (idle, or with an incomplete request) has a deadline. When there are too many
connections, the one that has waited longest is closed for a new one; a connection whose request is being processed is
never closed. So clients that send slowly, or nothing, cannot keep others out. A client that does not read its response
is disconnected, so the response is not buffered forever.
"""

import asyncio
import ipaddress
import resource
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from maxtext.serving.errors import error_response
from maxtext.serving.limits import ConnectionLimits

_SPARE_FILES = 128  # file descriptors besides connections
_MIN_READ_RATE = 1024  # bytes a second that a client must read of a pending response
_MAX_CHUNKS = 64  # of a request's body; parsing a chunk costs more than its bytes
_ACCEPT_BATCH = 32  # connections accepted before other tasks run
_MIN_IDLE = 0.5  # seconds before a waiting connection may be closed for a new one
_SEND_BUFFER = 2**17  # bytes of a response in the kernel's buffer, which would otherwise grow to megabytes


class Connections:
  """The open connections of a server."""

  def __init__(self, limits: ConnectionLimits) -> None:
    self.limits = limits
    self._by_address: dict[str, set[LimitedProtocol]] = {}
    self._full_until: dict[str, float] = {}  # by address; "" is the limit of all

  def __len__(self) -> int:
    return sum(map(len, self._by_address.values()))

  def admit(self, address: str) -> bool:
    """Whether a connection from an address is admitted, if necessary by closing another one."""
    own = self._by_address.get(address, set())
    if len(own) >= self.limits.per_address:
      return self._evict(own, address)
    return len(self) < self.limits.total or self._evict(set().union(*self._by_address.values()), "")

  def add(self, new: "LimitedProtocol") -> None:
    """Adds a connection that was admitted."""
    self._by_address.setdefault(new.address, set()).add(new)

  def remove(self, closed: "LimitedProtocol") -> None:
    """Removes a closed connection."""
    own = self._by_address.get(closed.address, set())
    own.discard(closed)
    self._full_until.pop(closed.address, None)
    if not own:
      self._by_address.pop(closed.address, None)

  def _evict(self, candidates: "set[LimitedProtocol]", scope: str) -> bool:
    """Closes the connection that has waited longest for its client, if it has waited at least `_MIN_IDLE`."""
    now = time.monotonic()
    if now < self._full_until.get(scope, now):
      return False
    oldest = min((one for one in candidates if one.waits_for_client), key=lambda one: one.waits_since, default=None)
    if oldest is None or now < oldest.waits_since + _MIN_IDLE:
      self._full_until[scope] = now + _MIN_IDLE / 10  # so that a flood of connections costs no search
      return False
    self.remove(oldest)
    oldest.transport.abort()
    return True


class Listener:
  """Accepts connections from a socket, a few at a time, and closes those that are not admitted.

  It replaces asyncio's server in uvicorn, which accepts the whole backlog at once and creates a protocol for every
  connection before it could be rejected.
  """

  def __init__(self, listening: socket.socket, connections: Connections, make: "Callable[[], LimitedProtocol]") -> None:
    self._socket, self._connections, self._make = listening, connections, make
    self._loop, self._tasks = asyncio.get_running_loop(), set[asyncio.Task[Any]]()
    listening.setblocking(False)
    self._loop.add_reader(listening.fileno(), self._accept)

  def close(self) -> None:
    """Stops accepting."""
    self._loop.remove_reader(self._socket.fileno())

  async def wait_closed(self) -> None:
    """Returns at once: nothing is pending after `close`."""

  def _accept(self) -> None:
    for _ in range(_ACCEPT_BATCH):
      try:
        accepted, peer = self._socket.accept()
      except OSError:  # no connection is pending, the client has left, or there are no file descriptors
        return
      address = client_network(peer[0] if isinstance(peer, tuple) else "")
      if not self._connections.admit(address):
        accepted.close()
        continue
      accepted.setblocking(False)
      accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
      protocol = self._make()
      protocol.address = address
      self._connections.add(protocol)
      task = self._loop.create_task(self._connect(protocol, accepted))
      self._tasks.add(task)
      task.add_done_callback(self._tasks.discard)

  async def _connect(self, protocol: "LimitedProtocol", accepted: socket.socket) -> None:
    try:
      await self._loop.connect_accepted_socket(lambda: protocol, accepted)
    except OSError:  # the client has left
      self._connections.remove(protocol)


class LimitedProtocol(H11Protocol):
  """uvicorn's HTTP/1.1 protocol with limits."""

  def __init__(self, connections: Connections, config: Config, **kwargs: Any) -> None:
    super().__init__(config, **kwargs)
    self._connections, self._limits = connections, connections.limits
    self.conn = _ChunkLimitedConnection(h11.SERVER, config.h11_max_incomplete_event_size or 2**14)
    self.address = ""
    self._phase: tuple[Any, Any] | None = None
    self.waits_since = time.monotonic()
    self._deadline: asyncio.TimerHandle | None = None
    self._write_deadline: asyncio.TimerHandle | None = None

  @property
  def waits_for_client(self) -> bool:
    """Whether the server waits for the client to send."""
    return self.transport is not None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    super().connection_made(transport)
    # What the kernel does not take makes the application wait, and starts the client's read deadline.
    transport.set_write_buffer_limits(high=0)
    self.app_state["abort"] = transport.abort  # copied to `scope["state"]`
    self._update_deadline()

  def connection_lost(self, exc: Exception | None) -> None:
    self._connections.remove(self)
    for timer in (self._deadline, self._write_deadline):
      if timer is not None:
        timer.cancel()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if not self.transport.is_closing():
      super().data_received(data)
      self._update_deadline()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._update_deadline()

  def send_400_response(self, msg: str) -> None:
    self._reject(400, msg)

  def pause_writing(self) -> None:
    super().pause_writing()
    self._start_write_deadline()

  def resume_writing(self) -> None:
    super().resume_writing()
    if self._write_deadline is not None:
      self._write_deadline.cancel()
      self._write_deadline = None

  def _update_deadline(self) -> None:
    """Starts the deadline of a header or body when it begins, and cancels it when it is complete."""
    phase = (self.conn.their_state, self.cycle)
    if phase == self._phase:
      return
    self._phase, self.waits_since = phase, time.monotonic()
    if self._deadline is not None:
      self._deadline.cancel()
      self._deadline = None
    if self.waits_for_client and not self.transport.is_closing():
      head = self.conn.their_state is h11.IDLE
      seconds = self._limits.header_seconds if head else self._limits.body_seconds
      self._deadline = self.loop.call_later(seconds, self._reject, 408, "The request took too long to arrive.")

  def _reject(self, status: int, message: str) -> None:
    """Sends an error if a request has begun and no response has, and closes the connection."""
    idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
    responded = self.cycle is not None and self.cycle.response_started and self.conn.their_state is not h11.IDLE
    if not idle and not responded:
      response = error_response(status, message, {"connection": "close", "retry-after": "1"})
      head = [f"{name}: {value}" for name, value in response.headers.items()]
      first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
      self.transport.write("\r\n".join([first, *head, "", ""]).encode() + response.body)
    self.transport.close()

  def _start_write_deadline(self) -> None:
    if self._write_deadline is not None:
      self._write_deadline.cancel()
    pending = self.transport.get_write_buffer_size()
    self._write_deadline = self.loop.call_later(self._limits.write_seconds, self._check_write_progress, pending)

  def _check_write_progress(self, before: int) -> None:
    read = before - self.transport.get_write_buffer_size()
    if read < _MIN_READ_RATE * self._limits.write_seconds:
      self.transport.abort()
    else:
      self._start_write_deadline()


class _ChunkLimitedConnection(h11.Connection):
  """Rejects bodies of many small chunks: parsing one megabyte of them would take seconds."""

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


def client_network(host: str) -> str:
  """The network of one client: an IPv4 address, or the /64 network of an IPv6 address."""
  try:
    address = ipaddress.ip_address(host.partition("%")[0])
  except ValueError:  # a Unix socket
    return host
  if isinstance(address, ipaddress.IPv6Address):
    if address.ipv4_mapped is None:
      return str(ipaddress.ip_network((address, 64), strict=False))
    address = address.ipv4_mapped
  return str(address)


def reserve_file_descriptors(connections: int) -> int:
  """Raises the limit of open files for this many connections; returns how many it allows."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = connections + _SPARE_FILES
  if soft != resource.RLIM_INFINITY and soft < wanted:
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - _SPARE_FILES))
