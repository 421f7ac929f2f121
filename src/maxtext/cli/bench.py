"""`maxtext bench serve`: how fast a model answers, by itself or behind a running server."""

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from maxtext.bench.load import Load
from maxtext.cli.decode import add_run_words, load_run, resolve_run
from maxtext.cli.serve import API_KEYS
from maxtext.configs import ConfigError


def add_commands(commands: Any) -> None:
  """Adds `bench serve` to the parser."""
  parser = commands.add_parser("bench", help="measure how fast a model answers")
  actions = parser.add_subparsers(required=True, metavar="ACTION")
  serve = actions.add_parser(
    "serve",
    help="the engine here, or a running server",
    description="Time prefill, generation and many requests at once on the devices that are here; or, with --url, what "
    f"clients of a running server wait for. Its key is the first of {API_KEYS}.",
  )
  add_run_words(serve)
  serve.add_argument("--url", metavar="URL", help="of a running server of OpenAI's protocol, before /v1")
  serve.add_argument("--model", metavar="NAME", help="to ask the server for (default: the first that it has)")
  serve.add_argument("--rate", type=float, metavar="R", help="requests a second (default: all at once)")
  serve.add_argument("--requests", type=int, default=64, metavar="N", help="(default 64)")
  serve.add_argument("--prompt-tokens", type=int, default=32, metavar="N", help="of each prompt (default 32)")
  serve.add_argument("--max-tokens", type=int, default=32, metavar="N", help="of each answer (default 32)")
  serve.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default 0)")
  serve.add_argument("--json", action="store_true", help="print JSON instead of a table")
  serve.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
  for flag in ("rate", "requests", "prompt_tokens", "max_tokens"):
    if (value := getattr(arguments, flag)) is not None and value <= 0:
      raise ConfigError(f"--{flag.replace('_', '-')} {value}: more than 0.")
  load = Load(arguments.requests, arguments.prompt_tokens, arguments.max_tokens, arguments.seed)
  (_bench_server if arguments.url else _bench_engine)(arguments, load)
  return 0


def _bench_engine(arguments: argparse.Namespace, load: Load) -> None:
  if given := [flag for flag in ("rate", "model") if getattr(arguments, flag)]:
    raise ConfigError(f"--{given[0]} is of a running server: add --url.")
  config = resolve_run(arguments.overrides, arguments.strict)
  from maxtext.bench.engine import bench_engine

  timings = bench_engine(load_run(arguments, config), load)
  if arguments.json:
    print(json.dumps([asdict(timing) for timing in timings]))
    return
  print(f"{'':28} {'ms':>10} {'tokens/s':>12}")
  for timing in timings:
    print(f"{timing.what:28} {timing.milliseconds:10.2f} {timing.tokens_per_second:12,.0f}")


def _bench_server(arguments: argparse.Namespace, load: Load) -> None:
  if given := [*arguments.overrides, *(f"--{flag}" for flag in ("ahead", "draft") if getattr(arguments, flag))]:
    raise ConfigError(f"{given[0]} is of a model here: leave it out, or --url.")
  from maxtext.bench.server import Server, bench_server

  server = Server(arguments.url, os.environ.get(API_KEYS, "").split(",")[0])
  report = bench_server(server, arguments.model or server.model(), load, arguments.rate)
  if arguments.json:
    print(json.dumps(asdict(report)))
    return
  print(
    f"{report.answered} answered, {report.failed} failed in {report.seconds:.1f} s: "
    f"{report.requests_per_second:.2f} requests/s, {report.tokens_per_second:,.0f} tokens/s"
  )
  print(f"{'ms':14} {'p50':>10} {'p90':>10} {'p99':>10}")
  rows = {"first token": report.first_token, "next token": report.next_token, "whole answer": report.whole}
  for name, waits in rows.items():
    print(f"{name:14} {waits.p50:10.1f} {waits.p90:10.1f} {waits.p99:10.1f}")
