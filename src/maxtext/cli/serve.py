"""`maxtext serve`: an OpenAI-compatible server of a trained model."""

import argparse
import math
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from maxtext.cli.decode import add_model_arguments, folder_name, key_overrides, load_model, resolve_model_config
from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.inference.adapter_options import AdapterOptions
from maxtext.serving.api_keys import API_KEYS, is_loopback, read_api_keys

if TYPE_CHECKING:
  from maxtext.inference.inference_model import InferenceModel

_MOST_UNROLLED = 32  # layers


def add_command(commands: Any) -> None:
  """Adds the command to the parser."""
  parser = commands.add_parser(
    "serve",
    help="serve a trained model over HTTP",
    description="Serve a trained model: /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/models, /tokenize, "
    "/health, /metrics, their fields at /docs, and a page to chat at /. "
    f"API keys come from {API_KEYS}, separated by commas, or --api-key-file; without any, all clients are accepted.",
  )
  add_model_arguments(parser)
  parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
  parser.add_argument(
    "--port", type=int, default=8000, metavar="N", help="port to listen on; 0 chooses a free one (default 8000)"
  )
  parser.add_argument(
    "--served-model-name", metavar="NAME", help="name of the model in the API (default: the run or model name)"
  )
  parser.add_argument(
    "--max-queued-requests", type=int, default=256, metavar="N", help="queue length; beyond it, 429 (default 256)"
  )
  parser.add_argument(
    "--max-queued-requests-per-client",
    type=int,
    metavar="N",
    help="queue length for one API key, or for one address without keys (default: half)",
  )
  parser.add_argument(
    "--max-body-bytes", type=int, default=2**20, metavar="BYTES", help="size of a request body (default 1 MiB)"
  )
  parser.add_argument(
    "--request-timeout", type=float, default=600, metavar="S", help="seconds for a request (default 600)"
  )
  parser.add_argument(
    "--shutdown-timeout",
    type=float,
    default=60,
    metavar="S",
    help="seconds that accepted requests have to finish after SIGTERM (default 60)",
  )
  parser.add_argument("--max-connections", type=int, default=1024, metavar="N", help="open connections (default 1024)")
  parser.add_argument(
    "--max-connections-per-address", type=int, default=128, metavar="N", help="raise it behind a proxy (default 128)"
  )
  parser.add_argument(
    "--header-timeout", type=float, default=10, metavar="S", help="seconds to send a header (default 10)"
  )
  parser.add_argument("--body-timeout", type=float, default=30, metavar="S", help="seconds to send a body (default 30)")
  parser.add_argument(
    "--write-timeout", type=float, default=30, metavar="S", help="seconds to read some of a response (default 30)"
  )
  parser.add_argument("--access-log", action="store_true", help="log every response in one line, on stderr")
  parser.add_argument("--no-chat-page", action="store_true", help="have no page to chat at /")
  parser.add_argument("--api-key-file", metavar="FILE", help=f"an API key on each line, instead of {API_KEYS}")
  parser.add_argument(
    "--lora",
    action="append",
    default=[],
    metavar="NAME=FOLDER",
    help="serve the LoRA adapter of a PEFT folder as the model NAME; may be repeated",
  )
  parser.add_argument(
    "--lora-root",
    metavar="FOLDER",
    help="let clients load adapters below this folder and unload adapters, by /v1/load_lora_adapter and "
    "/v1/unload_lora_adapter; needs API keys (default: they cannot)",
  )
  parser.add_argument(
    "--max-loras",
    type=int,
    metavar="N",
    help="adapters that are loaded at once (default: as many as --lora; with --lora-root, at least 8)",
  )
  parser.add_argument(
    "--max-lora-rank",
    type=int,
    metavar="R",
    help="largest rank of an adapter (default: the largest of --lora; with --lora-root, at least 16)",
  )
  parser.add_argument(
    "--allowed-media-host",
    action="append",
    default=[],
    metavar="HOST[:PORT]",
    help="fetch media of requests from this host; may be repeated. A host of a private network is named by its address "
    "(default: nothing is fetched)",
  )
  parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
  config = resolve_model_config(key_overrides(arguments), arguments.strict)
  api_keys = read_api_keys(os.environ, arguments.api_key_file)
  for flag in (
    "max_queued_requests",
    "max_queued_requests_per_client",
    "max_body_bytes",
    "max_connections",
    "max_connections_per_address",
  ):
    if (given := getattr(arguments, flag)) is not None and given < 1:
      raise ConfigError(f"--{flag.replace('_', '-')} {given}: it must be at least 1.")
  for flag in ("request_timeout", "shutdown_timeout", "header_timeout", "body_timeout", "write_timeout"):
    if not 0 < (seconds := getattr(arguments, flag)) < math.inf:  # rejects NaN, too
      raise ConfigError(f"--{flag.replace('_', '-')} {seconds}: it must be more than 0 and finite.")
  adapter_options = _adapter_options(arguments)
  if arguments.lora_root and not api_keys:
    raise ConfigError(f"--lora-root lets clients load adapters, and so needs API keys: set {API_KEYS}.")
  try:
    import fastapi  # noqa: F401
    import llguidance  # noqa: F401
    import uvicorn  # noqa: F401
  except ImportError as missing:
    raise ConfigError(f"serve needs {missing.name}: pip install 'maxtext[serve]'.") from None
  from maxtext.serving.fetch import FetchLimits
  from maxtext.serving.frontend import serve
  from maxtext.serving.limits import ConnectionLimits, ServerLimits

  a = arguments
  connections = ConnectionLimits(
    a.max_connections, a.max_connections_per_address, a.header_timeout, a.body_timeout, a.write_timeout
  )
  limits = ServerLimits(
    a.max_queued_requests,
    a.max_queued_requests_per_client,
    a.max_body_bytes,
    a.request_timeout,
    a.shutdown_timeout,
    api_keys,
    a.lora_root and os.path.abspath(os.path.expanduser(a.lora_root)),
    connections,
    FetchLimits(tuple(a.allowed_media_host)),
  )
  if not api_keys and not is_loopback(a.host):
    print(
      f"maxtext: --host {a.host} accepts every client that can reach it: set {API_KEYS} or --api-key-file.",
      file=sys.stderr,
    )
  name = a.served_model_name or config.run_name or folder_name(config) or config.model_name
  if adapter_options and name in adapter_options.folders:
    raise ConfigError(f"--lora {name}: the base model has that name: choose another, or set --served-model-name.")
  load = partial(_load, a, config, adapter_options)
  serve(load, name, a.host, a.port, limits, a.access_log, not a.no_chat_page)
  return 0


def _load(
  arguments: argparse.Namespace, config: MaxTextConfig, adapter_options: AdapterOptions | None
) -> "InferenceModel":
  """The model, in the engine's process. On a CPU its layers do not run in a loop, unless `scan_layers` is given: every
  step would copy their weights out of the stack. What many layers take to compile is more than that."""
  import jax

  given = "scan_layers" in config.model_fields_set  # by a word, a file or the environment
  if not given and config.base_num_decoder_layers <= _MOST_UNROLLED and jax.default_backend() == "cpu":
    config = config.model_copy(update={"scan_layers": False})
  return load_model(arguments, config, adapter_options)


def _adapter_options(arguments: argparse.Namespace) -> AdapterOptions | None:
  """The adapters to serve; None if there are none and clients cannot load any."""
  a, folders = arguments, dict[str, str]()
  for word in a.lora:
    name, separator, folder = word.partition("=")
    if not separator or not folder:
      raise ConfigError(f"--lora {word}: write --lora NAME=FOLDER.")
    if name in folders:
      raise ConfigError(f"--lora {name}: two adapters have that name.")
    folders[name] = folder
  if not folders and not a.lora_root:
    for flag in ("max_loras", "max_lora_rank"):
      if getattr(a, flag) is not None:
        raise ConfigError(f"--{flag.replace('_', '-')} needs --lora or --lora-root.")
    return None
  if a.lora_root and not os.path.isdir(os.path.expanduser(a.lora_root)):
    raise ConfigError(f"--lora-root {a.lora_root}: there is no such folder.")
  return AdapterOptions(folders, a.max_loras, a.max_lora_rank, room=bool(a.lora_root))
