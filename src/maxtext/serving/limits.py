"""Limits of the server, for all clients together and for each one."""

from dataclasses import dataclass, field

from maxtext.serving.fetch import FetchLimits


@dataclass(frozen=True)
class ConnectionLimits:
  """Limits of connections.

  Attributes:
    total: open connections.
    per_address: open connections of one IPv4 address or IPv6 /64 network.
    header_seconds: time to send a whole header, from the connection or the end of the last response.
    body_seconds: time to send the body after the header.
    write_seconds: time in which a client must read some of a pending response.
  """

  total: int = 1024
  per_address: int = 128
  header_seconds: float = 10.0
  body_seconds: float = 30.0
  write_seconds: float = 30.0


@dataclass(frozen=True)
class ServerLimits:
  """Limits of one server.

  Attributes:
    max_queued_requests: length of the request queue; requests beyond it get a 429.
    max_queued_requests_per_client: the same for one API key, or one address without keys; None is half of the queue,
      or all of it with a single key.
    max_body_bytes: size of a request body.
    request_timeout: seconds from the arrival of a request to its last token.
    shutdown_timeout: seconds that accepted requests have to finish after SIGTERM.
    api_keys: valid API keys; without any, every client is accepted.
    lora_root: folder below which clients may load LoRA adapters; None lets them load and unload none.
    connections: limits of connections.
    fetch: limits of media that requests name by URL.
  """

  max_queued_requests: int = 256
  max_queued_requests_per_client: int | None = None
  max_body_bytes: int = 2**20
  request_timeout: float = 600.0
  shutdown_timeout: float = 60.0
  api_keys: tuple[str, ...] = ()
  lora_root: str | None = None
  connections: ConnectionLimits = field(default_factory=ConnectionLimits)
  fetch: FetchLimits = field(default_factory=FetchLimits)

  @property
  def queue_share(self) -> int:
    """Queued requests that one client may have."""
    if self.max_queued_requests_per_client is not None:
      return min(self.max_queued_requests_per_client, self.max_queued_requests)
    return self.max_queued_requests if len(self.api_keys) == 1 else max(self.max_queued_requests // 2, 1)
