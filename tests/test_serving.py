"""A trained model writes: `maxtext decode` and `maxtext serve` as real processes, OpenAI's own client in front."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from maxtext.cli.main import main
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


def decode(run, *words, code=0, **kwargs):
  env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
  done = subprocess.run(
    [MAXTEXT, "decode", str(run), *KEYS, *words],
    capture_output=True, text=True, env=env, timeout=200, check=False, **kwargs,
  )  # fmt: skip
  assert done.returncode == code, done.stderr
  return done


def test_decode_continues_a_prompt(run):
  assert decode(run, "prompt=the cat", "--max-tokens", "12").stdout.startswith("the cat sat on the mat. the cat sat")


@contextmanager
def server(run, *words, **environment):
  process = subprocess.Popen(
    [MAXTEXT, "serve", str(run), *KEYS, "--port", "0", "per_device_batch_size=4", "enable_model_warmup=true", *words],
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"} | environment,
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
def address(run):
  with server(run, "--max-waiting", "6", "--max-body", "20000", MAXTEXT_API_KEYS="secret,other") as (_, address):
    yield address


@pytest.fixture(scope="module")
def client(address):
  return openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=60)


def test_completions(client):
  assert [model.id for model in client.models.list()] == ["cat"]
  answer = client.completions.create(model="cat", prompt="the cat", max_tokens=6, logprobs=2, temperature=0)
  assert answer.choices[0].text.startswith(" sat on the mat.")
  assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 6)
  assert len(answer.choices[0].logprobs.token_logprobs) == 6
  assert all(len(others) == 2 for others in answer.choices[0].logprobs.top_logprobs)
  several = client.completions.create(model="cat", prompt=["the cat", "on the"], n=2, max_tokens=4, seed=1)
  assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
  assert several.choices[0].text == answer.choices[0].text[: len(several.choices[0].text)]
