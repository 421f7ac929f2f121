"""Forms that ask for too much: they end alone, whatever they do, and those who follow another form do not notice."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from maxtext import ConfigError, MaxTextConfig
from maxtext.data.options import tokenizer_options
from maxtext.data.tokenizers import load_tokenizer, train_tokenizer
from maxtext.inference.grammar import GrammarCompiler, GrammarSpec, accept_tokens, token_bitmask
from maxtext.inference.grammar_process import MIB, GrammarLimits
from maxtext.serving.server import ServerLimits, make_app
from tests.inference_support import BYTES, answering, ask, random_model

HONEST = GrammarSpec("r", "regex", "[a-f]{2}-[0-9]{3}")
# Passes the caps, and has a state for each of a hundred million remainders.
REMAINDERS = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}
GROWING = GrammarSpec("r", "regex", ".*a.{300}b.*c.{300}d.*")  # states by the power of the text, as it is matched

SERVER = f"""
import json, resource, sys, threading, time
from pathlib import Path
from maxtext import ConfigError, MaxTextConfig
from maxtext.data.options import tokenizer_options
from maxtext.data.tokenizers import load_tokenizer
from maxtext.inference.grammar import GrammarSpec, GrammarCompiler
config = MaxTextConfig(tokenizer_type="huggingface", tokenizer_path=sys.argv[1], vocab_size=258)
grammars = GrammarCompiler(load_tokenizer(tokenizer_options(config)), 258)
remainders = GrammarSpec("schema", "json", {json.dumps(REMAINDERS)!r})
honest = GrammarSpec("regex", "regex", "[a-f]{{2}}-[0-9]{{3}}")
"""

# What was confirmed to end a server: in a process under limits, so that nothing else ends with it.
TRIGGERS = (
  SERVER
  + """
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for form in (
  GrammarSpec("schema", "json", '{"type":"integer","multipleOf":100000007}'),
  remainders,
  GrammarSpec("regex", "regex", "|".join("%06x.*" % (i * 7919) for i in range(6700))),
):
  try:
    grammars.compile(form)
    print("compiled")
  except ConfigError as refusal:
    print(refusal)
grammars.compile(honest)
"""
)

KILLED = (
  SERVER
  + """
grammars.compile(honest)
threading.Thread(target=grammars.compile, args=[remainders], daemon=True).start()
pid = grammars._fork_server._process.pid
children = lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
while len(children()) < 2:
  time.sleep(0.01)
print(pid, *children(), flush=True)
time.sleep(60)
"""
)


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory):
  """A tokenizer."""
  folder = tmp_path_factory.mktemp("bytes")
  train_tokenizer([], BYTES, 0, folder)
  config = MaxTextConfig(tokenizer_type="huggingface", tokenizer_path=str(folder), vocab_size=BYTES)
  return load_tokenizer(tokenizer_options(config))


def folder_of(tokenizer):
  return tokenizer.vocabulary.files["tokenizer.json"].parent


def schema(body):
  return GrammarSpec("schema", "json", json.dumps(body))


def allowed(matcher):
  """Tokens that may come next, but for a beginning and an end, which are the first two."""
  bits = np.unpackbits(token_bitmask({0: matcher}, 1, BYTES).view(np.uint8)[0], bitorder="little")
  return [int(token) for token in np.flatnonzero(bits[:BYTES]) if token > 1]


def walk(matcher, steps, seed=0):
  """Goes on at random; how it ended, if it did."""
  draw = random.Random(seed)
  for _ in range(steps):
    tokens = allowed(matcher)
    if not tokens:
      return "stop"
    if end := accept_tokens({matcher: draw.choice(tokens)})[matcher]:
      return end
  return None


def processes(grammars):
  """Those of grammars: the children of their fork server."""
  pid = grammars._fork_server._process.pid
  return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def eventually(true, seconds=20):
  end = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < end
    time.sleep(0.02)


def test_what_ended_a_server_is_refused(bytes_only):
  command = [sys.executable, "-c", TRIGGERS, str(folder_of(bytes_only))]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr[-2000:]
  small, states, expression = done.stdout.splitlines()
  assert small == "schema: multipleOf=100000007 has more remainders than 10000."
  assert "schema: compiling it takes more than the limit of 256 MiB or 3 seconds" in states
  assert "regex: 6" in expression
  assert "characters are more than 16384" in expression


def test_a_form_that_grows_as_it_is_matched_ends_alone(bytes_only):
  limits = GrammarLimits(memory=6 * MIB)
  grammars = GrammarCompiler(bytes_only, BYTES, limits)
  honest, growing = grammars.compile(HONEST).start_matcher(), grammars.compile(GROWING).start_matcher()
  letters = allowed(honest)
  assert bytes_only.decode(letters) == "abcdef"
  start, most, end, draw = growing.grammar.bytes_used, 0, None, random.Random(0)
  ab = [int(token) for token in bytes_only.vocabulary.encode("abcd", special=False)]
  for _ in range(2000):
    allowed(growing)
    end = accept_tokens({growing: draw.choice(ab)})[growing]
    most = max(most, growing.grammar.bytes_used)
    if end:
      break
  assert (end, growing.grammar.alive) == ("grammar_error", False), "more states than there is memory for"
  assert start + 2 * MIB < most <= start + limits.memory
  assert accept_tokens({honest: letters[0]}) == {honest: None}
  assert allowed(honest) == letters
  assert walk(grammars.compile(HONEST).start_matcher(), 10) == "stop"
  eventually(lambda: len(processes(grammars)) == 1)


def test_memory_of_all_is_bounded(bytes_only):
  """The oldest are forgotten; where all are followed, whoever has most is ended."""
  one = GrammarCompiler(bytes_only, BYTES).compile(HONEST).bytes_used
  grammars = GrammarCompiler(bytes_only, BYTES, GrammarLimits(total=5 * one))
  small = grammars.compile(HONEST)
  assert grammars.compile(HONEST) is small
  for number in range(12):
    grammars.compile(GrammarSpec("r", "regex", f"[a-f]{{2}}{number}"))
    assert grammars.bytes_used <= 5 * one
  eventually(lambda: 1 < len(processes(grammars)) < 9)
  matcher = small.start_matcher()
  large = grammars.compile(schema({"enum": [f"{number * 7919:x}" for number in range(12_000)]}))
  assert not large.alive
  assert walk(large.start_matcher(), 2) == "grammar_error"
  assert walk(matcher, 10) == "stop"


@pytest.mark.parametrize(
  ("form", "message"),
  [
    (schema({"multipleOf": 12345.6789}), "schema: multipleOf=12345.6789 has more remainders than"),
    (schema({"multipleOf": 10**400}), "schema: multipleOf=10+ has more remainders than"),
    (schema({"multipleOf": -(10**400)}), "schema: multipleOf=-10+ has more remainders than"),
    (schema({"properties": {"a": {"maxLength": 10**7}}}), "schema: maxLength=10000000 is more than"),
    (schema({"type": "array", "minItems": 10**300}), "schema: minItems=10"),
    (schema({"enum": list(range(20_000))}), "schema: enum has 20000 entries, more than"),
    (schema({"pattern": "a" * 5000}), "schema: pattern has 5000 characters, more than 4096"),
    (schema({"patternProperties": {"a{999999999999}": {}}}), r"schema: patternProperties: \{999999999999\} repeats"),
    (schema(json.loads("[" * 80 + "]" * 80)), "schema: it is nested deeper than 64"),
    (GrammarSpec("x", "json", "[" * 100_000), "x: .*recursion"),
    (GrammarSpec("x", "regex", "a{2,1000000}"), r"x: \{2,1000000\} repeats more than 100000 times"),
    (GrammarSpec("x", "regex", "a" * 20_000), "x: 20000 characters are more than 16384"),
  ],
)
def test_caps_are_named(bytes_only, form, message):
  grammars = GrammarCompiler(bytes_only, BYTES)
  with pytest.raises(ConfigError, match=message):
    grammars.compile(form)
  assert grammars._fork_server is None, "known without a process"


def test_what_looks_like_a_cap_in_data_is_no_keyword(bytes_only):
  names = {"multipleOf": {"type": "null"}, "enum": {"type": "null"}}
  body = {"type": "object", "properties": names, "default": {"maxLength": 10**9}, "examples": [{"minItems": 10**9}]}
  assert walk(GrammarCompiler(bytes_only, BYTES).compile(schema(body)).start_matcher(), 1) is None


def test_grammars_are_counted_while_others_come(bytes_only):
  """The engine's thread counts what they use, and a compiler's thread adds to them."""

  class Stub:
    alive, bytes_used = True, 1

  grammars, over = GrammarCompiler(bytes_only, BYTES), threading.Event()
  living = [Stub() for _ in range(2000)]

  def add():
    while not over.is_set():
      with grammars._lock:
        grammars._grammars.clear()
      for one in living:
        with grammars._lock:
          grammars._grammars.add(one)

  adding = threading.Thread(target=add)
  adding.start()
  try:
    for _ in range(200):
      assert grammars.bytes_used <= len(living)
  finally:
    over.set()
    adding.join()
  grammars._limits = GrammarLimits(total=-1)
  grammars._grammars.clear()
  grammars.enforce_limit()  # there is nobody to end


def test_the_processes_of_grammars_are_told_no_secrets(bytes_only, monkeypatch):
  monkeypatch.setenv("HF_TOKEN", "k3y")
  monkeypatch.setenv("MAXTEXT_API_KEYS", "k3y")
  grammars = GrammarCompiler(bytes_only, BYTES)
  grammars.compile(HONEST)
  pids = [grammars._fork_server._process.pid, *processes(grammars)]
  assert len(pids) == 2
  assert not any(b"k3y" in Path(f"/proc/{pid}/environ").read_bytes() for pid in pids)


def test_a_compilation_that_nobody_wants_ends(bytes_only):
  grammars = GrammarCompiler(bytes_only, BYTES, GrammarLimits(compile_seconds=60, memory=2048 * MIB))
  grammars.compile(HONEST)

  async def leave():
    compiling = asyncio.ensure_future(grammars.compile_async(schema(REMAINDERS)))
    while len(processes(grammars)) < 2:
      await asyncio.sleep(0.01)
    compiling.cancel()
    await asyncio.wait([compiling])

  asyncio.run(leave())
  eventually(lambda: len(processes(grammars)) == 1)
  assert walk(grammars.compile(HONEST).start_matcher(), 10) == "stop"


def test_the_fork_server_is_started_again(bytes_only):
  grammars = GrammarCompiler(bytes_only, BYTES)
  matcher = grammars.compile(HONEST).start_matcher()
  letters, held = allowed(matcher), processes(grammars)
  os.kill(grammars._fork_server._process.pid, signal.SIGKILL)
  eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in held))
  assert accept_tokens({matcher: letters[0]}) == {matcher: "grammar_error"}
  assert walk(grammars.compile(HONEST).start_matcher(), 10) == "stop"
  server = grammars._fork_server._process.pid
  threading.Timer(0.3, os.kill, [server, signal.SIGKILL]).start()
  with pytest.raises(ConfigError, match="compiling it takes more than the limit of 256 MiB or 3 seconds"):
    grammars.compile(schema(REMAINDERS))  # by the second server, once the first was lost
  assert grammars._fork_server._process.pid != server


def test_processes_end_with_the_server(bytes_only):
  """Which was killed, while one of them computes; a Ctrl-C of its terminal would not have reached them."""
  command = [sys.executable, "-c", KILLED, str(folder_of(bytes_only))]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    pids = [int(pid) for pid in server.stdout.readline().split()]
    assert len(pids) == 3
    assert {os.getsid(pid) for pid in pids} == {pids[0]} != {os.getsid(0)}
    server.kill()
  eventually(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid):
  try:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
  except OSError:
    return False


def test_compiling_is_part_of_the_time_of_a_request(tmp_path):
  """A client that leaves, and one that the server gives no more time, while honest ones are answered."""
  loaded = random_model(tmp_path, max_target_length=400, per_device_batch_size=2)
  loaded.__dict__["grammar_compiler"] = GrammarCompiler(
    loaded.tokenizer, loaded.engine.vocab, GrammarLimits(compile_seconds=60, memory=2048 * MIB)
  )
  loaded.grammar_compiler.compile(HONEST)
  body = {"model": "tiny", "prompt": "a"}
  hostile = body | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": REMAINDERS}}}
  honest = body | {"structured_outputs": {"regex": HONEST.text}, "max_tokens": 9}
  with answering(loaded) as (worker, patient):
    hasty = make_app("tiny", worker, ServerLimits(request_timeout=0.5))
    left = asyncio.run(ask(patient, "/v1/completions", hostile, leaves=lambda: asyncio.sleep(0.5)))
    late = asyncio.run(ask(hasty, "/v1/completions", hostile))
    answered = asyncio.run(ask(patient, "/v1/completions", honest))
  assert left[0] == 499
  assert late[0] == 408
  assert "response_format.json_schema.schema: compiling it took longer" in late[1]
  assert answered[0] == 200
  eventually(lambda: len(processes(loaded.grammar_compiler)) == 1)


HOSTILE = {
  "remainders": schema({"type": "integer", "multipleOf": 9973}),
  "subsets": GROWING,
  "middles": GrammarSpec("r", "regex", ".*a.{25}b.*c.{25}d.*"),
  "classes": GrammarSpec("r", "regex", r"(\p{L}|\d){3}" * 1200),
  "words": GrammarSpec("r", "regex", "|".join(f"{number * 7919:06x}.*" for number in range(1800))),
  "nested": schema({"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "array"}] * 100}}),
  "ambiguous": schema({"anyOf": [{"type": "array", "items": {"type": "string", "maxLength": n}} for n in range(300)]}),
  "long": schema({"type": "string", "minLength": 1_000_000}),
  "objects": schema({"type": "object", "additionalProperties": {"type": ["object", "array"]}, "maxProperties": 9999}),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", HOSTILE)
def test_matching_stays_within_the_limit(bytes_only, name):
  """Thousands of tokens in eight answers at once: what the process has to itself, as the kernel counts it."""
  limits = GrammarLimits()
  grammars = GrammarCompiler(bytes_only, BYTES, limits)
  grammar = grammars.compile(HOSTILE[name])
  (pid,) = processes(grammars)
  matchers, draw, most, slowest, taken = [grammar.start_matcher() for _ in range(8)], random.Random(0), 0, 0.0, 0
  for step in range(4000):
    rows = np.unpackbits(
      token_bitmask(dict(enumerate(matchers)), len(matchers), BYTES).view(np.uint8), axis=1, bitorder="little"
    )
    choices = [np.flatnonzero(row[2:BYTES]) + 2 for row in rows]
    tokens = {matcher: int(draw.choice(c)) for matcher, c in zip(matchers, choices, strict=True) if len(c)}
    start = time.monotonic()
    ends = accept_tokens(tokens)
    slowest, taken = max(slowest, time.monotonic() - start), taken + len(tokens)
    matchers = [matcher for matcher in tokens if ends[matcher] is None]
    if step % 50 == 0 and grammar.alive:
      rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
      most = max(most, sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private")) * 1024)
    if not grammar.alive:
      break
    matchers += [grammar.start_matcher() for _ in range(8 - len(matchers))]
  print(f"{name}: {taken} tokens, {most / MIB:.0f} MiB, slowest step {slowest * 1e3:.0f} ms, alive {grammar.alive}")
  assert most < limits.memory + 64 * MIB, "and what it wrote of the pages that it shared"
  assert slowest < limits.wall_seconds
