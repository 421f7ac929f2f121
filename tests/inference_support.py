"""A tiny random model that answers, with a tokenizer of bytes; requests to an engine, and to a server's app."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax

from maxtext.configs.types import TokenizerType
from maxtext.data.options import tokenizer_options
from maxtext.data.tokenizers import load_tokenizer, train_tokenizer
from maxtext.inference.adapters import AdapterManager
from maxtext.inference.detokenizer import IncrementalDetokenizer
from maxtext.inference.draft_model import DraftModel
from maxtext.inference.inference_model import InferenceModel, make_engine
from maxtext.inference.sampling import SamplingParams
from maxtext.serving.engine_thread import EngineThread
from maxtext.serving.limits import ServerLimits
from maxtext.serving.server import make_app
from tests.support import program, tiny

BYTES = 258  # tokens: every byte, a beginning and an end


def random_model(
  folder, num_speculative_tokens=0, seed=0, adapter_options=None, devices=1, drafts_itself=False, **changes
):
  """What answers, two requests at once; its tokenizer is written to the folder."""
  train_tokenizer([], BYTES, 0, folder)
  keys = {"vocab_size": BYTES, "max_target_length": 96, "max_prefill_predict_length": 16, "per_device_batch_size": 2}
  config = tiny(**(keys | changes))
  model = program(config, devices).model
  shardings = jax.tree.map(lambda a: a.sharding, (model.params, model.buffers))
  params, buffers = jax.jit(model.init, out_shardings=shardings)(seed)
  named = config.model_copy(update={"tokenizer_type": TokenizerType.HUGGINGFACE, "tokenizer_path": str(folder)})
  tokenizer = replace(load_tokenizer(tokenizer_options(named)), add_bos=False, add_eos=False)
  sampling_params = SamplingParams(stop_token_ids=(tokenizer.eos,))
  adapters = None if adapter_options is None else AdapterManager(config, adapter_options)
  params = model.unstack_layers(params | buffers)
  draft_model = DraftModel(model, params) if drafts_itself else None
  engine = make_engine(config, model, params, num_speculative_tokens, draft_model, adapters)
  return InferenceModel(config, engine, tokenizer, sampling_params, adapters)


def broken_model(folder):
  """A model whose engine fails in its first step."""
  loaded = random_model(Path(folder))
  jax.tree.map(lambda array: array.delete(), loaded.engine.state)
  return loaded


def finish(loaded, requests):
  """The answers to requests, all at once, in their order."""
  scheduler = loaded.make_scheduler()
  found = {request: IncrementalDetokenizer(request, loaded.tokenizer) for request in requests}
  for request in requests:
    scheduler.submit(request)
  for output in scheduler.run():
    found[output.request].add(output)
  return list(found.values())


@contextmanager
def answering(loaded, limits=ServerLimits(max_queued_requests=8)):  # noqa: B008 (it is frozen)
  """A worker that is ready, and the app in front of it."""
  worker, ready = EngineThread(lambda: loaded, limits.max_queued_requests, limits.queue_share), threading.Event()
  worker.start(ready.set)
  assert ready.wait(60)
  yield worker, make_app("tiny", worker, limits)
  worker.stop()


async def ask(app, path, asked=None, send=None, leaves=None):
  """Posts a body, or gets a page; the status and what came. `send` takes the server's messages instead.

  The client leaves when what `leaves` makes has come.
  """
  body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
  messages = [{"type": "http.request", "body": body}]
  parts = []

  async def receive():
    if not messages:
      await (leaves or asyncio.Event().wait)()
    return messages.pop() if messages else {"type": "http.disconnect"}

  async def keep(message):
    parts.append(message)

  scope = {
    "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST" if asked else "GET",
    "path": path, "query_string": b"", "headers": [(b"content-type", b"application/json")],
  }  # fmt: skip
  await app(scope, receive, send or keep)
  return (parts[0]["status"], b"".join(part.get("body", b"") for part in parts).decode()) if parts else None
