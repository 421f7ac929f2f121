"""A rendezvous before JAX starts, to name missing processes: JAX's own timeout does not say which they are.

Process 0 listens at the coordinator's address. The others send their index there and wait. When all have connected, or
at the time limit, process 0 sends them the list of missing processes and leaves the address to JAX. Imports no JAX.
"""

import json
import socket
import time


def missing_processes(address: str, count: int, index: int, seconds: float) -> list[int]:
  """Waits for all processes of a run; returns the indices of those that did not connect."""
  host, _, port = address.rpartition(":")
  where = host, int(port)
  deadline = time.monotonic() + seconds
  return _wait_for_others(where, count, deadline) if index == 0 else _report_to_first(where, index, deadline)


def _wait_for_others(where: tuple[str, int], count: int, deadline: float) -> list[int]:
  present: dict[int, socket.socket] = {}
  with socket.create_server(where, backlog=count) as server:
    while len(present) < count - 1 and (left := deadline - time.monotonic()) > 0:
      server.settimeout(left)
      try:
        connection, _ = server.accept()
        present[int(_receive_line(connection, deadline))] = connection
      except (TimeoutError, ValueError):
        continue
    missing = sorted(set(range(1, count)) - present.keys())
    for connection in present.values():
      with connection:
        connection.sendall(json.dumps(missing).encode() + b"\n")
        connection.settimeout(5)
        connection.recv(1)  # the other side closes first, so that the port here is free at once
  return missing


def _report_to_first(where: tuple[str, int], index: int, deadline: float) -> list[int]:
  while (left := deadline - time.monotonic()) > 0:
    try:
      with socket.create_connection(where, timeout=left) as connection:
        connection.sendall(f"{index}\n".encode())
        # Process 0 stops at its own deadline, which may be a little later than this one.
        return json.loads(_receive_line(connection, deadline + 30))
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
