"""What clients do to a server that wants to stay up: bodies that are dear to read, and connections that only stay.

`BODIES` and `CONNECTIONS` are tables: an attack is a line in one of them, and the load test then makes it.
"""

import asyncio
import json
import socket
import struct
from contextlib import suppress

ADDRESS = "127.0.0.2"  # of the hostile clients; the honest ones have another, as elsewhere
MEGABYTE = 2**20 - 200


def completion(**fields):
  return json.dumps({"model": "cat", "prompt": "the", "max_tokens": 1} | fields).encode()


def chat(**fields):
  return json.dumps({"messages": [{"role": "user", "content": "the"}], "max_tokens": 1} | fields).encode()


TOOL = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "string", "pattern": "(a|b)*a" * 90}}}}}


def many(element, **fields):
  """A body of one megabyte, whose prompt is a list of the same element."""
  head = json.dumps({"model": "cat", "max_tokens": 1} | fields)[:-1]
  return f'{head}, "prompt": [{",".join([element] * (MEGABYTE // (len(element) + 1)))}]}}'.encode()


def schema(body):
  return completion(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": body}})


# {what it is: (path, body)}; any answer but 5xx will do
BODIES = {
  # forms of answers that take memory or time to compile
  "a multiple": ("/v1/completions", schema({"type": "integer", "multipleOf": 100000007})),
  "a long regex": ("/v1/completions", completion(structured_outputs={"regex": "(a|b)*a" + "(a|b)" * 11900})),
  "many states": ("/v1/completions", completion(structured_outputs={"regex": "(.*a.{18}){40}"})),
  # bodies that take long to parse, to count, to tokenise
  "prompts times n": ("/v1/completions", many('"a"', n=16)),
  "token lists": ("/v1/completions", many("[1]")),
  "empty lists": ("/v1/completions", many("[]")),
  "objects": ("/v1/completions", many("{}")),
  "fractions": ("/v1/completions", many("1.5")),
  "tokens": ("/v1/completions", many("1")),
  "stop texts": ("/v1/completions", completion(stop=["b"] * (MEGABYTE // 5))),
  "one stop text": ("/v1/completions", completion(stop="a" * MEGABYTE)),
  "unknown fields": ("/v1/completions", completion(**{f"{n:x}": 0 for n in range(MEGABYTE // 14)})),
  "white space": ("/v1/completions", completion(prompt=" " * MEGABYTE)),
  "letters": ("/v1/completions", completion(prompt="a" * MEGABYTE)),
  "turns": (
    "/v1/chat/completions",
    json.dumps({"model": "cat", "messages": [{"role": "user", "content": ""}] * (MEGABYTE // 33)}).encode(),
  ),
  "nesting": ("/v1/completions", b"[" * MEGABYTE),
  "biases": ("/v1/completions", completion(logit_bias={f"{n:>16}": 1 for n in range(30000)})),
  "tools": ("/v1/chat/completions", chat(tools=[{}] * 30000)),
  "tools that must be called": ("/v1/chat/completions", chat(tools=[TOOL] * 100, tool_choice="required")),
  "tokens of nothing": ("/detokenize", json.dumps({"tokens": [-1] * 60000}).encode()),
  "a text to tokenize": ("/tokenize", json.dumps({"prompt": " a" * (MEGABYTE // 2 - 9)}).encode()),
  "texts to embed": ("/v1/embeddings", json.dumps({"input": ["the"] * 60000}).encode()),
}


def request(path, body, key, head=""):
  lines = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n{head}"
  return f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body


async def connect(host, port, address=ADDRESS):
  return await asyncio.open_connection(host, port, local_addr=(address, 0))


async def post(host, port, path, body, key):
  """The status of the answer."""
  reader, writer = await connect(host, port)
  try:
    writer.write(request(path, body, key, "connection: close\r\n"))
    await writer.drain()
    return int((await reader.readline()).split()[1])
  finally:
    abort(writer)


def abort(writer):
  with suppress(OSError):  # it is closed already
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  writer.transport.abort()


async def slow_header(host, port, key, seconds):
  """A byte of a header now and then."""
  await _drip(await connect(host, port), b"POST /v1/completions HTTP/1.1\r\n" + b"x: y\r\n" * 900, seconds)


async def slow_body(host, port, key, seconds):
  """A whole header, and a body that does not come."""
  reader, writer = await connect(host, port)
  raw = request("/v1/completions", b"{" + b" " * 5000, key)
  writer.write(raw[:-5000])
  await _drip((reader, writer), raw[-5000:], seconds)


async def _drip(connection, data, seconds):
  """Until it is closed by the other side."""
  reader, writer = connection
  try:
    async with asyncio.timeout(seconds):
      closed = asyncio.ensure_future(reader.read())
      for place in range(len(data)):
        writer.write(data[place : place + 1])
        done, _ = await asyncio.wait([closed], timeout=0.2)
        if done:
          return
  except (TimeoutError, ConnectionError):
    pass
  finally:
    closed.cancel()
    abort(writer)


async def never_reads(host, port, key, seconds):
  """Asks for pages again and again on one connection, and takes none of them."""
  _, writer = await connect(host, port)
  sock = writer.get_extra_info("socket")
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
  writer.transport.pause_reading()
  ask = f"GET /openapi.json HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode()
  try:
    async with asyncio.timeout(seconds):
      while not writer.transport.is_closing():
        writer.write(ask * 20)
        await writer.drain()
        await asyncio.sleep(0.05)
  except (TimeoutError, ConnectionError):
    pass
  finally:
    abort(writer)


async def idle(host, port, key, seconds, count=300):
  """Hundreds of connections that say nothing."""
  writers = []
  try:
    async with asyncio.timeout(seconds):
      for _ in range(count):
        writers.append((await connect(host, port))[1])
      await asyncio.sleep(seconds)
  except (TimeoutError, OSError):
    pass
  finally:
    for writer in writers:
      abort(writer)


async def small_chunks(host, port, key, seconds):
  """A body of a megabyte in chunks of one byte."""
  reader, writer = await connect(host, port)
  head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
  writer.write(f"{head}authorization: Bearer {key}\r\n\r\n".encode() + b"1\r\n \r\n" * (MEGABYTE // 6))
  try:
    async with asyncio.timeout(seconds):
      await writer.drain()
      await reader.read()
  except (TimeoutError, ConnectionError):
    pass
  finally:
    abort(writer)


async def nonsense(host, port, key, seconds):
  """Lines that are no HTTP, each of which a server could write a warning about."""
  for _ in range(50):
    reader, writer = await connect(host, port)
    writer.write(b"\0" * 100 + b"\r\n\r\n")
    try:
      await asyncio.wait_for(reader.read(), seconds)
    except (TimeoutError, ConnectionError):
      pass
    finally:
      abort(writer)


CONNECTIONS = (slow_header, slow_body, never_reads, idle, small_chunks, nonsense)
