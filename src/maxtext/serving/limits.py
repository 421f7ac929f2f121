"""What one server takes, of all clients and of one."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ConnectionLimits:
  """What clients may do with connections.

  Attributes:
    total: connections at once; `per_address`: of one IPv4 address or IPv6 /64 network.
    head_seconds: from a connection, or the end of the last answer, to a whole header.
    body_seconds: from the header to the end of the body.
    write_seconds: in which a client must read some of what waits for it.
  """

  total: int = 1024
  per_address: int = 128
  head_seconds: float = 10.0
  body_seconds: float = 30.0
  write_seconds: float = 30.0


@dataclass(frozen=True)
class Limits:
  """What one server takes.

  Attributes:
    waiting: requests without a slot, beyond which others get a 429.
    waiting_per_client: the same for one API key, or for one address without keys; None is half of them, or all where
      there is one key.
    body: bytes of a request.
    seconds: for one request, from its arrival to its last token.
    grace: seconds that accepted requests have to end after SIGTERM.
    keys: of the API; without any, everyone may ask.
    connections: how many, and how slow.
  """

  waiting: int = 256
  waiting_per_client: int | None = None
  body: int = 2**20
  seconds: float = 600.0
  grace: float = 60.0
  keys: tuple[str, ...] = ()
  connections: ConnectionLimits = field(default_factory=ConnectionLimits)

  @property
  def share(self) -> int:
    """Requests of one client that may wait."""
    if self.waiting_per_client is not None:
      return min(self.waiting_per_client, self.waiting)
    return self.waiting if len(self.keys) == 1 else max(self.waiting // 2, 1)
