"""Whether the hosts of an elastic run reach each other: the folder where they meet may be there without their network.

Every agent has a port at which nothing is said, and tries that of the host that coordinates the run. Imports no JAX.
"""

import socket
import threading
import time
from contextlib import suppress

CUT_SECONDS = 15.0
"""Without a connection, after which a host is cut off from another: shorter interruptions pass."""
_EVERY_SECONDS = 1.0
_CONNECT_SECONDS = 2.0


class Door:
  """A port of this host at which others see that they reach it.

  Attributes:
    address: where it is; empty where this host cannot listen at its own address.
  """

  def __init__(self, host: str) -> None:
    self.address = ""
    self._socket: socket.socket | None = None
    with suppress(OSError):
      name = host.strip("[]")
      family, _, _, _, where = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
      self._socket = socket.create_server(where[:2], family=family)
      self._socket.setblocking(False)
      self.address = f"{host}:{self._socket.getsockname()[1]}"

  def answer(self) -> None:
    """Takes the connections of others and closes them; the system has accepted them before."""
    with suppress(OSError):
      while self._socket is not None:
        self._socket.accept()[0].close()

  def close(self) -> None:
    if self._socket is not None:
      self._socket.close()


class Reach:
  """Tries to reach one host, again and again, in a thread of its own."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._target = "", ""
    self._reached, self._failing = False, 0.0  # by the last attempt; seconds of attempts since one did
    threading.Thread(target=self._try, name="reach", daemon=True).start()

  def look_at(self, name: str, address: str) -> None:
    """Whom to reach from now on; nobody where the address is empty."""
    with self._lock:
      if (name, address) != self._target:
        self._target, self._reached, self._failing = (name, address), False, 0.0

  @property
  def reached(self) -> str:
    """The name of the host, if the last attempt has reached it."""
    with self._lock:
      return self._target[0] if self._reached else ""

  @property
  def cut_from(self) -> str:
    """The name of the host, if no attempt has reached it for so long."""
    with self._lock:
      return self._target[0] if self._failing > CUT_SECONDS else ""

  def _try(self) -> None:
    while True:
      target, began = self._target, time.monotonic()
      reached = bool(target[1]) and _connects(target[1])
      time.sleep(_EVERY_SECONDS)
      # What took longer was a pause of this machine, and no attempt.
      took = min(time.monotonic() - began, _CONNECT_SECONDS + _EVERY_SECONDS)
      with self._lock:
        if target == self._target and target[1]:
          self._reached, self._failing = reached, 0.0 if reached else self._failing + took


def _connects(address: str) -> bool:
  host, _, port = address.rpartition(":")
  with suppress(OSError, ValueError):
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    return True
  return False
