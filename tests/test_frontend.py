"""The process in front of the engine's: real connections to a real server, whose model takes for ever to load."""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from maxtext.cli import serve as command
from maxtext.configs import ConfigError
from maxtext.serving import frontend
from maxtext.serving.api_keys import is_loopback, read_api_keys
from maxtext.serving.limits import ServerLimits
from tests.flags import flags
from tests.test_serving import wait_until

SERVE = """
import sys, time
from functools import partial
from maxtext.configs.errors import RunError
from maxtext.logs import setup_logging
from maxtext.serving.frontend import serve
from maxtext.serving.limits import ConnectionLimits, ServerLimits
setup_logging()
load = partial(time.sleep, 600)
if len(sys.argv) > 1:
  from tests.inference_support import broken_model  # which imports JAX, as nothing else does here
  load = partial(broken_model, sys.argv[1])
connections = ConnectionLimits(total=40, per_address=20, header_seconds=1, body_seconds=1, write_seconds=1)
try:
  limits = ServerLimits(api_keys=("secret",), max_body_bytes=10000, shutdown_timeout=5, connections=connections)
  serve(load, "tiny", "127.0.0.1", 0, limits)
except RunError as error:
  sys.exit(f"maxtext: {error}")
"""


@contextlib.contextmanager
def started(*words):
  """The process and its port."""
  root = Path(__file__).parent.parent
  environment = os.environ | flags() | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
  process = subprocess.Popen(
    [sys.executable, "-c", SERVE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
  )
  try:
    yield process, int(re.search(r"listening on http://127.0.0.1:(\d+);", process.stderr.readline())[1])
  finally:
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def port():
  with started() as (_, port):
    yield port


def children(process):
  return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def ask(port, path, method="GET", body=None, key="secret", address="127.0.0.1"):
  """The status, the body and the headers of an answer."""
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(address, 0))
  with contextlib.closing(connection):
    connection.request(method, path, body, {"authorization": f"Bearer {key}", "content-type": "application/json"})
    reply = connection.getresponse()
    return reply.status, reply.read(), reply.headers


def connect(port, address="127.0.0.2"):
  return socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(address, 0))


def seconds_until_closed(connection):
  start = time.monotonic()
  with contextlib.suppress(ConnectionError):
    while connection.recv(65536):
      pass
  return time.monotonic() - start


def test_it_listens_while_the_model_is_loaded(port):
  status, body, headers = ask(port, "/health", key="")
  assert (status, headers["retry-after"]) == (503, "5")
  assert json.loads(body) == {"status": "starting", "busy": False, "seconds_since_last_step": None}
  status, body, headers = ask(port, "/v1/completions", "POST", "{}")
  assert (status, headers["retry-after"]) == (503, "5")
  assert "is loading" in json.loads(body)["error"]["message"]


def test_only_reading_tells_of_health(port):
  """A CONNECT that is granted would be no HTTP any more."""
  for method in ("CONNECT", "POST"):
    status, _, headers = ask(port, "/health", method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")
  assert ask(port, "/health", "HEAD")[0] == 503


@pytest.mark.parametrize("path", ["/openapi.json", "/metrics", "/v1/models", "/v1/completions", "/nowhere"])
def test_a_key_comes_before_everything(port, path):
  """The body was only announced: whoever waits for it would not answer."""
  with connect(port) as connection:
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n".encode())
    assert b" 401 " in connection.recv(65536)
  assert ask(port, path, key="secre")[0] == 401
  assert ask(port, path)[0] == 503


def test_who_sends_slowly_is_closed(port):
  head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
  for sent in (b"", head, b"\r\n"):  # nothing, half of a header
    with connect(port) as connection:
      connection.sendall(sent)
      assert seconds_until_closed(connection) < 10
  with connect(port) as connection:  # an error that clients can read
    connection.sendall(head)
    status, _, body = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(body)["error"]["message"] == "The request took too long to arrive."
  with connect(port) as connection:  # a byte at a time does not help
    connection.settimeout(0.2)
    start, closed = time.monotonic(), False
    while not closed and time.monotonic() - start < 20:
      with contextlib.suppress(TimeoutError):
        try:
          connection.sendall(b"a")
          closed = bool(connection.recv(100))
        except ConnectionError:
          closed = True
    assert closed


def test_who_does_not_read_is_dropped(port):
  with connect(port) as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(1)
    ask_for = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 100
    end = time.monotonic() + 240  # a busy machine takes long to fill the buffers between
    dropped = False
    while not dropped and time.monotonic() < end:
      try:
        connection.sendall(ask_for)
      except TimeoutError:
        continue
      except ConnectionError:
        dropped = True
    assert dropped
  assert ask(port, "/health")[0] == 503


def test_idle_connections_make_room(port):
  """More than there may be of one address, and of all: others are answered, from the same address too."""
  with contextlib.ExitStack() as stack:
    for host in (2, 3, 4):
      for _ in range(30):
        stack.enter_context(connect(port, f"127.0.0.{host}"))
    time.sleep(0.6)  # for so long a connection may be silent
    start = time.monotonic()
    assert ask(port, "/health", address="127.0.0.2")[0] == 503
    assert ask(port, "/health")[0] == 503
    assert time.monotonic() - start < 5


def test_a_client_has_so_many_requests_in_the_engine(monkeypatch):
  """Those that it left are among them until the engine has ended them; another client is not concerned."""
  limits = ServerLimits(max_queued_requests=4, api_keys=("one", "two"))
  spawn = Mock()
  monkeypatch.setattr(frontend.multiprocessing, "get_context", lambda kind: spawn)
  engine = frontend.EngineClient(None, "tiny", limits)
  told = spawn.Process.call_args.kwargs["args"][-1]
  assert (told.api_keys, told.queue_share) == ((), limits.queue_share)
  sent, replies = [], asyncio.Queue()
  channel = SimpleNamespace(send=lambda *message: sent.append(message), receive=replies.get)
  monkeypatch.setattr(frontend.Channel, "of", AsyncMock(return_value=channel))

  def asked(client):
    return {
      "type": "http",
      "path": "/v1/models",
      "method": "GET",
      "headers": [],
      "state": {"client": client, "abort": print},
    }

  async def leave():
    listening = asyncio.create_task(engine.listen(lambda: None, lambda: None))
    replies.put_nowait(("state", "ok", False, None, 3))
    await asyncio.sleep(0.01)
    taken, parts = 0, []
    while not engine.is_full(0):
      taken += 1
      with engine.request(asked(0), b""):
        pass
    assert taken == 3 + 2 + 64  # slots, its share, and some
    assert not engine.is_full(1)
    await frontend.Frontend(engine, limits, chat_page=False)(asked(0), AsyncMock(), AsyncMock(side_effect=parts.append))
    assert parts[0]["status"] == 429
    replies.put_nowait(("reply", 0, None))
    await asyncio.sleep(0.01)
    assert not engine.is_full(0)
    listening.cancel()

  asyncio.run(leave())
  assert sent[0][2]["state"] == {"client": 0}, "what is pickled"


def test_an_answer_that_nobody_reads_is_given_up():
  """A single message may be long; what comes after so much is not kept."""

  async def put():
    aborted = []
    reply = frontend._Reply(lambda: aborted.append(True))
    piece = {"type": "http.response.body", "body": b"a" * 2**20, "more_body": True}
    for _ in range(9):
      reply.put_nowait(piece)
    assert (reply.qsize(), aborted) == (9, [])
    reply.put_nowait(piece)
    assert (await reply.get(), reply.empty(), aborted) == (None, True, [True])
    for message in ({"body": b"a" * 2**24}, None):  # a whole answer, and its end
      reply.put_nowait(message)
    assert (reply.qsize(), aborted) == (2, [True])

  asyncio.run(put())


def test_small_chunks_are_refused(port):
  head = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\ntransfer-encoding: chunked\r\n\r\n"
  )
  with connect(port) as connection:
    connection.sendall(head + b"1\r\n \r\n" * 200)
    assert b" 400 " in connection.recv(65536) or b" 503 " in connection.recv(65536)


def test_warnings_that_clients_cause_do_not_stop_it(port):
  """Nobody reads what this server writes to its standard error, and a pipe holds 64 KiB."""
  for _ in range(1500):
    with contextlib.suppress(ConnectionError), connect(port) as connection:
      connection.sendall(b"\0\r\n\r\n")
      connection.recv(100)
  assert ask(port, "/health")[0] == 503


def test_the_engine_is_killed_and_the_front_ends():
  with started() as (process, port):
    assert ask(port, "/health")[0] == 503
    os.kill(children(process)[-1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
  assert process.returncode == 1
  assert "maxtext: the engine process ended with code -9." in said


def test_told_to_end_while_it_loads_and_killed():
  """It ends at once, with the engine's process; and that ends where nobody is there to tell it."""
  for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
    with started() as (process, port):
      assert ask(port, "/health")[0] == 503
      there = children(process)
      assert there
      process.send_signal(number)
      assert process.wait(timeout=60) == code
      wait_until(lambda there=there: not any(Path(f"/proc/{pid}/exe").exists() for pid in there))


@pytest.mark.slow
def test_an_engine_that_fails_ends_the_server(tmp_path):
  """Whoever waits is told, and an orchestrator sees the exit code."""
  with started(str(tmp_path)) as (process, port):
    end = time.monotonic() + 300  # a model is made first
    while ask(port, "/health")[0] != 200:
      assert time.monotonic() < end
      time.sleep(0.1)
    status, body, _ = ask(port, "/v1/completions", "POST", json.dumps({"model": "tiny", "prompt": "a"}))
    assert (status, "The engine has failed" in json.loads(body)["error"]["message"]) == (503, True)
    _, said = process.communicate(timeout=60)
  assert process.returncode == 1
  assert "maxtext: the engine has failed: " in said


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "contains no key"),
    (",", "contains no key"),
    ("k3y,,two", "key 2 of 3 is empty"),
    ("k3y, two", "key 2 of 2 has characters other than visible ASCII"),
    ("k3y\n", "key 1 of 1 has characters other than visible ASCII"),
    ("schl\u00fcssel", "key 1 of 1 has characters other than visible ASCII"),
    ("k3y,k3y", "contains a key twice"),
  ],
)
def test_keys_that_are_none(text, message):
  with pytest.raises(ConfigError, match=message) as refused:
    read_api_keys({"MAXTEXT_API_KEYS": text}, None)
  assert "k3y" not in str(refused.value), "no key in a message"


@pytest.mark.parametrize(
  "word", ["--request-timeout=0", "--shutdown-timeout=inf", "--header-timeout=nan", "--write-timeout=-1"]
)
def test_seconds_that_are_none(word, monkeypatch):
  monkeypatch.setattr(command, "resolve_model_config", lambda *_: None)
  parser = argparse.ArgumentParser()
  command.add_command(parser.add_subparsers())
  arguments = parser.parse_args(["serve", word])
  with pytest.raises(ConfigError, match=f"{word.partition('=')[0]} .*: it must be more than 0 and finite"):
    arguments.run(arguments)


def test_where_keys_come_from(tmp_path):
  file = tmp_path / "keys"
  file.write_text("one\ntwo\n")
  assert read_api_keys({}, None) == ()
  assert read_api_keys({"MAXTEXT_API_KEYS": "one,two"}, None) == read_api_keys({}, str(file)) == ("one", "two")
  with pytest.raises(ConfigError, match="both give API keys"):
    read_api_keys({"MAXTEXT_API_KEYS": "one"}, str(file))
  file.write_text("\n")
  for name, message in (("keys", "contains no key"), ("none", "cannot be read: No such file")):
    with pytest.raises(ConfigError, match=message):
      read_api_keys({}, str(tmp_path / name))
  assert [is_loopback(host) for host in ("127.0.0.5", "::1", "localhost", "0.0.0.0", "", "example.org")] == [
    True, True, True, False, False, False
  ]  # fmt: skip
