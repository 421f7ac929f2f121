"""`maxtext bench serve`: figures that add up, of an engine and of a server that is listening."""

import json
import threading
import time
from dataclasses import replace

import pytest
import uvicorn

from maxtext import ConfigError
from maxtext.bench.throughput import bench_throughput
from maxtext.bench.workload import Workload
from maxtext.cli.main import main
from maxtext.serving.auth import AuthenticationMiddleware
from maxtext.serving.limits import ServerLimits
from tests.inference_support import answering, random_model

WORKLOAD = Workload(num_prompts=6, input_len=9, output_len=5, seed=0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  return random_model(tmp_path_factory.mktemp("bench"))


def test_the_engine_by_its_keys(tmp_path):
  (tmp_path / "about.json").write_text('{"chip": "none"}')
  loaded = random_model(
    tmp_path,
    inference_microbenchmark_prefill_lengths="4, 16,64",
    inference_microbenchmark_loop_iters=3,
    inference_microbenchmark_log_file_path=str(tmp_path / "log.json"),
    inference_metadata_file=str(tmp_path / "about.json"),
  )
  counts = {"prefill": 0, "generate": 0}

  class Counted(type(loaded.engine)):
    """The engine itself, which counts."""

    def prefill_chunk(self, *arguments):
      counts["prefill"] += 1
      return super().prefill_chunk(*arguments)

    def start_step(self, *arguments):
      counts["generate"] += 1
      return super().start_step(*arguments)

  loaded.engine.__class__ = Counted
  timings = bench_throughput(loaded, WORKLOAD)
  names = ["prefill 4 tokens", "prefill 16 tokens", "decode step, 2 slots", "6 requests at once"]
  assert [timing.stage for timing in timings] == names, "64 tokens are more than a prompt may have"
  assert counts["prefill"] == 1 + 2 * (1 + 3) + 6, "to compile, once and three times that count, then a prompt each"
  assert counts["generate"] >= 1 + (1 + 3) + 6 * 5 / 2
  assert loaded.engine._decode_step._cache_size() == 1
  for timing, tokens in zip(timings, (4, 16, 2, 30), strict=True):
    assert timing.tokens_per_second * timing.milliseconds / 1e3 == pytest.approx(tokens)
  written = json.loads((tmp_path / "log.json").read_text())
  assert written["metadata"] == {"chip": "none"}
  assert [timing["milliseconds"] for timing in written["timings"]] == [timing.milliseconds for timing in timings]


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"inference_microbenchmark_stages": "generate,score"}, "stages: 'score' is not one of prefill, generate"),
    ({"inference_microbenchmark_prefill_lengths": "64,x"}, "prefill_lengths=64,x: give numbers of tokens"),
    ({"inference_microbenchmark_prefill_lengths": "17"}, "=17: all are more than max_prefill_predict_length=16"),
    ({"inference_microbenchmark_loop_iters": 0}, "loop_iters=0: at least 1"),
    ({"inference_metadata_file": "/nowhere.json"}, "inference_metadata_file=/nowhere.json cannot be read"),
  ],
)
def test_mistakes_are_named(loaded, keys, message):
  with pytest.raises(ConfigError, match=message):
    bench_throughput(replace(loaded, config=loaded.config.model_copy(update=keys)), WORKLOAD)


@pytest.fixture
def address(loaded):
  with answering(loaded, ServerLimits(max_queued_requests=4, max_queued_requests_per_client=4)) as (_, app):
    server = uvicorn.Server(
      uvicorn.Config(AuthenticationMiddleware(app, ("secret",), ()), port=0, log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
      time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_a_server(address, capsys, monkeypatch):
  """At a rate at which all are answered, then at once, where the server turns some away."""
  flags = ["bench", "serve", "--base-url", address, "--input-len", "9", "--output-len", "5"]
  assert main(flags) == 2
  assert f"maxtext: --base-url {address}: no server of the OpenAI API there: HTTP Error 401" in capsys.readouterr().err
  monkeypatch.setenv("MAXTEXT_API_KEYS", "secret,other")
  assert main([*flags, "--num-prompts", "1"]) == 0  # compiles
  assert capsys.readouterr().out.startswith("1 completed, 0 failed")
  assert main([*flags, "--num-prompts", "1", "--input-len", "999"]) != 0
  assert "HTTP Error 400: Bad Request: {" in capsys.readouterr().err, "what the server says of it"
  assert main([*flags, "--num-prompts", "12", "--request-rate", "6", "--json"]) == 0
  report = json.loads(capsys.readouterr().out)
  assert (report["completed"], report["failed"]) == (12, 0)
  assert report["output_throughput"] * report["duration_seconds"] == pytest.approx(12 * 5)
  assert report["duration_seconds"] > 0.5, "they do not come at once"
  for waits in (report["ttft_ms"], report["itl_ms"], report["tpot_ms"], report["e2e_latency_ms"]):
    assert 0 < waits["p50"] <= waits["p90"] <= waits["p99"]
  assert report["e2e_latency_ms"]["p50"] > report["ttft_ms"]["p50"]
  assert main([*flags, "--num-prompts", "60", "--output-len", "80", "--json"]) == 0
  report = json.loads(capsys.readouterr().out)
  assert report["failed"] > 0
  assert report["completed"] + report["failed"] == 60


def test_what_belongs_elsewhere_is_refused(capsys):
  for words, message in (
    (["--request-rate", "3"], "--request-rate is for a running server: add --base-url"),
    (["--base-url", "http://127.0.0.1:1", "steps=3"], "steps=3 is for a local model"),
    (["--base-url", "http://127.0.0.1:1"], "no server of the OpenAI API there"),
    (["--num-prompts", "0"], "--num-prompts 0: it must be more than 0"),
  ):
    assert main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err
