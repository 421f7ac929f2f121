"""The way between the two processes of a server: messages over a pair of connected sockets.

Both ends are ours and one started the other, so messages are pickled.
"""

import asyncio
import pickle
import socket
from contextlib import suppress
from typing import Any

_SIZE = 8  # bytes in front of a message


class Channel:
  """One end."""

  def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    self._reader, self._writer = reader, writer

  @staticmethod
  async def of(end: socket.socket) -> "Channel":
    """Over a connected socket, in the running event loop."""
    reader, writer = await asyncio.open_connection(sock=end)
    writer.transport.set_write_buffer_limits(high=0)  # so that `flush` waits for all of it
    return Channel(reader, writer)

  def send(self, *message: Any) -> None:
    """Never waits; what the other end has not taken is kept."""
    data = pickle.dumps(message)
    self._writer.write(len(data).to_bytes(_SIZE, "big") + data)

  async def receive(self) -> tuple[Any, ...] | None:
    """The next message; None where the other end is closed."""
    try:
      size = int.from_bytes(await self._reader.readexactly(_SIZE), "big")
      return pickle.loads(await self._reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
      return None

  async def flush(self) -> None:
    """Waits until the kernel has all of it."""
    with suppress(ConnectionError):  # the other end is closed
      await self._writer.drain()
