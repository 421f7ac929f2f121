"""A roll call before JAX starts: JAX ends a process that waits in vain without saying who is missing.

Process 0 listens at the coordinator's address, the others report their number there and wait. When all have come, or
time is up, process 0 tells them who is missing and leaves the address to JAX. It imports no JAX.
"""

import json
import socket
import time


def missing_processes(address: str, count: int, index: int, seconds: float) -> list[int]:
  """Waits for all processes of a run; returns the numbers of those that did not come."""
  host, _, port = address.rpartition(":")
  where = host, int(port)
  deadline = time.monotonic() + seconds
  return _call(where, count, deadline) if index == 0 else _answer(where, index, deadline)


def _call(where: tuple[str, int], count: int, deadline: float) -> list[int]:
  present: dict[int, socket.socket] = {}
  with socket.create_server(where, backlog=count) as server:
    while len(present) < count - 1 and (left := deadline - time.monotonic()) > 0:
      server.settimeout(left)
      try:
        connection, _ = server.accept()
        present[int(_line(connection, deadline))] = connection
      except (TimeoutError, ValueError):
        continue
    missing = sorted(set(range(1, count)) - present.keys())
    for connection in present.values():
      with connection:
        connection.sendall(json.dumps(missing).encode() + b"\n")
        connection.settimeout(5)
        connection.recv(1)  # the other side closes first, so that this side's port is free at once
  return missing


def _answer(where: tuple[str, int], index: int, deadline: float) -> list[int]:
  while (left := deadline - time.monotonic()) > 0:
    try:
      with socket.create_connection(where, timeout=left) as connection:
        connection.sendall(f"{index}\n".encode())
        # The caller stops at its own deadline, which may be a little later than this one.
        return json.loads(_line(connection, deadline + 30))
    except (OSError, ValueError):
      time.sleep(0.05)
  return [0]


def _line(connection: socket.socket, deadline: float) -> str:
  text = b""
  while not text.endswith(b"\n"):
    connection.settimeout(max(deadline - time.monotonic(), 0.1))
    piece = connection.recv(4096)
    if not piece:
      raise ValueError("the other side left")
    text += piece
  return text.decode()
