"""Messages between the frontend process and the engine process, over a pair of connected sockets.

One process started the other, so both ends are trusted and messages are pickled.
"""

import asyncio
import pickle
import socket
from contextlib import suppress
from typing import Any

_SIZE = 8  # bytes of the length in front of a message


class Channel:
  """One end of the connection."""

  def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    self._reader, self._writer = reader, writer

  @staticmethod
  async def of(end: socket.socket) -> "Channel":
    """A channel over a connected socket, in the running event loop."""
    reader, writer = await asyncio.open_connection(sock=end)
    writer.transport.set_write_buffer_limits(high=0)  # so that `flush` waits for all of it
    return Channel(reader, writer)

  def send(self, *message: Any) -> None:
    """Sends a message without waiting; what the other end has not read yet is buffered."""
    data = pickle.dumps(message)
    self._writer.write(len(data).to_bytes(_SIZE, "big") + data)

  async def receive(self) -> tuple[Any, ...] | None:
    """The next message; None if the other end is closed."""
    try:
      size = int.from_bytes(await self._reader.readexactly(_SIZE), "big")
      return pickle.loads(await self._reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
      return None

  async def flush(self) -> None:
    """Waits until the kernel has taken all messages."""
    with suppress(ConnectionError):  # the other end is closed
      await self._writer.drain()
