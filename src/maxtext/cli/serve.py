"""`maxtext serve`: a trained model behind OpenAI's protocol."""

import argparse
import math
import os
import sys
from functools import partial
from typing import Any

from maxtext.cli.decode import add_run_words, folder_name, load_run, resolve_run
from maxtext.configs import ConfigError
from maxtext.serving.api_keys import API_KEYS, is_loopback, read_keys


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "serve",
    help="serve a trained model over HTTP",
    description="Serve a trained model: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. "
    f"API keys are taken from {API_KEYS}, separated by commas, or --api-key-file; without any, everyone may ask.",
  )
  add_run_words(parser)
  parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default 127.0.0.1)")
  parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default 8000)")
  parser.add_argument("--name", metavar="NAME", help="of the model, for clients (default: the run's or the model's)")
  parser.add_argument("--max-waiting", type=int, default=256, metavar="N", help="beyond it, 429 (default 256)")
  parser.add_argument(
    "--max-waiting-per-client", type=int, metavar="N", help="of one key, or address without keys (default: half)"
  )
  parser.add_argument("--max-body", type=int, default=2**20, metavar="BYTES", help="of a request (default 1 MiB)")
  parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds for a request (default 600)")
  parser.add_argument("--grace", type=float, default=60, metavar="S", help="seconds to end after SIGTERM (default 60)")
  parser.add_argument("--max-connections", type=int, default=1024, metavar="N", help="at once (default 1024)")
  parser.add_argument(
    "--max-connections-per-address", type=int, default=128, metavar="N", help="raise it behind a proxy (default 128)"
  )
  parser.add_argument("--header-timeout", type=float, default=10, metavar="S", help="to send a header (default 10)")
  parser.add_argument("--body-timeout", type=float, default=30, metavar="S", help="to send a body (default 30)")
  parser.add_argument("--write-timeout", type=float, default=30, metavar="S", help="to read some (default 30)")
  parser.add_argument("--api-key-file", metavar="FILE", help=f"an API key on each line, instead of {API_KEYS}")
  parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
  config = resolve_run(arguments.overrides, arguments.strict)
  keys = read_keys(os.environ, arguments.api_key_file)
  for flag in ("max_waiting", "max_waiting_per_client", "max_body", "max_connections", "max_connections_per_address"):
    if (given := getattr(arguments, flag)) is not None and given < 1:
      raise ConfigError(f"--{flag.replace('_', '-')} {given}: at least 1.")
  for flag in ("timeout", "grace", "header_timeout", "body_timeout", "write_timeout"):
    if not 0 < (seconds := getattr(arguments, flag)) < math.inf:  # nor a NaN
      raise ConfigError(f"--{flag.replace('_', '-')} {seconds}: more than 0 seconds, and not for ever.")
  try:
    import fastapi  # noqa: F401
    import llguidance  # noqa: F401
    import uvicorn  # noqa: F401
  except ImportError as missing:
    raise ConfigError(f"serve needs {missing.name}: pip install 'maxtext[serve]'.") from None
  from maxtext.serving.front import serve
  from maxtext.serving.limits import ConnectionLimits, Limits

  a = arguments
  connections = ConnectionLimits(
    a.max_connections, a.max_connections_per_address, a.header_timeout, a.body_timeout, a.write_timeout
  )
  limits = Limits(a.max_waiting, a.max_waiting_per_client, a.max_body, a.timeout, a.grace, keys, connections)
  if not keys and not is_loopback(a.host):
    print(
      f"maxtext: --host {a.host} takes requests of everyone who can reach it: set {API_KEYS} or --api-key-file.",
      file=sys.stderr,
    )
  name = a.name or config.run_name or folder_name(config) or config.model_name
  serve(partial(load_run, a, config), name, a.host, a.port, limits)
  return 0
