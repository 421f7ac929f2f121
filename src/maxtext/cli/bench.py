"""`maxtext bench serve`: offline throughput of a model, or the latency of a running server."""

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from maxtext.bench.workload import Workload
from maxtext.cli.decode import add_model_arguments, key_overrides, load_model, resolve_model_config
from maxtext.cli.serve import API_KEYS
from maxtext.configs import ConfigError


def add_commands(commands: Any) -> None:
  """Adds `bench serve` to the parser."""
  parser = commands.add_parser("bench", help="measure inference throughput and latency")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  serve = actions.add_parser(
    "serve",
    help="offline throughput, or the latency of a running server",
    description="Time prefill, decode steps and many requests at once on the local devices; or, with --base-url, "
    f"measure TTFT, ITL, TPOT and throughput of a running server. Its API key is the first of {API_KEYS}.",
  )
  add_model_arguments(serve)
  serve.add_argument("--base-url", metavar="URL", help="a running server of the OpenAI API, without /v1")
  serve.add_argument("--model", metavar="NAME", help="served model name (default: the first that the server lists)")
  serve.add_argument("--request-rate", type=float, metavar="R", help="requests per second (default: all at once)")
  serve.add_argument("--num-prompts", type=int, default=64, metavar="N", help="number of requests (default 64)")
  serve.add_argument("--input-len", type=int, default=32, metavar="N", help="tokens of each prompt (default 32)")
  serve.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens of each output (default 32)")
  serve.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrival times (default 0)")
  serve.add_argument("--json", action="store_true", help="print JSON instead of a table")
  serve.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
  for flag in ("request_rate", "num_prompts", "input_len", "output_len"):
    if (value := getattr(arguments, flag)) is not None and value <= 0:
      raise ConfigError(f"--{flag.replace('_', '-')} {value}: it must be more than 0.")
  workload = Workload(arguments.num_prompts, arguments.input_len, arguments.output_len, arguments.seed)
  (_bench_serving if arguments.base_url else _bench_throughput)(arguments, workload)
  return 0


def _bench_throughput(arguments: argparse.Namespace, workload: Workload) -> None:
  if given := [flag for flag in ("request_rate", "model") if getattr(arguments, flag)]:
    raise ConfigError(f"--{given[0].replace('_', '-')} is for a running server: add --base-url.")
  config = resolve_model_config(key_overrides(arguments), arguments.strict)
  from maxtext.bench.throughput import bench_throughput

  timings = bench_throughput(load_model(arguments, config), workload)
  if arguments.json:
    print(json.dumps([asdict(timing) for timing in timings]))
    return
  print(f"{'':32} {'ms':>10} {'tokens/s':>12}")
  for timing in timings:
    print(f"{timing.stage:32} {timing.milliseconds:10.2f} {timing.tokens_per_second:12,.0f}")


def _bench_serving(arguments: argparse.Namespace, workload: Workload) -> None:
  flags = [f for f in ("num_speculative_tokens", "draft_model") if getattr(arguments, f)]
  if given := [*arguments.overrides, *(f"--{flag.replace('_', '-')}" for flag in flags)]:
    raise ConfigError(f"{given[0]} is for a local model: leave it out, or leave out --base-url.")
  from maxtext.bench.serving import CompletionsClient, bench_serving

  client = CompletionsClient(arguments.base_url, os.environ.get(API_KEYS, "").split(",")[0])
  metrics = bench_serving(client, arguments.model or client.first_model(), workload, arguments.request_rate)
  if arguments.json:
    print(json.dumps(asdict(metrics)))
    return
  print(
    f"{metrics.completed} completed, {metrics.failed} failed in {metrics.duration_seconds:.1f} s: "
    f"{metrics.request_throughput:.2f} requests/s, {metrics.output_throughput:,.0f} output tokens/s"
  )
  print(f"{'ms':32} {'p50':>10} {'p90':>10} {'p99':>10}")
  rows = {
    "time to first token (TTFT)": metrics.ttft_ms,
    "inter-token latency (ITL)": metrics.itl_ms,
    "time per output token (TPOT)": metrics.tpot_ms,
    "end-to-end latency": metrics.e2e_latency_ms,
  }
  for name, latency in rows.items():
    print(f"{name:32} {latency.p50:10.1f} {latency.p90:10.1f} {latency.p99:10.1f}")
