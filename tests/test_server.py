"""What a server does that clients of a real process cannot time: one leaves at a given moment, or the engine fails."""

import asyncio
import json

import jax
import pytest

from maxtext.inference.server import Limits, make_app
from maxtext.inference.worker import Worker
from tests.answering import ask, random_model


@pytest.fixture
def served(tmp_path):
  """A model, its worker and the app in front of it."""
  loaded = random_model(tmp_path)
  worker = Worker(loaded.scheduler(), most_waiting=4)
  worker.start()
  yield loaded, worker, make_app(loaded, "tiny", worker, Limits())
  worker.stop()


def test_who_leaves_before_a_stream_begins_keeps_no_slot(served):
  _, worker, app = served

  async def stuck(message):
    await asyncio.Event().wait()  # a connection that takes nothing any more

  async def leave():
    asked = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 90, "n": 2, "temperature": 0}
    async with asyncio.timeout(60):
      await ask(app, "/v1/completions", asked, stuck, leaves=True)
      while worker.scheduler.busy:
        await asyncio.sleep(0.01)
    return await ask(app, "/metrics")

  assert 'maxtext_requests_total{finish="left"} 2.0' in asyncio.run(leave())[1]


def test_a_failed_engine_is_said(served):
  loaded, worker, app = served
  jax.tree.map(lambda array: array.delete(), loaded.engine.state)
  for _ in range(2):  # the request that meets the failure, and one that comes later
    status, body = asyncio.run(ask(app, "/v1/completions", {"model": "tiny", "prompt": "a"}))
    assert status == 503
    assert json.loads(body)["error"]["message"] == "The engine has failed; the server must be started again."
  assert worker.failure is not None
