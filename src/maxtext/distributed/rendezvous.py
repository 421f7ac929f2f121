"""A rendezvous before JAX starts, to name missing processes: JAX's own timeout does not say which they are.

Process 0 listens at the coordinator's address. The others send their index there and wait. When all have connected, or
at the time limit, process 0 sends them the list of missing processes and leaves the address to JAX. Imports no JAX.
"""

import json
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from typing import cast

_ANSWER_SECONDS = 5.0
_LATER_SECONDS = 30.0  # that process 0 may have begun to wait after another one
_LONGEST = 20  # bytes of a process's index


def missing_processes(address: str, count: int, index: int, seconds: float) -> list[int]:
  """Waits for all processes of a run; returns the indices of those that did not connect."""
  host, _, port = address.rpartition(":")
  where = host, int(port)
  deadline = time.monotonic() + seconds
  return _wait_for_others(where, count, deadline) if index == 0 else _report_to_first(where, index, deadline)


def _wait_for_others(where: tuple[str, int], count: int, deadline: float) -> list[int]:
  present: dict[int, socket.socket] = {}
  with ExitStack() as closing:
    server = closing.enter_context(socket.create_server(where, backlog=count))
    selector = closing.enter_context(selectors.DefaultSelector())
    selector.register(server, selectors.EVENT_READ)
    texts: dict[socket.socket, bytes] = {}
    while len(present) < count - 1 and (left := deadline - time.monotonic()) > 0:
      for key, _ in selector.select(left):
        if key.fileobj is server:
          connection = closing.enter_context(server.accept()[0])
          connection.setblocking(False)  # one that says nothing, such as a half-open one, keeps nobody waiting
          selector.register(connection, selectors.EVENT_READ)
          texts[connection] = b""
          continue
        connection = cast("socket.socket", key.fileobj)
        texts[connection] += (received := _receive(connection))
        index = _index_of(texts[connection], count)
        if received and index is not None:
          present[index] = connection
        elif not received or len(texts[connection]) > _LONGEST:  # a stranger, or a process that has ended
          selector.unregister(connection)
          connection.close()
          present = {index: other for index, other in present.items() if other is not connection}
    missing = sorted(set(range(1, count)) - present.keys())
    for connection in present.values():
      _answer(connection, missing)
  return missing


def _receive(connection: socket.socket) -> bytes:
  try:
    return connection.recv(4096)
  except OSError:
    return b""


def _index_of(text: bytes, count: int) -> int | None:
  """The process that says so; None for a stranger."""
  number = text.removesuffix(b"\n")
  return int(number) if number.isdigit() and text != number and 0 < int(number) < count else None


def _answer(connection: socket.socket, missing: list[int]) -> None:
  with suppress(OSError):  # one that has ended since is found by JAX
    connection.settimeout(_ANSWER_SECONDS)
    connection.sendall(json.dumps(missing).encode() + b"\n")
    connection.recv(1)  # the other side closes first, so that the port here is free at once


def _report_to_first(where: tuple[str, int], index: int, deadline: float) -> list[int]:
  while (left := deadline - time.monotonic()) > 0:
    try:
      with socket.create_connection(where, timeout=min(left, _ANSWER_SECONDS)) as connection:
        connection.sendall(f"{index}\n".encode())
        return json.loads(_receive_line(connection, deadline + _LATER_SECONDS))
    except (OSError, ValueError):
      time.sleep(0.05)
  return [0]


def _receive_line(connection: socket.socket, deadline: float) -> str:
  text = b""
  while not text.endswith(b"\n"):
    connection.settimeout(max(deadline - time.monotonic(), 0.1))
    received = connection.recv(4096)
    if not received:
      raise ValueError("the connection was closed")
    text += received
  return text.decode()
