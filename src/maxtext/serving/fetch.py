"""Media that a request names by URL, fetched from the hosts that the server's owner allows, and from no others.

A host's addresses are looked up once, checked, and connected to, so that a name cannot change in between.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address
from urllib.parse import urljoin, urlsplit

import h11

from maxtext.configs import ConfigError

_PORTS = {"http": 80, "https": 443}
_NAT64, _UNICAST = IPv6Network("64:ff9b::/96"), IPv6Network("2000::/3")
_REDIRECTS = (301, 302, 303, 307, 308)
_LONGEST_URL, _LONGEST_HEADER = 4096, 2**14


@dataclass(frozen=True)
class FetchLimits:
  """Limits of fetching.

  Attributes:
    hosts: that may be asked, as HOST or HOST:PORT; without any, nothing is fetched. One that is an address may be
      private.
    bytes: of all media of a request.
    seconds: for them all, from the first connection to the last byte.
    redirects: of a URL, to hosts that are allowed as well.
    requests: whose media are in memory at once, fetched and not yet decoded.
  """

  hosts: tuple[str, ...] = ()
  bytes: int = 2**26
  seconds: float = 10.0
  redirects: int = 3
  requests: int = 4

  def __post_init__(self) -> None:
    for host in self.hosts:
      if host.lower() not in _Location.of(f"https://{host}", f"--allowed-media-host {host}").names:
        raise ConfigError(f"--allowed-media-host {host}: write HOST or HOST:PORT.")


class MediaFetcher:
  """Fetches media for the requests of one server."""

  def __init__(self, limits: FetchLimits) -> None:
    self._limits, self._hosts = limits, frozenset(host.lower() for host in limits.hosts)
    self._room = asyncio.Semaphore(limits.requests)

  def check(self, urls: Iterable[str]) -> None:
    """Raises `ConfigError` for a URL that may not be fetched."""
    for url in urls:
      self._location(url)

  @asynccontextmanager
  async def fetched(self, urls: Iterable[str]) -> AsyncIterator[Mapping[str, bytes]]:
    """The bytes behind each URL; while this context lasts, they count among those in memory."""
    wanted = list(dict.fromkeys(urls))
    if not wanted:
      yield {}
      return
    async with self._room:
      found, left = dict[str, bytes](), self._limits.bytes
      try:
        async with asyncio.timeout(self._limits.seconds):
          for url in wanted:
            found[url] = await self._fetch(url, left)
            left -= len(found[url])
      except TimeoutError:
        raise ConfigError(f"The media were not fetched within {self._limits.seconds:g} seconds.") from None
      yield found

  async def _fetch(self, url: str, most: int) -> bytes:
    for _ in range(self._limits.redirects + 1):
      location = self._location(url)
      try:
        found = await _get(location, await _connected(location), most)
      except (OSError, h11.RemoteProtocolError, UnicodeError):  # details would tell about the network here
        raise ConfigError(f"{_shown(url)}: the host does not answer as a web server does.") from None
      if isinstance(found, bytes):
        return found
      try:
        url = urljoin(url, found)
      except ValueError:
        raise ConfigError(f"{_shown(url)}: it is redirected to what is no URL.") from None
    raise ConfigError(f"{_shown(url)}: it is redirected more than {self._limits.redirects} times.")

  def _location(self, url: str) -> "_Location":
    if not self._hosts:
      raise ConfigError(
        f"{_shown(url)}: only data URLs (data:image/png;base64,...) are read; nothing is fetched from the network "
        f"unless the server's owner allows it (--allowed-media-host)."
      )
    found = _Location.of(url, _shown(url))
    if not self._hosts & found.names:
      raise ConfigError(f"{_shown(url)}: nothing is fetched from this host: it is not allowed (--allowed-media-host).")
    return found


@dataclass(frozen=True)
class _Location:
  """Where a URL points."""

  url: str
  secure: bool
  host: str
  port: int
  path: str

  @staticmethod
  def of(url: str, shown: str) -> "_Location":
    """Reads a URL; what it may be is narrow, since parsers do not agree about the rest."""
    try:
      parts = urlsplit(url)
      host, port = parts.hostname, parts.port
    except ValueError:
      host, port = None, None
    plain = len(url) <= _LONGEST_URL and url.isascii() and url.isprintable() and " " not in url and "\\" not in url
    if not plain or not host or parts.scheme not in _PORTS or "@" in parts.netloc or port == 0:
      raise ConfigError(
        f"{shown}: it must be an http or https URL of a host with or without a port, without a password."
      )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Location(url, parts.scheme == "https", host, port or _PORTS[parts.scheme], path)

  @property
  def names(self) -> set[str]:
    """How the host may be named where it is allowed: the port may be left out if it is the scheme's."""
    host = f"[{self.host}]" if ":" in self.host else self.host
    usual = self.port == _PORTS["https" if self.secure else "http"]
    return {f"{host}:{self.port}", *([host] if usual else [])}


async def _connected(location: _Location) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
  """A connection to one of the host's addresses, none of which may be private unless it was itself allowed."""
  loop = asyncio.get_running_loop()
  found = await loop.getaddrinfo(location.host, location.port, type=socket.SOCK_STREAM)
  addresses = [str(address) for *_, (address, *_) in found]
  if location.host not in addresses and any(map(_is_private, addresses)):
    raise ConfigError(
      f"{_shown(location.url)}: the host is in a private network, where only addresses themselves can be allowed."
    )
  context = ssl.create_default_context() if location.secure else None
  name = location.host if location.secure else None
  return await asyncio.open_connection(addresses[0], location.port, ssl=context, server_hostname=name)


async def _get(
  location: _Location, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], most: int
) -> bytes | str:
  """The body of the response, or where it redirects to."""
  reader, writer = streams
  http = h11.Connection(h11.CLIENT, _LONGEST_HEADER)
  head = [("Host", min(location.names, key=len)), ("Accept-Encoding", "identity"), ("Connection", "close")]
  try:
    for event in (h11.Request(method="GET", target=location.path, headers=head), h11.EndOfMessage()):
      writer.write(http.send(event) or b"")
    body = bytearray()
    while True:
      found = http.next_event()
      if found is h11.NEED_DATA:
        http.receive_data(await reader.read(2**16))
      elif isinstance(found, h11.Response):
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in found.headers}
        if found.status_code in _REDIRECTS and "location" in headers:
          return headers["location"]
        if found.status_code != 200 or headers.get("content-encoding", "identity") != "identity":
          raise ConfigError(f"{_shown(location.url)}: the host answers with status {found.status_code}, or compressed.")
        _check_size(location, int(headers.get("content-length", 0)), most)
      elif isinstance(found, h11.Data):
        body += found.data
        _check_size(location, len(body), most)
      elif isinstance(found, h11.EndOfMessage):
        return bytes(body)
      elif isinstance(found, h11.ConnectionClosed):
        raise OSError
  finally:
    writer.transport.abort()


def _check_size(location: _Location, size: int, most: int) -> None:
  if size > most:
    raise ConfigError(f"{_shown(location.url)}: it is larger than the {most:,} bytes that are left for this request.")


def _is_private(address: str) -> bool:
  """Whether an address, or that of IPv4 within it, is of no host of the internet."""
  found = ip_address(address)
  if isinstance(found, IPv6Address):
    within = ip_address(int(found) % 2**32) if found in _NAT64 else found.ipv4_mapped or found.sixtofour
    if within is None and found not in _UNICAST:
      return True
    found = within or found
  return not found.is_global or found.is_multicast


def _shown(url: str) -> str:
  return repr(url[:100])
