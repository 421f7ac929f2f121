"""A server with 32 LoRA adapters, 64 clients, and others that load and unload adapters meanwhile."""

import asyncio
import os
import random
import re
import subprocess
import time
from collections import Counter
from dataclasses import replace

import jax
import openai
import pytest

from maxtext.cli.decode import resolve_model_config
from maxtext.data.tokenizers import train_tokenizer
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.inference.adapters import AdapterManager
from maxtext.inference.engine import dropless
from maxtext.inference.grammar import GrammarSpec
from maxtext.inference.inference_model import InferenceModel, load_params, load_run_tokenizer, make_engine
from maxtext.inference.sampling import SamplingParams
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model
from tests.flags import flags
from tests.inference_support import BYTES, finish
from tests.support import program, tiny
from tests.test_load import open_files, resident
from tests.test_lora import checkpoint
from tests.test_multi_lora import write_adapter
from tests.test_serving import MAXTEXT, gauge, wait_until

pytestmark = [pytest.mark.load, pytest.mark.slow]

SECONDS = float(os.environ.get("MAXTEXT_LOAD_SECONDS", "60"))
ADAPTERS, CLIENTS, GUESTS, SLOTS = 32, 64, 2, 8
RESTLESS = ("lora-0", "lora-1")  # unloaded and loaded again and again, beside those that nobody unloads
CONTENTS = 4  # of guests, whose name says nothing of what they are
PROMPTS = ("the cat", "sat on a", "mat. And then", "0123456789abcdef0123")  # none begins with another
FORMS = (None, None, None, "[a-m ]{3,12}")
HOT, RANK = 2.0, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A random base with a tokenizer, and adapters of it."""
  path = tmp_path_factory.mktemp("load")
  keys = {"vocab_size": BYTES, "max_target_length": 64, "max_prefill_predict_length": 32}
  config = tiny(**keys)
  params, buffers = jax.jit(program(config).model.init)(0)
  checkpoint(path / "base", config, params | buffers)
  (path / "tokenizer").mkdir()
  train_tokenizer([], BYTES, 0, path / "tokenizer")
  names = [f"lora-{number}" for number in range(ADAPTERS)] + [f"guest-{number}" for number in range(CONTENTS)]
  for seed, name in enumerate(names):
    write_adapter(path / "adapters" / name, config, seed, RANK)
  return path


def words(folder):
  return [
    str(folder / "base"), "tokenizer_type=huggingface", f"tokenizer_path={folder / 'tokenizer'}", "add_bos=false",
    "jax_cache_dir=", f"per_device_batch_size={SLOTS}", "enable_prefix_caching=true",
    "prefix_caching_hbm_byte=1000000", "prefix_caching_dram_byte=0",
  ]  # fmt: skip


@pytest.fixture
def served(folder):
  """A server's process and its address."""
  own = [f"--lora=lora-{number}={folder / 'adapters' / f'lora-{number}'}" for number in range(ADAPTERS)]
  more = [
    "enable_model_warmup=true", "--port=0", "--max-queued-requests=128", "--served-model-name=base",
    f"--lora-root={folder / 'adapters'}", f"--max-loras={ADAPTERS + 2 * GUESTS}", f"--max-lora-rank={RANK}",
  ]  # fmt: skip
  environment = os.environ | flags() | {"MAXTEXT_API_KEYS": "secret"}
  with subprocess.Popen(
    [MAXTEXT, "serve", *words(folder), *own, *more], stdout=subprocess.PIPE, text=True, env=environment
  ) as process:
    try:
      found = re.match(r"serving base on (http://\S+)\n", process.stdout.readline())
      assert found
      yield process, found[1]
    finally:
      process.kill()


class Clients:
  """What they ask until the time is over, and what was answered: {what was asked: {answers}}."""

  def __init__(self, speaker):
    self._speaker = speaker
    self.counts, self.answers, self.faults = Counter(), {}, []

  async def all(self, seconds):
    end = time.monotonic() + seconds
    await asyncio.gather(
      *(self._client(random.Random(number), end) for number in range(CLIENTS)),
      *(self._guest(f"visitor-{number}", random.Random(-number), end) for number in range(GUESTS)),
      *(self._restless(name, random.Random(name), end) for name in RESTLESS),
    )

  async def _client(self, draw, end):
    while time.monotonic() < end:
      name = draw.choice(("base", *(f"lora-{number}" for number in range(ADAPTERS))))
      try:
        if draw.random() < 0.1:
          await self._leave(name, draw)
        else:
          await self._ask(name, name, draw)
      except openai.NotFoundError:
        self.counts["not found"] += 1
        if name not in RESTLESS:
          self.faults.append(f"{name} was not found")
      except openai.RateLimitError:
        self.counts["turned away"] += 1
        await asyncio.sleep(draw.uniform(0.05, 0.3))
      except openai.APIError as fault:
        self.faults.append(repr(fault))

  async def _stream(self, model, content, draw):
    asked = content, draw.choice(PROMPTS), draw.randrange(4), draw.choice((1, 6, 20)), draw.choice(FORMS)
    _, prompt, seed, most, regex = asked
    stream = await self._speaker.completions.create(
      model=model, prompt=prompt, seed=seed, max_tokens=most, temperature=HOT, stream=True,
      extra_body={"structured_outputs": {"regex": regex}} if regex else {},
    )  # fmt: skip
    return asked, stream

  async def _ask(self, model, content, draw):
    asked, stream = await self._stream(model, content, draw)
    await self._read(asked, stream)

  async def _read(self, asked, stream):
    pieces = [piece.choices[0] async for piece in stream]
    self.counts["answered"] += 1
    self.answers.setdefault(asked, set()).add(("".join(piece.text for piece in pieces), pieces[-1].finish_reason))

  async def _leave(self, model, draw):
    _, stream = await self._stream(model, model, draw)
    async with stream:
      await anext(aiter(stream), None)
    self.counts["left"] += 1

  async def _guest(self, name, draw, end):
    """Another content by the same name each time; unloaded while the last answer is written."""
    while time.monotonic() < end:
      content = f"guest-{draw.randrange(CONTENTS)}"
      if await self._change("load", name, content):
        try:
          await self._ask(name, content, draw)
          asked, stream = await self._stream(name, content, draw)
        except openai.RateLimitError:
          stream = None
        if await self._change("unload", name):
          self.counts["guests"] += 1
        if stream is not None:
          await self._read(asked, stream)

  async def _restless(self, name, draw, end):
    while time.monotonic() < end:
      await asyncio.sleep(draw.uniform(0.2, 1))
      await self._change("unload", name)
      await asyncio.sleep(draw.uniform(0, 0.2))
      while not await self._change("load", name, name):  # until the requests that use it have ended
        await asyncio.sleep(0.1)
      self.counts["restless"] += 1

  async def _change(self, verb, name, path=None):
    """Whether an adapter could be loaded or unloaded; only what waits for others may fail."""
    body = {"lora_name": name} | ({"lora_path": path} if path else {})
    reply = await self._speaker._client.post(f"{verb}_lora_adapter", json=body, headers=self._speaker.auth_headers)
    if reply.status_code not in (200, 429) and "until the requests of unloaded" not in reply.text:
      self.faults.append((verb, name, reply.status_code, reply.text))
    self.counts[f"{verb} {reply.status_code}"] += 1
    return reply.status_code == 200


def alone(folder, asked):
  """Answers of an engine that has one adapter at a time: {what was asked: (text, finish)}."""
  config = resolve_model_config(words(folder))
  manager = AdapterManager(config, AdapterOptions(max_loras=1, max_lora_rank=RANK))
  model, tokenizer = dropless(build_model(config, make_mesh(config, jax.devices()[:1]))), load_run_tokenizer(config)
  engine = make_engine(config, model, load_params(config, model), adapters=manager)
  stops = SamplingParams(temperature=HOT, stop_token_ids=(tokenizer.eos,))
  loaded, found = InferenceModel(config, engine, tokenizer, stops, manager), {}
  for content in sorted({content for content, *_ in asked}):
    own = [one for one in asked if one[0] == content]
    name = None if content == "base" else content
    if name:
      manager.load(name, str(folder / "adapters" / name), "folder")
    with loaded.use_adapter(name) as adapter:
      requests = [
        loaded.make_request(
          tokenizer.encode(prompt).tolist(),
          replace(stops, seed=seed, max_tokens=most),
          loaded.grammar_compiler.compile(GrammarSpec("regex", "regex", regex)) if regex else None,
          adapter,
        )
        for _, prompt, seed, most, regex in own
      ]
      answers = finish(loaded, requests)
    found |= {one: (answer.text, answer.finish_reason) for one, answer in zip(own, answers, strict=True)}
    if name:
      manager.unload(name)
  return found


def idle(address):
  return not any(gauge(address, f"maxtext_num_requests_{kind}") for kind in ("running", "waiting"))


def test_every_answer_is_that_of_its_adapter_alone(served, folder):
  process, address = served

  async def everyone():
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=60) as speaker:
      clients = Clients(speaker)
      wrong = await asyncio.gather(
        *(
          speaker._client.post(
            f"{verb}_lora_adapter", json={"lora_name": "lora-9", "lora_path": "lora-9"}, headers=head
          )
          for verb in ("load", "unload")
          for head in ({}, {"authorization": "Bearer wrong"})
        )
      )
      assert {reply.status_code for reply in wrong} == {401}
      await clients.all(SECONDS / 3)  # what is made once is made here
      wait_until(lambda: idle(address))
      before = resident(process), open_files(process)
      await clients.all(SECONDS * 2 / 3)
      wait_until(lambda: idle(address))
      models = await speaker.models.list()
      return clients, before, (resident(process), open_files(process)), {model.id for model in models.data}

  clients, before, after, models = asyncio.run(everyone())
  print(f"\n{dict(clients.counts)}\n{before[0] / 2**20:.1f} to {after[0] / 2**20:.1f} MiB")
  assert not clients.faults, clients.faults[:5]
  assert models == {"base", *(f"lora-{number}" for number in range(ADAPTERS))}, "guests are gone, and others are back"
  assert clients.counts["answered"] > CLIENTS
  assert min(clients.counts["guests"], clients.counts["restless"]) > 1
  assert after[0] < before[0] * 1.05 + SECONDS * 2**17
  contents = {content for content, *_ in clients.answers}
  assert len(contents) > ADAPTERS
  assert len({answer for answers in clients.answers.values() for answer in answers}) > len(contents)
  assert {asked: {answer} for asked, answer in alone(folder, clients.answers).items()} == clients.answers
