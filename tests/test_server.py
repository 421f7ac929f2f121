"""What a server does that clients of a real process cannot time: one leaves at a given moment, or the engine fails."""

import asyncio
import json
import queue
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext.configs import ConfigError
from maxtext.inference.detokenizer import IncrementalDetokenizer
from maxtext.inference.sampling import SamplingParams
from maxtext.inference.scheduler import TokenOutput
from maxtext.serving.engine_process import _RequestDispatcher
from maxtext.serving.engine_thread import EngineFailedError, QueueFullError
from maxtext.serving.limits import ServerLimits
from maxtext.serving.protocol import ChatCompletionRequest, CompletionRequest, RequestLimits, count_values, parse
from maxtext.serving.server import make_app
from tests import hostile
from tests.inference_support import answering, ask, random_model


@pytest.fixture
def served(tmp_path):
  """A model, its worker and the app in front of it."""
  loaded = random_model(tmp_path)
  with answering(loaded) as (worker, app):
    yield loaded, worker, app


def test_who_leaves_before_a_stream_begins_keeps_no_slot(served):
  _, worker, app = served

  async def leave():
    leaving = asyncio.Event()

    async def stuck(message):
      leaving.set()
      await asyncio.Event().wait()  # a connection that takes nothing any more

    asked = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 90, "n": 2, "temperature": 0}
    async with asyncio.timeout(60):
      await ask(app, "/v1/completions", asked, stuck, leaves=leaving.wait)
      while worker.busy:
        await asyncio.sleep(0.01)
    return await ask(app, "/metrics")

  assert 'maxtext_requests_total{finish_reason="client_disconnected"} 2.0' in asyncio.run(leave())[1]


def test_reading_a_request_is_part_of_its_time(served, monkeypatch):
  """What waits for a thread is not begun for a client that has left."""
  _, worker, app = served
  begun, let_go = [], threading.Event()

  def slow(*arguments):
    begun.append(arguments)
    let_go.wait(60)
    raise ConfigError("nothing")

  monkeypatch.setattr("maxtext.serving.server.parse", slow)
  asked = {"model": "tiny", "prompt": "a"}

  async def leave():
    replies = await asyncio.gather(
      *(ask(app, "/v1/completions", asked, leaves=lambda: asyncio.sleep(0.2)) for _ in range(9))
    )
    late = await ask(make_app("tiny", worker, ServerLimits(request_timeout=0.1)), "/v1/completions", asked)
    let_go.set()
    return [status for status, _ in replies], late

  statuses, (status, body) = asyncio.run(leave())
  assert statuses == [499] * 9
  assert (status, "Reading the request took longer" in body) == (408, True)
  assert len(begun) <= 3


def test_stop_texts_are_searched_where_they_may_begin():
  """Over the border of tokens, and once each: what was shown is not searched again."""

  class Letters:
    def decode(self, tokens, shown=()):
      return "".join(map(chr, tokens))

  request = SimpleNamespace(sampling_params=SamplingParams(stop=("bcd", "e")))
  for text, shown in (("abcbcde", "abc"), ("abce", "abc"), ("xxbc", "xx")):
    answer = IncrementalDetokenizer(request, Letters())
    for letter in text:
      answer.add(TokenOutput(request, ord(letter)))
    assert answer.text == shown


def test_bytes_that_never_become_a_character_are_not_decoded_again_and_again():
  decoded = []

  class Bytes:
    def decode(self, tokens, shown=()):
      decoded.append(len(tokens))
      return bytes(tokens).decode(errors="replace")

  request = SimpleNamespace(sampling_params=SamplingParams())
  for content in (b"\x80" * 500, "é€😀 ".encode() * 125):
    answer = IncrementalDetokenizer(request, Bytes())
    for byte in content:
      answer.add(TokenOutput(request, byte))
    answer.add(TokenOutput(request, finish_reason="length"))
    assert answer.text == content.decode(errors="replace")
  assert max(decoded) < 32


def test_a_client_that_left_stays_away():
  """Whoever asks twice is told twice."""
  told = []

  async def app(scope, receive, send):
    told.extend([(await receive())["type"] for _ in range(3)])

  async def call():
    requests = _RequestDispatcher(SimpleNamespace(send=lambda *message: None))
    requests.app, inbox = app, asyncio.Queue()
    requests._inboxes[0] = inbox
    for kind in ("http.request", "http.disconnect"):
      inbox.put_nowait({"type": kind})
    async with asyncio.timeout(20):
      await requests._call(0, {}, inbox)

  asyncio.run(call())
  assert told == ["http.request", "http.disconnect", "http.disconnect"]


def test_a_failed_engine_is_said(served):
  loaded, worker, app = served
  jax.tree.map(lambda array: array.delete(), loaded.engine.state)
  for _ in range(2):  # the request that meets the failure, and one that comes later
    status, body = asyncio.run(ask(app, "/v1/completions", {"model": "tiny", "prompt": "a"}))
    assert status == 503
    assert json.loads(body)["error"]["message"] == "The engine has failed: restart the server."
  assert worker.failure is not None


class Panic(BaseException):
  """What a library in Rust raises when it panics: no Exception."""


class Panics:
  def start_matcher(self):
    raise Panic


def test_a_panic_is_seen(served):
  """The one who meets it is told, as are those who wait, and whoever comes later."""
  loaded, worker, _ = served
  ended: queue.Queue = queue.Queue()
  requests = [loaded.make_request([1], loaded.sampling_params, grammar) for grammar in (None, Panics(), None)]
  worker.submit(requests, lambda output: output.finish_reason and ended.put(output.finish_reason))
  assert "failed" in [ended.get(timeout=60) for _ in requests]
  assert (worker.status, type(worker.failure)) == ("failed", Panic)
  with pytest.raises(EngineFailedError):
    worker.submit(requests[:1], ended.put)


def test_clients_take_turns(served):
  """One has all the places that one may have; another comes later, and does not wait for all of them."""
  loaded, worker, _ = served
  settings = replace(loaded.sampling_params, max_tokens=20, temperature=0.0)
  order, done = [], threading.Semaphore(0)

  def ask(client, count):
    def deliver(event):
      if event.request not in started:
        started.add(event.request)
        order.append(client)
      if event.finish_reason:
        done.release()

    started = set()
    worker.submit([loaded.make_request([1, 2], settings) for _ in range(count)], deliver, client)

  ask("many", 4)
  with pytest.raises(QueueFullError):
    ask("many", 4)
  ask("one", 1)
  for _ in range(5):
    assert done.acquire(timeout=60)
  assert order.index("one") <= 2, order


DEAR = [name for name, (_, body) in hostile.BODIES.items() if len(body) > 2**19]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
  """One that nobody breaks."""
  with answering(random_model(tmp_path_factory.mktemp("tiny"))) as (_, app):
    yield app


@pytest.mark.parametrize("name", DEAR)
def test_dear_bodies_do_not_hold_the_event_loop(app, name):
  """Each has a megabyte. The loop's own thread has next to nothing to do, and the others do not have much."""
  path, body = hostile.BODIES[name]

  async def timed():
    loop, everyone = time.thread_time(), time.process_time()
    status, _ = await ask(app, path, body.replace(b'"cat"', b'"tiny"', 1))
    return status, time.thread_time() - loop, time.process_time() - everyone

  status, loop, everyone = asyncio.run(timed())
  assert status == 400
  assert loop < 0.05
  assert everyone < 0.5


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"prompt": ["a"] * 3, "n": 2}, "3 prompts with n=2 are more than the 4 outputs"),
    ({"stop": ["a"] * 17}, "stop: List should have at most 16 items"),
    ({"stop": "a" * 129}, "stop.0: String should have at most 128 characters"),
    ({"prompt": "a" * 1001}, "The prompt has 1001 characters, more than max_prefill_predict_length=100"),
    ({"prompt": [1] * 101}, "The prompt has 101 tokens"),
    ({"prompt": [1, "a"]}, "prompt: Value error, must be a text, a list of texts"),
    ({"prompt": [[1], [None]]}, "prompt: Value error, must be a text, a list of texts"),
    ({"response_format": {f"{n}": 0 for n in range(65)}}, "an object of 65 fields, more than 64"),
    ({"prompt": [[{f"{n}": 0 for n in range(65)}]]}, "an object of 65 fields, more than 64"),
    ({"n": 4, "max_tokens": 10**6, "logprobs": 1}, "4 outputs of 1000000 tokens with 1 top logprobs"),
    ({"max_tokens": 10**7, "logprobs": 5}, "lower n, max_tokens or the number of logprobs"),
  ],
)
def test_what_is_too_much(fields, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    parse(
      CompletionRequest, json.dumps({"model": "x", "prompt": "a"} | fields).encode(), RequestLimits(4, 100, 1000, 2**20)
    )


def test_a_schema_may_have_many_fields_and_a_name_few_characters():
  bounds = RequestLimits(4, 100, 1000, 100)
  named = {"name": "x", "schema": {"properties": {f"{n}": {} for n in range(200)}}}
  asked = {"model": "x", "prompt": "a", "response_format": {"type": "json_schema", "json_schema": named}}
  assert parse(CompletionRequest, json.dumps(asked).encode(), bounds).grammar_spec is not None
  turn = {"role": "user", "content": "a", "name": "a" * 65}
  with pytest.raises(ConfigError, match=r"messages\.0\.name: String should have at most 64 characters"):
    parse(ChatCompletionRequest, json.dumps({"model": "x", "messages": [turn]}).encode(), bounds)


def test_white_space_that_tokenizers_give_up_on():
  """1 MiB of it makes tiktoken's expression exceed its stack, whatever the model's context."""
  bounds = RequestLimits(4, 2**20, 2**24, 2**20)
  for kind, body in (
    (CompletionRequest, {"prompt": " " * 2**20}),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a" + "\n" * 2**17}]}),
  ):
    with pytest.raises(ConfigError, match="whitespace in a row"):
      parse(kind, json.dumps({"model": "x"} | body).encode(), bounds)
  parse(CompletionRequest, json.dumps({"model": "x", "prompt": "a" + " " * 30000 + "a"}).encode(), bounds)


@settings(deadline=None)
@given(
  st.recursive(st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_values_are_counted(value):
  """Never fewer than there are, which would let a dear body through; and not many more."""

  def count(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inner))

  for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
    assert count(value) <= count_values(text.encode()) <= 2 * count(value)


def test_a_template_that_raises_is_a_refusal(served):
  loaded, worker, app = served
  for template, message in (
    ("{{ raise_exception('roles must alternate') }}", "rejects this conversation: roles must alternate"),
    ("{{ messages[0].content + 1 }}", "cannot be filled in with this conversation: TypeError"),
  ):
    worker.model = replace(loaded, tokenizer=replace(loaded.tokenizer, chat_template=template))
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    status, body = asyncio.run(ask(app, "/v1/chat/completions", asked))
    assert (status, message in body) == (400, True), body
