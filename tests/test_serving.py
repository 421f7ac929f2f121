"""A trained model writes: `maxtext decode` and `maxtext serve` as real processes, OpenAI's own client in front."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from maxtext import LLM, SamplingParams
from maxtext.cli import serve
from maxtext.cli.decode import resolve_model_config
from maxtext.cli.main import main
from tests.flags import flags
from tests.support import TINY

MAXTEXT = str(Path(sys.executable).with_name("maxtext"))
SENTENCE = "the cat sat on the mat. "
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
KEYS = ("max_prefill_predict_length=24", "jax_cache_dir=", "use_chat_template=true", f"chat_template={TEMPLATE}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The folder of a run that has learnt one sentence, on eight devices; it answers on one."""
  folder = tmp_path_factory.mktemp("serving")
  (folder / "text").mkdir()
  for number in range(80):
    (folder / "text" / f"{number}.txt").write_text(SENTENCE * 8)
  prepare = ["--from", folder / "text", "--to", folder / "corpus", "--train-tokenizer", "--workers", "1"]
  assert main(["data", "prepare", *map(str, prepare), "vocab_size=270"]) == 0
  keys = TINY | {
    "vocab_size": 270, "max_target_length": 64, "per_device_batch_size": 1, "run_name": "cat", "log_period": 100,
    "dataset_type": "grain", "grain_train_files": folder / "corpus", "tokenizer_type": "huggingface",
    "grain_worker_count": 0, "learning_rate": 1e-2, "steps": 16, "enable_checkpointing": True,
    "async_checkpointing": False, "enable_tensorboard": False, "base_output_directory": folder,
  }  # fmt: skip
  assert main(["train", *(f"{key}={value}" for key, value in keys.items())]) == 0
  return folder / "cat"


def decode(run, *words, code=0, command="decode", **kwargs):
  env = os.environ | flags()
  done = subprocess.run(
    [MAXTEXT, command, str(run), *KEYS, *words],
    capture_output=True, text=True, env=env, timeout=200, check=False, **kwargs,
  )  # fmt: skip
  assert done.returncode == code, done.stderr
  return done


@pytest.mark.parametrize(
  ("text", "words", "environment", "looped"),
  [
    ("base_num_decoder_layers: 2", [], {}, False),
    ("base_num_decoder_layers: 2", ["scan_layers=true"], {}, True),
    ("base_num_decoder_layers: 2", [], {"M_SCAN_LAYERS": "true"}, True),
    ("base_num_decoder_layers: 2\nscan_layers: true", [], {}, True),
    ("base_num_decoder_layers: 33", [], {}, True),
  ],
  ids=["left out", "a word", "the environment", "a file", "many layers"],
)
def test_a_cpu_serves_layers_without_a_loop(monkeypatch, tmp_path, text, words, environment, looped):
  monkeypatch.setattr(serve, "load_model", lambda arguments, config, adapters: config.scan_layers)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  (tmp_path / "mine.yml").write_text(text)
  words = [str(tmp_path / "mine.yml"), *words]
  assert serve._load(Namespace(overrides=words), resolve_model_config(words), None) is looped


@pytest.mark.slow
def test_decode_one_prompt(run):
  """The assertion holds, the log-probabilities follow, and another text is an end with exit code 1."""
  expected = "the cat sat on the mat."
  done = decode(
    run, "prompt=the cat", "--max-tokens=5", "return_log_prob=true", f"autoregressive_decode_assert={expected}"
  )
  text, *log_probs = done.stdout.splitlines()
  assert text == expected
  assert len(log_probs) == 5
  assert all(-1 < float(line.split()[0]) < 0 for line in log_probs)
  guessing = ["--num-speculative-tokens=2", f"--draft-model={run}"]
  done = decode(
    run, "prompt=the cat", "--max-tokens=5", "--stop= on", *guessing, "autoregressive_decode_assert=a dog", code=1
  )
  assert done.stdout == "the cat sat\n", "it ends before the stop text"
  assert "decoding gave 'the cat sat', and autoregressive_decode_assert='a dog'" in done.stderr
  assert "set --num-speculative-tokens too" in decode(run, f"--draft-model={run}", code=2).stderr


@pytest.mark.slow
def test_weights_at_rest_answer(run, tmp_path):
  """The folder that `maxtext quantize` writes has all it takes to answer: format and tokenizer."""
  assert main(["quantize", str(run), str(tmp_path / "out"), "--format", "int8"]) == 0
  assert decode(tmp_path / "out", "prompt=the cat", "--max-tokens=5").stdout == "the cat sat on the mat.\n"
  other = decode(tmp_path / "out", "prompt=the cat", "weight_format=int4", "weight_block_size=8", code=2)
  assert "holds weights at rest with weight_format=int8" in other.stderr


@pytest.mark.slow
def test_from_python(run):
  """The folder of a run, on the eight devices that tests have: the same text as `maxtext decode`."""
  llm = LLM(run, max_prefill_predict_length=24, jax_cache_dir="", chat_template=TEMPLATE)
  params = SamplingParams(temperature=0, max_tokens=5, logprobs=0)
  (output,) = llm.generate("the cat", params)
  assert (output.text, output.finish_reason) == (" sat on the mat.", "length")
  assert llm.chat([{"role": "user", "content": "the cat"}], params)[0].text == output.text
  scores = llm.score([*output.prompt_token_ids, *output.token_ids])[len(output.prompt_token_ids) - 1 :]
  assert scores == pytest.approx(output.logprobs, abs=1e-4)


@pytest.mark.slow
def test_decode_a_file_and_a_conversation(run, tmp_path):
  (tmp_path / "prompts.txt").write_text("the cat\non the\n" * 3)
  lines = decode(run, "--prompts-file", str(tmp_path / "prompts.txt"), "--max-tokens=3").stdout.splitlines()
  answers = [json.loads(line) for line in lines]
  assert [answer["prompt"] for answer in answers] == ["the cat", "on the"] * 3
  assert [answer["text"] for answer in answers[::2]] == [" sat on the"] * 3
  assert answers[0]["finish_reason"] == "length"
  said = decode(run, "--max-tokens=2", command="chat", input="the cat\n the mat\n").stdout
  assert said.splitlines()[0] == " sat on", "the first answer is remembered, so the second goes on from it"
  assert said.splitlines()[1].startswith(".")
  done = decode(run, f"prompt={SENTENCE * 9}", code=2)
  assert re.search(r"^maxtext: The prompt has \d+ tokens, more than max_prefill_predict_length=24\.$", done.stderr)


@pytest.mark.slow
def test_bench(run, capsys):
  """The engine of a run, as a table."""
  words = ["inference_microbenchmark_prefill_lengths=16", "--num-prompts=3", "--input-len=4", "--output-len=3",
           "multi_sampling=true", "inference_microbenchmark_num_samples=[2]"]  # fmt: skip
  assert main(["bench", "serve", str(run), *KEYS, *words]) == 0
  head, *rows = capsys.readouterr().out.splitlines()
  assert head.split() == ["ms", "tokens/s"]
  shown = ["prefill 16 tokens", "prefill 16 tokens, n=2", "decode step, 8 slots", "3 requests at once"]
  assert [row[:32].rstrip() for row in rows] == shown


@pytest.fixture(scope="module")
def served(run):
  """A server's process and its address: four slots, and six places to wait."""
  words = ["per_device_batch_size=4", "enable_model_warmup=true", "--port=0", "--max-queued-requests=6",
           "--max-body-bytes=20000", "--max-queued-requests-per-client=6"]  # fmt: skip
  environment = flags() | {"MAXTEXT_API_KEYS": "secret,other"}
  process = subprocess.Popen(
    [MAXTEXT, "serve", str(run), *KEYS, *words],
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment,
  )  # fmt: skip
  try:
    line = process.stdout.readline()
    found = re.match(r"serving cat on (http://127\.0\.0\.1:\d+)\n", line)
    assert found, line + process.stderr.read()
    yield process, found[1]
  finally:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def address(served):
  return served[1]


@pytest.fixture(scope="module")
def client(address):
  return openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=60)


def gauge(address, name, key="secret"):
  page = urllib.request.Request(f"{address}/metrics", headers={"authorization": f"Bearer {key}"})
  with urllib.request.urlopen(page) as page:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def wait_until(condition):
  end = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.05)


def test_completions(client, address):
  assert [model.id for model in client.models.list()] == ["cat"]
  answer = client.completions.create(model="cat", prompt="the cat", max_tokens=6, logprobs=2, temperature=0)
  choice = answer.choices[0]
  assert (choice.text, choice.finish_reason) == (" sat on the mat. the", "length")
  assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
  assert choice.logprobs.tokens == [" sat", " on", " the", " mat", ".", " the"]
  for token, log_prob, others in zip(
    choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
  ):
    assert len(others) == 2
    assert others[token] == max(others.values()) == log_prob
  stopped = client.completions.create(model="cat", prompt="the cat", max_tokens=9, stop=["n the", "x"])
  assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" sat o", "stop")
  several = client.completions.create(model="cat", prompt=["the cat", "on the"], n=2, max_tokens=4)
  assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
  assert [choice.text for choice in several.choices[:2]] == [" sat on the mat"] * 2


def test_a_seed_repeats_a_draw(client):
  def draw(seed, **extra):
    asked = {"prompt": "the", "max_tokens": 20, "temperature": 3.0, "seed": seed}
    return client.completions.create(model="cat", **asked, extra_body=extra).choices[0].text

  with ThreadPoolExecutor(4) as pool:  # other rows are in the batch, and other ones each time
    texts = list(pool.map(draw, [1, 2, 1, 3, 1]))
  assert texts[0] == texts[2] == texts[4]
  assert len(set(texts)) == 3
  assert draw(1, top_k=1) == draw(2, top_k=1), "the likeliest of one"


def test_chats_and_streams(client):
  asked = {"model": "cat", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5, "temperature": 0}
  answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
  assert answer.choices[0].message.content == " sat on the mat."
  words = answer.choices[0].logprobs.content
  assert [word.token for word in words] == [" sat", " on", " the", " mat", "."]
  assert all(len(word.top_logprobs) == 3 and word.top_logprobs[0].logprob == word.logprob for word in words)
  pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
  assert pieces[0].choices[0].delta.role == "assistant"
  assert [piece.choices[0].delta.content for piece in pieces[1:-1]] == [" sat", " on", " the", " mat", "."]
  assert (pieces[-2].choices[0].finish_reason, pieces[-1].usage.completion_tokens) == ("length", 5)


@pytest.mark.parametrize(
  ("asked", "status", "message"),
  [
    ({"model": "dog"}, 404, "'dog' is not served here; use 'cat'"),
    ({"model": "\ud800"}, 400, "The request is not valid JSON: "),
    ({"prompt": SENTENCE * 9}, 400, "more than max_prefill_predict_length=24"),
    ({"prompt": []}, 400, "The prompt is empty"),
    ({"prompt": [1, 400]}, 400, "400 is not a token id"),
    ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
    ({"best_of": 2}, 400, "best_of: Extra inputs are not permitted"),
    ({"stop": [""]}, 400, "stop: an empty string"),
    ({"prompt": "x" * 30000}, 413, "more than 20000 bytes"),
  ],
)
def test_what_is_refused(address, asked, status, message):
  body = json.dumps({"model": "cat", "prompt": "the"} | asked).encode()
  headers = {"content-type": "application/json", "authorization": "Bearer other"}
  with pytest.raises(urllib.error.HTTPError) as refused:
    urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", body, headers))
  assert refused.value.code == status
  assert message in json.loads(refused.value.read())["error"]["message"]


def test_keys(address, client):
  with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
    client.with_options(api_key="guess").completions.create(model="cat", prompt="the")
  with urllib.request.urlopen(f"{address}/health") as health:
    assert json.loads(health.read())["status"] == "ok"


def test_keys_that_are_none_and_an_open_address(run):
  """No keys where some were meant is a mistake; none at all is said where others can reach the server."""
  words = [MAXTEXT, "serve", str(run), *KEYS, "--port=0"]
  environment = os.environ | flags()
  done = subprocess.run(
    words, env=environment | {"MAXTEXT_API_KEYS": ""}, capture_output=True, text=True, timeout=200, check=False
  )
  assert (done.returncode, "MAXTEXT_API_KEYS contains no key" in done.stderr) == (2, True)
  for host, warns in (("0.0.0.0", True), ("127.0.0.1", False), ("::1", False)):
    with subprocess.Popen([*words, f"--host={host}"], env=environment, stderr=subprocess.PIPE, text=True) as process:
      first = process.stderr.readline()
      process.terminate()
    assert ("accepts every client that can reach it" in first) == warns, first


def test_too_many_are_turned_away(client):
  """More than may ever wait is a mistake; more than may wait now is told to come again."""
  with pytest.raises(openai.BadRequestError, match="7 prompts with n=1 are more than the 6 outputs"):
    client.completions.create(model="cat", prompt=["the"] * 7)

  def ask(number):
    try:
      client.completions.create(model="cat", prompt=["the"] * 6, max_tokens=60, temperature=5.0)
    except openai.RateLimitError as refused:
      return refused
    return None

  with ThreadPoolExecutor(8) as pool:
    refused = [error for error in pool.map(ask, range(8)) if error]
  assert refused
  assert all("The request queue is full" in str(error) for error in refused)
  assert all(error.response.headers["retry-after"] == "1" for error in refused)


def test_who_leaves_frees_the_slot(address, client):
  asked = {"model": "cat", "prompt": "the", "max_tokens": 60, "temperature": 5.0}

  def leave_a_stream():
    with client.completions.create(**asked, stream=True) as stream:
      next(iter(stream))

  def leave_without_an_answer():
    with pytest.raises(
      (openai.APITimeoutError, openai.RateLimitError)
    ):  # the latter where those before are still there
      client.with_options(timeout=0.01).completions.create(**asked, n=6)

  for leave in (leave_a_stream, leave_without_an_answer):
    before = gauge(address, 'maxtext_requests_total{finish_reason="client_disconnected"}')

    def has_left(leave=leave, before=before):
      """A quick server may have finished before it saw anyone leave."""
      leave()
      return gauge(address, 'maxtext_requests_total{finish_reason="client_disconnected"}') > before

    wait_until(has_left)
    wait_until(
      lambda: gauge(address, "maxtext_num_requests_running") + gauge(address, "maxtext_num_requests_waiting") == 0
    )


def test_told_to_end_it_finishes_what_it_has(served, client):
  """The last test: it ends the server that the others asked."""
  process, _ = served
  asked = {"model": "cat", "prompt": "the", "max_tokens": 60, "temperature": 5.0, "stream": True}
  with ThreadPoolExecutor(6) as pool:  # all may wait, but not all have a slot
    streams = list(pool.map(lambda number: client.completions.create(**asked, seed=number), range(6)))
    process.send_signal(signal.SIGTERM)
    ends = list(pool.map(lambda stream: [piece.choices[0].finish_reason for piece in stream][-1], streams))
  assert set(ends) <= {"length", "stop"}, "what was accepted has ended"
  assert process.wait(timeout=30) == 0
  with pytest.raises(openai.APIConnectionError):
    client.completions.create(model="cat", prompt="the")
