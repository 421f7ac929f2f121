"""Times `/health` of a server from a process of its own, and beside it an idle server on the same machine.

`python health_probe.py HOST PORT` until its input ends; then prints JSON: seconds of both, in pairs.
"""

import asyncio
import json
import socket
import sys
import threading
import time

PERIOD = 0.05
REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"


def serve_nothing(listening):
  """A server that has nothing else to do: what it takes is the machine's own time."""

  async def reply(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(REPLY)
    await writer.drain()
    writer.close()

  async def serve():
    async with await asyncio.start_server(reply, sock=listening) as server:
      await server.serve_forever()

  asyncio.run(serve())


def ask(host, port):
  """Seconds, and the status."""
  start = time.perf_counter()
  with socket.create_connection((host, port), timeout=20) as connection:
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    status = connection.recv(4096).split(b" ", 2)[1]
    return time.perf_counter() - start, int(status)


def main(host, port):
  listening = socket.create_server(("127.0.0.1", 0))
  threading.Thread(target=serve_nothing, args=(listening,), daemon=True).start()
  over, found = threading.Event(), []
  threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
  while not over.wait(PERIOD):
    found.append([*ask(host, port), ask(*listening.getsockname())[0]])
  print(json.dumps(found))


if __name__ == "__main__":
  main(sys.argv[1], int(sys.argv[2]))
