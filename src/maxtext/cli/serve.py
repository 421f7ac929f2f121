"""`maxtext serve`: a trained model behind OpenAI's protocol."""

import argparse
import os
from typing import Any

from maxtext.cli.decode import add_run_words, load_run, resolve_run
from maxtext.configs import ConfigError

API_KEYS = "MAXTEXT_API_KEYS"


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "serve",
    help="serve a trained model over HTTP",
    description="Serve a trained model: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. "
    f"API keys are taken from {API_KEYS}, separated by commas; without any, everyone may ask.",
  )
  add_run_words(parser)
  parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default 127.0.0.1)")
  parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default 8000)")
  parser.add_argument("--name", metavar="NAME", help="of the model, for clients (default: the run's or the model's)")
  parser.add_argument("--max-waiting", type=int, default=256, metavar="N", help="beyond it, 429 (default 256)")
  parser.add_argument("--max-body", type=int, default=2**20, metavar="BYTES", help="of a request (default 1 MiB)")
  parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds for a request (default 600)")
  parser.add_argument("--grace", type=float, default=60, metavar="S", help="seconds to end after SIGTERM (default 60)")
  parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
  config = resolve_run(arguments.words)
  try:
    import fastapi  # noqa: F401
    import llguidance  # noqa: F401
    import uvicorn  # noqa: F401
  except ImportError as missing:
    raise ConfigError(f"serve needs {missing.name}: pip install 'maxtext[serve]'.") from None
  from maxtext.inference.server import Limits, serve

  keys = tuple(key for key in os.environ.get(API_KEYS, "").split(",") if key)
  limits = Limits(arguments.max_waiting, arguments.max_body, arguments.timeout, arguments.grace, keys)
  name = arguments.name or config.run_name or config.model_name
  serve(load_run(arguments, config), name, arguments.host, arguments.port, limits)
  return 0
