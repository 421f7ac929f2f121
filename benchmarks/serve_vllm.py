"""Our server in turns with vLLM's for CPUs, or with that of another checkout of ours.

  python -m benchmarks.serve_vllm --python VLLM/bin/python [--loads once rate prefix json] [--json]
  python -m benchmarks.serve_vllm --checkout FOLDER

Both serve one Hugging Face folder of a random Llama of 46 million parameters in float32 with 16 slots, and get the same
requests by the client of `maxtext bench serve`. Both are started once; who is not measured is stopped (SIGSTOP). Every
turn has prompts of its own, so that neither answers from the turn before. Figures are medians over the turns, and
ratios medians of the turns' ratios: ours over the other's, so throughput is better above 1, and latency below.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.bare import SMALL, Size
from benchmarks.decode import write_folder
from benchmarks.figures import show
from maxtext.bench.serving import CompletionsClient, ServingMetrics, bench_serving
from maxtext.bench.workload import Workload

SIZE = replace(Size(), vocab=20480, length=1024)
SLOTS, START_SECONDS, END_SECONDS, WARM_UP = 16, 900, 20, 16
END = 256  # the end-of-sequence token, after those of single bytes
INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}  # cut off by the length of the answer


@dataclass(frozen=True)
class Prefixed(Workload):
  """Requests whose prompts begin with the same tokens."""

  shared: int = 512

  def prompts(self) -> list[list[int]]:
    draw = random.Random(-1 - self.seed)
    prefix = [draw.randrange(256) for _ in range(self.shared)]
    return [[*prefix, *prompt] for prompt in super().prompts()]


@dataclass(frozen=True)
class Load:
  """Requests of one turn.

  Attributes:
    workload: their prompts, with the seed of the first turn.
    share: of the slower server's capacity, at which requests arrive; None sends all at once.
    body: fields of every request.
  """

  workload: Workload
  share: float | None = None
  body: Mapping[str, Any] = field(default_factory=dict)


_FORM = {"type": "json_schema", "json_schema": {"name": "integers", "schema": INTEGERS}}
LOADS = {
  "once": Load(Workload(64, 128, 64, 0)),
  "rate": Load(Workload(64, 128, 64, 1000), share=0.7),
  "prefix": Load(Prefixed(64, 32, 64, 2000)),
  "json": Load(Workload(64, 128, 64, 3000), body={"response_format": _FORM, "min_tokens": 0}),  # the form is longer
}


@dataclass(frozen=True)
class Server:
  """A server that is stopped unless it is measured."""

  process: subprocess.Popen[bytes]
  url: str

  def measure(self, load: Load, turn: int, rate: float | None) -> ServingMetrics:
    """What the client of `maxtext bench serve` says of one turn."""
    client, workload = CompletionsClient(self.url), replace(load.workload, seed=load.workload.seed + turn)
    os.killpg(self.process.pid, signal.SIGCONT)
    try:
      body = {"temperature": 0, **load.body}
      metrics = bench_serving(client, client.first_model(), workload, rate, body)
    finally:
      os.killpg(self.process.pid, signal.SIGSTOP)
    if metrics.failed:
      raise RuntimeError(f"{metrics.failed} requests to {self.url} failed")
    return metrics


def write_model(folder: Path, size: Size) -> None:
  """The model, with a tokenizer of bytes: a form can only be kept to by tokens that spell it."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers
  from transformers import PreTrainedTokenizerFast

  write_folder(folder, size)
  vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab += ["</s>", *(f"w{i}" for i in range(size.vocab - len(vocab) - 1))]
  words = Tokenizer(models.BPE({word: i for i, word in enumerate(vocab)}, []))
  words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  PreTrainedTokenizerFast(tokenizer_object=words, eos_token=vocab[END]).save_pretrained(folder)


def our_command(folder: Path, cache: Path, port: int) -> list[str]:
  """`maxtext serve` with what vLLM does unasked."""
  keys = [
    "dtype=float32",
    "weight_dtype=float32",
    "use_chunked_prefill=true",
    "enable_model_warmup=true",
    f"jax_cache_dir={cache}",
  ]
  flags = ["--enable-prefix-caching", f"--max-model-len={SIZE.length}", f"--max-num-seqs={SLOTS}", f"--port={port}"]
  return [sys.executable, "-m", "maxtext", "serve", str(folder), *keys, *flags]


def vllm_command(python: str, folder: Path, port: int) -> list[str]:
  """vLLM's server."""
  flags = ["--dtype=float32", f"--max-model-len={SIZE.length}", f"--max-num-seqs={SLOTS}", f"--port={port}"]
  return [str(Path(python).with_name("vllm")), "serve", str(folder), *flags]


@contextmanager
def serving(command: list[str], port: int, environment: Mapping[str, str], log: Path) -> Iterator[Server]:
  """A server from its first answer on, already stopped."""
  url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
  with log.open("wb") as file:
    process = subprocess.Popen(
      command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | dict(environment), start_new_session=True
    )
  try:
    while True:
      try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
          break
      except OSError:
        if process.poll() is not None or time.monotonic() > end:
          raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()[-2000:]}") from None
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGSTOP)
    yield Server(process, url)
  finally:
    for number in (signal.SIGCONT, signal.SIGTERM):
      os.killpg(process.pid, number)
    try:
      process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:  # a server of several processes may wait for one that has ended
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def free_port() -> int:
  with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    return one.getsockname()[1]


def compare(load: Load, ours: Server, other: Server, turns: int) -> dict[str, float]:
  """The medians of a load."""
  rate = None
  servers = {"ours": ours, "other": other}
  for server in servers.values():  # what is compiled with its first use
    server.measure(replace(load, workload=replace(load.workload, num_prompts=WARM_UP)), -1, None)
  if load.share is not None:
    rate = load.share * min(server.measure(load, -2, None).request_throughput for server in servers.values())
  rows = []
  for turn in range(turns):
    order = list(servers) if turn % 2 == 0 else list(servers)[::-1]
    found = {name: _figures(servers[name].measure(load, turn, rate)) for name in order}
    rows.append(found)
    print(found, file=sys.stderr)
  result = {} if rate is None else {"requests_per_s": rate}
  for figure in rows[0]["ours"]:
    for name in servers:
      result[f"{figure}_{name}"] = statistics.median(row[name][figure] for row in rows)
    result[f"{figure}_ratio"] = statistics.median(row["ours"][figure] / row["other"][figure] for row in rows)
  return result


def _figures(metrics: ServingMetrics) -> dict[str, float]:
  return {
    "tokens_per_s": metrics.output_throughput,
    "ttft_p50_ms": metrics.ttft_ms.p50,
    "ttft_p99_ms": metrics.ttft_ms.p99,
    "itl_p50_ms": metrics.itl_ms.p50,
    "itl_p99_ms": metrics.itl_ms.p99,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  other = parser.add_mutually_exclusive_group(required=True)
  other.add_argument("--python", help="the interpreter of an environment with vLLM")
  other.add_argument("--checkout", type=Path, help="another checkout of this project, such as a worktree")
  parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=["once"])
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--small", action="store_true", help="a toy size, to see that the benchmark runs")
  parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
  arguments = parser.parse_args()
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
  result: dict[str, float] = {}
  with tempfile.TemporaryDirectory() as root, ExitStack() as servers:
    folder = Path(root) / "model"
    write_model(folder, replace(SMALL, length=SIZE.length) if arguments.small else SIZE)

    def start(name: str, command: list[str], port: int, environment: Mapping[str, str]) -> Server:
      log = Path(root) / f"{name}.log"
      return servers.enter_context(serving(command, port, {"JAX_PLATFORMS": "cpu"} | dict(environment), log))

    port = free_port()
    ours = start("ours", our_command(folder, Path(root) / "cache", port), port, {})
    port = free_port()
    if arguments.python:
      paths = {"PYTHONPATH": "", "VLLM_CPU_KVCACHE_SPACE": "4"}
      rival = start("vllm", vllm_command(arguments.python, folder, port), port, paths)
    else:
      paths = {"PYTHONPATH": str(arguments.checkout / "src")}
      rival = start("checkout", our_command(folder, Path(root) / "other_cache", port), port, paths)
    for name in arguments.loads:
      figures = compare(LOADS[name], ours, rival, arguments.turns)
      result |= {f"{name}_{figure}": value for figure, value in figures.items()}
  show(result, arguments.json)


if __name__ == "__main__":
  main()
