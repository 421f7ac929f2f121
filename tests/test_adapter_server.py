"""LoRA adapters behind the API: as models of requests, and loaded and unloaded by clients."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from maxtext.cli.main import main
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.serving.limits import ServerLimits
from tests.inference_support import answering, ask, random_model
from tests.support import tiny
from tests.test_multi_lora import BAD_NAMES, BYTES, write_adapter

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A folder that clients may load from, and a secret beside it."""
  path, config = tmp_path_factory.mktemp("adapters"), tiny(vocab_size=BYTES)
  for seed, name in enumerate(("a", "b")):
    write_adapter(path / "root" / name, config, seed)
  write_adapter(path / "secret", config, 2)
  (path / "root" / "link").symlink_to(path / "secret")
  return path / "root"


@pytest.fixture(scope="module")
def app(root, tmp_path_factory):
  options = AdapterOptions({"first": str(root / "a")}, max_loras=2)
  loaded = random_model(tmp_path_factory.mktemp("tiny"), adapter_options=options)
  with answering(loaded, ServerLimits(max_queued_requests=8, lora_root=str(root))) as (_, app):
    yield app


def post(app, path, **body):
  return asyncio.run(ask(app, path, body))


def text(app, model):
  status, body = post(app, "/v1/completions", model=model, prompt="the cat", max_tokens=8, temperature=0)
  return json.loads(body)["choices"][0]["text"] if status == 200 else status


def models(app):
  return {one["id"]: one["parent"] for one in json.loads(asyncio.run(ask(app, "/v1/models"))[1])["data"]}


def test_an_adapter_is_a_model(app):
  assert models(app) == {"tiny": None, "first": "tiny"}
  base, first = text(app, "tiny"), text(app, "first")
  assert base != first
  status, body = post(app, "/v1/completions", model="second", prompt="a")
  assert status == 404
  assert json.loads(body)["error"]["message"] == (
    "model: 'second' is not served here; use 'tiny' or one of its adapters (/v1/models)."
  )
  assert post(app, LOAD, lora_name="second", lora_path="b") == (
    200, "Success: LoRA adapter 'second' added successfully.",
  )  # fmt: skip
  assert models(app) == {"tiny": None, "first": "tiny", "second": "tiny"}
  second = text(app, "second")
  assert len({base, first, second}) == 3
  assert (text(app, "tiny"), text(app, "first")) == (base, first)
  assert post(app, UNLOAD, lora_name="second") == (200, "Success: LoRA adapter 'second' removed successfully.")
  assert text(app, "second") == 404
  assert post(app, LOAD, lora_name="org/second", lora_path="a")[0] == 200
  assert text(app, "org/second") == first, "what it is loaded from decides, not its name"
  assert post(app, UNLOAD, lora_name="org/second")[0] == 200


@pytest.mark.parametrize("name", [*BAD_NAMES, "tiny", "first", 7, None, ["x"]])
def test_names_that_cannot_be_loaded(app, name):
  before = models(app)
  status, body = post(app, LOAD, lora_name=name, lora_path="b")
  assert status == 400
  assert len(body) < 600
  assert models(app) == before


@pytest.mark.parametrize(
  "path",
  ["", "nothing", "..", "../secret", "a/../../secret", "link", "/etc", "/", "~", "a\0b", "x" * 4000, "x/" * 2000,
   "x" * 5000, "adapter_config.json", "a/adapter_config.json", "file:///etc", 3, None],
)  # fmt: skip
def test_paths_that_cannot_be_loaded(app, path, root):
  """What lies outside of the root is not told apart from what does not exist."""
  before = models(app)
  status, body = post(app, LOAD, lora_name="new", lora_path=path)
  assert status == 400, body
  assert "secret" not in body.replace(str(path), "")
  if path and isinstance(path, str) and len(path) <= 4096:
    assert "is no folder below the server's --lora-root" in body
  assert models(app) == before


def test_absolute_paths_below_the_root(app, root):
  assert post(app, LOAD, lora_name="new", lora_path=str(root / "b"))[0] == 200
  status, body = post(app, LOAD, lora_name="more", lora_path="b")
  assert (status, "All 2 slots of adapters are taken" in body) == (400, True)
  assert post(app, UNLOAD, lora_name="new")[0] == 200
  status, body = post(app, UNLOAD, lora_name="new")
  assert (status, json.loads(body)["error"]["message"]) == (404, "The adapter 'new' is not loaded.")
  assert post(app, UNLOAD, lora_name="tiny")[0] == 404, "the base stays"
  for body in ({"lora_name": "new"}, {"lora_name": "x", "lora_path": "a", "load_inplace": True}):
    assert post(app, LOAD, **body)[0] == 400


def test_two_clients_load_one_name_at_once(app):
  async def both():
    body = {"lora_name": "same", "lora_path": "b"}
    return await asyncio.gather(*(ask(app, LOAD, body) for _ in range(4)))

  statuses = sorted(status for status, _ in asyncio.run(both()))
  assert statuses == [200, 400, 400, 400]
  assert post(app, UNLOAD, lora_name="same")[0] == 200
  assert post(app, LOAD, lora_name="other", lora_path="b")[0] == 200, "no place was lost"
  assert post(app, UNLOAD, lora_name="other")[0] == 200


def test_unloaded_while_a_stream_is_written(app):
  """The stream ends as it would have, and the place is free after it."""
  post(app, LOAD, lora_name="going", lora_path="b")
  asked = {"model": "going", "prompt": "the cat", "max_tokens": 60, "min_tokens": 60, "temperature": 0, "stream": True}
  parts, unloaded = [], []

  async def stream():
    async def send(message):
      parts.append(message.get("body", b"").decode())
      if "text" in parts[-1] and not unloaded:
        unloaded.append(await ask(app, UNLOAD, {"lora_name": "going"}))
        unloaded.append(await ask(app, "/v1/completions", {"model": "going", "prompt": "a"}))
        unloaded.append(await ask(app, LOAD, {"lora_name": "new", "lora_path": "a"}))

    await ask(app, "/v1/completions", asked, send)

  def whole(chunks):
    events = [json.loads(one) for one in re.findall(r"data: (\{.*\})", "".join(chunks))]
    return "".join(event["choices"][0]["text"] for event in events)

  asyncio.run(stream())
  assert [status for status, _ in unloaded] == [200, 404, 400]
  assert "1 of them until the requests of unloaded adapters have finished" in unloaded[2][1]
  assert post(app, LOAD, lora_name="going", lora_path="b")[0] == 200, "its place is free"
  _, body = post(app, "/v1/completions", **asked | {"stream": False})
  assert json.loads(body)["choices"][0]["text"] == whole(parts)
  assert post(app, UNLOAD, lora_name="going")[0] == 200


def test_clients_load_nothing_unless_they_may(root, tmp_path):
  loaded = random_model(tmp_path, adapter_options=AdapterOptions({"first": str(root / "a")}, max_loras=2))
  with answering(loaded) as (_, app):
    for path in (LOAD, UNLOAD):
      status, body = post(app, path, lora_name="first", lora_path="b")
      assert (status, "start it with --lora-root FOLDER" in body) == (404, True)
    assert models(app) == {"tiny": None, "first": "tiny"}
  with answering(replace(loaded, adapters=None), ServerLimits(lora_root=str(root))) as (_, app):
    assert post(app, LOAD, lora_name="x", lora_path="b")[0] == 404
    assert text(app, "first") == 404


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--lora", "sql"], "--lora sql: write --lora NAME=FOLDER"),
    (["--lora", "sql="], "--lora sql=: write --lora NAME=FOLDER"),
    (["--lora", "a=x", "--lora", "a=y"], "--lora a: two adapters have that name"),
    (["--lora", "../a=x"], "--lora: '../a' is no name of an adapter"),
    (["--lora", "cat=x"], "--lora cat: the base model has that name"),
    (["--max-loras", "3"], "--max-loras needs --lora or --lora-root"),
    (["--lora", "a=x", "--max-loras", "0"], "max_loras=0: it must be from 1"),
    (["--lora-root", "/nothing/here"], "--lora-root /nothing/here: there is no such folder"),
    (["--lora-root", "/tmp"], "--lora-root lets clients load adapters, and so needs API keys"),
  ],
)
def test_flags(words, message, capsys, monkeypatch):
  monkeypatch.delenv("MAXTEXT_API_KEYS", raising=False)
  assert main(["serve", "small-llama", "load_parameters_path=nothing", "--served-model-name=cat", *words]) == 2
  assert message in capsys.readouterr().err
