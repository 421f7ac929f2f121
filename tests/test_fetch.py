"""Media behind URLs: from hosts that are allowed, of public addresses, within limits; from real servers on loopback."""

import asyncio
import json
import socket
import tracemalloc
from contextlib import asynccontextmanager

import pytest

from maxtext import ConfigError
from maxtext.serving.fetch import FetchLimits, MediaFetcher

BODY = b"what is fetched" * 1000


def response(body=BODY, status="200 OK", **headers):
  given = {"content-length": len(body)} | {name.replace("_", "-"): value for name, value in headers.items()}
  lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in given.items() if value is not None)]
  return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(to):
  return response(b"", "302 Found", location=to)


async def drip(writer):
  """One byte of a header at a time, without an end."""
  writer.write(b"HTTP/1.1 200 OK\r\nx: ")
  while not writer.is_closing():
    writer.write(b"x")
    await asyncio.sleep(0.01)


async def flood(writer):
  """A body that never ends, in chunks, without a length."""
  writer.write(response(b"", content_length=None, transfer_encoding="chunked"))
  while not writer.is_closing():
    writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
    await asyncio.sleep(0)


PAGES = {
  "/good": response(),
  "/moved": redirect("/good"),
  "/loop": redirect("/loop"),
  "/inside": redirect("http://169.254.169.254/latest/meta-data"),
  "/local": redirect("file:///etc/passwd"),
  "/unreadable": redirect("http://[nonsense/"),
  "/large": response(content_length=1 << 40),
  "/short": response(content_length=len(BODY) + 1),
  "/zipped": response(content_encoding="gzip"),
  "/missing": response(status="404 Not Found"),
  "/nonsense": b"SSH-2.0-OpenSSH\r\n",
  "/silent": b"",
  "/headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 10000,
  "/drip": drip,
  "/flood": flood,
}


@asynccontextmanager
async def server():
  """What answers with the pages, and what it was asked."""
  seen = []

  async def answer(reader, writer):
    seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
    page = PAGES[seen[-1].split()[1]]
    try:
      if callable(page):
        await page(writer)
      else:
        writer.write(page)
      await writer.drain()
    except ConnectionError:
      pass
    finally:
      writer.close()

  async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
    yield listening.sockets[0].getsockname()[1], seen


def fetched(*paths, host="127.0.0.1", allowed=("127.0.0.1",), **limits):
  """What the server's pages are, and what it was asked."""

  async def run():
    async with server() as (port, seen):
      fetcher = MediaFetcher(FetchLimits(tuple(f"{name}:{port}" for name in allowed), **limits))
      async with fetcher.fetched([f"http://{host}:{port}{path}" for path in paths]) as found:
        return list(found.values()), seen

  return asyncio.run(run())


def test_what_is_allowed_is_fetched_once_and_redirected():
  found, seen = fetched("/good", "/moved", "/good")
  assert found == [BODY, BODY]
  assert [one.split()[1] for one in seen] == ["/good", "/moved", "/good"]
  assert "host: 127.0.0.1:" in seen[0].lower()


@pytest.mark.parametrize(
  ("path", "said"),
  [
    ("/loop", "redirected more than 3 times"), ("/inside", "it is not allowed"), ("/local", "an http or https URL"),
    ("/unreadable", "to what is no URL"),
    ("/large", "larger than the 65,536 bytes"), ("/flood", "larger than the 65,536 bytes"),
    ("/short", "does not answer as"), ("/zipped", "or compressed"), ("/missing", "status 404"),
    ("/nonsense", "does not answer as"), ("/silent", "does not answer as"), ("/headers", "does not answer as"),
    ("/drip", "within 0.5 seconds"),
  ],
)  # fmt: skip
def test_hostile_servers_end_within_the_limits(path, said):
  tracemalloc.start()
  try:
    with pytest.raises(ConfigError, match=said):
      fetched(path, bytes=65_536, seconds=0.5 if path == "/drip" else 60)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
  finally:
    tracemalloc.stop()


def test_the_media_of_a_request_share_its_limit_of_bytes():
  assert len(fetched("/good", "/moved", bytes=2 * len(BODY))[0]) == 2
  with pytest.raises(ConfigError, match="that are left"):
    fetched("/good", "/moved", bytes=2 * len(BODY) - 1)


@pytest.mark.parametrize(
  "url",
  [
    "ftp://a.example/x", "//a.example/x", "/etc/passwd", "http://", "http://user:word@a.example/", "http://a.example:0/",
    "http://a.example:99999/", "http://a.example/\r\nx: y", "http://a.example\\@b.example/", "http://ä.example/",
    "http://a.example/" + "a" * 5000, "http://b.example/", "http://a.example:8080/", "http://a.example.b.example/",
    "http://[::1]/", "http://[nonsense/", "http://0x7f.1/", "javascript:alert(1)",
  ],
)  # fmt: skip
def test_urls_beside_the_allowed_hosts_are_refused(url):
  with pytest.raises(ConfigError, match=r"not allowed|must be an http"):
    MediaFetcher(FetchLimits(("a.example",))).check([url])


def test_a_host_is_allowed_with_its_port():
  MediaFetcher(FetchLimits(("a.example",))).check(["http://A.example/x", "https://a.example:443/x?y=z"])
  fetcher = MediaFetcher(FetchLimits(("a.example:8080", "[2001:db8::1]")))
  fetcher.check(["http://a.example:8080/", "http://[2001:db8::1]/"])
  with pytest.raises(ConfigError, match="not allowed"):
    fetcher.check(["http://a.example/"])
  with pytest.raises(ConfigError, match="nothing is fetched from the network"):
    MediaFetcher(FetchLimits()).check(["http://a.example/"])
  for wrong in ("https://a.example", "a.example:x", "", "user@a.example", "a.example/path?"):
    with pytest.raises(ConfigError, match="--allowed-media-host"):
      FetchLimits((wrong,))


def test_a_name_of_this_machine_is_refused_though_it_is_allowed():
  with pytest.raises(ConfigError, match="private network"):
    fetched("/good", host="localhost", allowed=("localhost",))


@pytest.mark.parametrize(
  "address",
  ["10.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fd00::1", "::ffff:127.0.0.1",
   "2002:7f00:1::", "fe80::1", "64:ff9b::a00:1", "64:ff9b:1::808:808", "::127.0.0.1", "::ffff:0:127.0.0.1",
   "fec0::1"],
)  # fmt: skip
def test_names_of_private_addresses_are_refused(address, monkeypatch):
  """Also where a public address is beside it."""

  async def run():
    async def resolved(*_, **__):
      return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 80)) for one in ("93.184.215.14", address)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    async with MediaFetcher(FetchLimits(("a.example",))).fetched(["http://a.example/x"]):
      raise AssertionError("nothing is there")

  with pytest.raises(ConfigError, match="private network"):
    asyncio.run(run())


def test_requests_beyond_those_in_memory_wait():
  async def run():
    async with server() as (port, seen):
      fetcher, url = MediaFetcher(FetchLimits((f"127.0.0.1:{port}",), requests=1)), f"http://127.0.0.1:{port}/good"
      async with fetcher.fetched([url]):
        second = asyncio.create_task(fetcher.fetched([url]).__aenter__())
        await asyncio.sleep(0.05)
        assert len(seen) == 1
      assert json.dumps(list(await second)) == json.dumps([url])

  asyncio.run(run())
