"""Rollouts by another process: `maxtext rl ... --sampler` generates for the trainer that connects to it.

The two are JAX processes of their own. Parameters go from device to device through JAX's transfer server; prompts,
settings and answers are lines of JSON on a socket. One connection loads parameters and another one generates, so that
parameters can arrive while older ones generate. The network between them is trusted: nothing is encrypted, and who can
connect can generate.
"""

import json
import logging
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.errors import RunError
from maxtext.inference.llm import RequestOutput
from maxtext.inference.multimodal import PromptMedia
from maxtext.inference.sampling import SamplingParams
from maxtext.models.model import Model, Params
from maxtext.rl.engines import check_same_model, chunks, copies_on_sampler, sync_metrics
from maxtext.status_line import show_phase
from maxtext.training.live_engine import LiveEngine

if TYPE_CHECKING:
  from jax.experimental.transfer import TransferServer

_LOG = logging.getLogger(__name__)
_PATIENCE = 300.0  # seconds for the sampler to start
_BUSY = 90.0  # seconds for another trainer to leave
_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that vanished is noticed in a minute
_EXPERTS = "<i2"  # numbers of experts, as bytes
Message = dict[str, Any]


def split_address(address: str) -> tuple[str, int]:
  """Host and port of `sampler_address`."""
  host, _, port = address.rpartition(":")
  if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
    raise ConfigError(f"sampler_address={address}: write HOST:PORT.")
  return host, int(port)


class RemoteEngine:
  """The trainer's side. It connects with the first parameters, and waits for a sampler that is not there yet."""

  crowds_training = False

  def __init__(self, config: MaxTextConfig, model: Model) -> None:
    self.sync_metrics: dict[str, float] = {}
    self._address = config.sampler_address
    self._chunk = config.reshard_chunk_size or 1  # they are whole on one device of either side
    self._structs, self._agreed_keys = model.params | model.buffers, _agreed_keys(config)
    split_address(self._address)
    self._loads: _Connection | None = None
    self._transfers = 0

  def load(self, params: Params, version: int) -> Params:
    if self._loads is None:
      self._connect()
    assert self._loads is not None
    jax.block_until_ready(params)  # the step that makes them is no part of the transfer
    began, device = time.monotonic(), jax.local_devices()[0]
    for paths in chunks(params, self._chunk):
      whole = jax.device_put([params[path] for path in paths], SingleDeviceSharding(device))
      self._transfers += 1
      self._server.await_pull(self._transfers, whole)
      self._loads.ask({"do": "load", "transfer": self._transfers, "paths": paths})
    self._loads.ask({"do": "use", "version": version})
    self.sync_metrics = sync_metrics(params, time.monotonic() - began)
    return {}

  def generate(
    self,
    params: Params,
    version: int,
    prompts: Sequence[Sequence[int]],
    sampling_params: Sequence[SamplingParams],
    media: Sequence[PromptMedia | None] = (),
  ) -> list[RequestOutput]:
    assert not any(media), "a message has text alone"
    asked = {
      "do": "generate",
      "version": version,
      "prompts": [[int(token) for token in prompt] for prompt in prompts],
      "sampling_params": [asdict(each) for each in sampling_params],
    }
    found = self._requests.ask(asked)["outputs"]
    return [_output(prompt, one) for prompt, one in zip(prompts, found, strict=True)]

  def close(self, finished: bool) -> None:
    """Leaves the sampler, which ends after a finished run, and else waits for another trainer."""
    last = {"do": "end"} if finished else None
    if self._loads is not None:
      self._requests.close()
      self._loads.close(last)
    elif finished:  # a start that found nothing left to do
      with suppress(RunError):
        _Connection.to(self._address, patience=0.0).close(last)

  def _connect(self) -> None:
    show_phase(f"waiting for the sampler at {self._address}")
    self._loads, self._requests = (_Connection.to(self._address) for _ in range(2))
    self._server = _transfer_server(self._loads.own_host)
    about = {path: [list(struct.shape), str(struct.dtype)] for path, struct in self._structs.items()}
    self._loads.ask({"do": "begin", "from": self._server.address(), "weights": about, "keys": self._agreed_keys})


def serve_rollouts(config: MaxTextConfig, model: Model, engine: LiveEngine) -> None:
  """The sampler's side: generates for one trainer after the other, until a run has ended.

  A trainer that is lost may come back: it brings its parameters along.
  """
  sampler = _Sampler(config, model, engine)
  host, port = split_address(config.sampler_address)
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    listener = socket.create_server((host.strip("[]"), port), family=family)
  except OSError as error:
    raise ConfigError(f"sampler_address={config.sampler_address} cannot be listened on: {error.strerror}.") from None
  with listener:
    listener.settimeout(0.5)
    _LOG.info(f"maxtext: waiting for a trainer at {config.sampler_address}")
    while not sampler.ended.is_set():
      try:
        accepted, _ = listener.accept()
      except TimeoutError:
        continue
      threading.Thread(target=sampler.answer, args=(_Connection(accepted),), daemon=True).start()


class _Sampler:
  """Parameters by version, as many as a trainer can still ask for, and an engine."""

  def __init__(self, config: MaxTextConfig, model: Model, engine: LiveEngine) -> None:
    self.ended = threading.Event()
    self._engine, self._structs, self._agreed_keys = engine, model.params | model.buffers, _agreed_keys(config)
    self._kept = copies_on_sampler(config) - 1  # without the one that arrives
    self._free = threading.Semaphore()
    self._arriving: Params = {}
    self._versions: dict[int, Params] = {}
    self._server: TransferServer | None = None

  def answer(self, connection: "_Connection") -> None:
    """Answers what is asked on a connection, until the other side closes it."""
    known: dict[str, Callable[[Message], Message]] = {
      "begin": lambda asked: self._begin(asked, connection),
      "load": self._load,
      "use": self._use,
      "generate": self._generate,
      "end": self._end,
    }
    while (asked := connection.read()) is not None:
      try:
        found = known[asked["do"]](asked)
      except Exception as error:  # the trainer is told, and this process is there for the next one
        _LOG.debug("a request failed", exc_info=True)
        found = {"error": f"{type(error).__name__}: {error}"}
      if not connection.write(found):
        break
    connection.close()
    if connection.is_trainer:
      self._free.release()

  def _begin(self, asked: Message, connection: "_Connection") -> Message:
    if not self._free.acquire(timeout=_BUSY):
      raise RuntimeError("it generates for another trainer")
    connection.is_trainer = True
    theirs = {path: jax.ShapeDtypeStruct(tuple(shape), dtype) for path, (shape, dtype) in asked["weights"].items()}
    check_same_model(theirs, self._structs)
    for key, value in self._agreed_keys.items():
      if asked["keys"].get(key) != value:
        raise ConfigError(f"{key}={value} for the sampler, and {asked['keys'].get(key)} for the trainer.")
    self._versions, self._arriving = {}, {}
    if self._server is None:
      self._server = _transfer_server(connection.own_host)
    self._link = self._server.connect(asked["from"])
    _LOG.info("maxtext: a trainer has connected")
    return {}

  def _load(self, asked: Message) -> Message:
    own = SingleDeviceSharding(jax.local_devices()[0])
    structs = {path: self._structs[path] for path in asked["paths"]}
    wanted = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=own) for s in structs.values()]
    whole = self._link.pull(asked["transfer"], wanted)
    placed = jax.device_put(whole, [struct.sharding for struct in structs.values()])
    self._arriving |= dict(zip(structs, jax.block_until_ready(placed), strict=True))
    return {}

  def _use(self, asked: Message) -> Message:
    versions = self._versions | {int(asked["version"]): self._arriving}
    self._versions, self._arriving = dict(list(versions.items())[-self._kept :]), {}
    return {}

  def _generate(self, asked: Message) -> Message:
    sampling_params = [SamplingParams(**each) for each in asked["sampling_params"]]
    version = int(asked["version"])
    found = self._engine.generate(self._versions[version], version, asked["prompts"], sampling_params)
    return {"outputs": [_as_message(output) for output in found]}

  def _end(self, asked: Message) -> Message:
    self.ended.set()
    return {}


class _Connection:
  """Lines of JSON, each of which is answered by one."""

  def __init__(self, connected: socket.socket) -> None:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
      if hasattr(socket, name):
        connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    self.own_host, self.is_trainer = connected.getsockname()[0], False
    self._socket, self._file, self._lock = connected, connected.makefile("rwb"), threading.Lock()

  @staticmethod
  def to(address: str, patience: float = _PATIENCE) -> "_Connection":
    """A connection to a sampler, which may start later."""
    host, port = split_address(address)
    until = time.monotonic() + patience
    while True:
      try:
        return _Connection(socket.create_connection((host.strip("[]"), port), timeout=10))
      except OSError as error:
        if time.monotonic() > until:
          raise RunError(
            f"there is no sampler at sampler_address={address} ({error}): start one with the same keys and --sampler."
          ) from None
        time.sleep(0.5)

  def ask(self, message: Message) -> Message:
    """The answer to a message. Other threads wait."""
    with self._lock:
      found = self.read() if self.write(message) else None
    if found is None:
      raise RunError("the sampler was lost: start it again with the same keys and --sampler, and then this run.")
    if "error" in found:
      raise RunError(f"the sampler could not do its part: {found['error']}")
    return found

  def read(self) -> Message | None:
    """The next message; None where the other side is gone."""
    try:
      line = self._file.readline()
      return json.loads(line) if line.endswith(b"\n") else None
    except (OSError, ValueError):
      return None

  def write(self, message: Message) -> bool:
    """Whether a message could be sent."""
    try:
      self._file.write(json.dumps(message).encode() + b"\n")
      self._file.flush()
    except (OSError, ValueError):
      return False
    return True

  def close(self, last: Message | None = None) -> None:
    """Sends a last message, and closes the connection."""
    if last is not None and self.write(last):
      self.read()
    for closed in (self._file, self._socket):
      with suppress(OSError):
        closed.close()


def _transfer_server(host: str) -> "TransferServer":
  try:
    from jax.experimental.transfer import start_transfer_server
  except (AttributeError, ImportError):
    raise ConfigError("sampler_address: JAX has no transfer server on this platform: leave it out.") from None
  address = f"[{host}]:0" if ":" in host else f"{host}:0"
  return start_transfer_server(jax.local_devices()[0].client, address, [address])


def _agreed_keys(config: MaxTextConfig) -> Message:
  """What trainer and sampler must agree on beside the model: lengths of prompts and outputs, and versions to keep."""
  lengths = "max_target_length", "max_prefill_predict_length"
  keys = (*lengths, "off_policy_steps", "num_iterations", "rl_environment", "routing_replay")
  return {key: getattr(config, key) for key in keys}


def _as_message(output: RequestOutput) -> Message:
  fields = ("text", "token_ids", "finish_reason", "versions", "logprobs")
  found, routed = {name: getattr(output, name) for name in fields}, output.routed_experts
  return found if routed is None else found | {"routed_experts": b64encode(routed.astype(_EXPERTS).tobytes()).decode()}


def _output(prompt: Sequence[int], found: Mapping[str, Any]) -> RequestOutput:
  return RequestOutput(
    tuple(prompt),
    found["text"],
    tuple(found["token_ids"]),
    found["finish_reason"],
    tuple(found["versions"]),
    tuple(found["logprobs"]),
    routed_experts=_experts(found, len(prompt) + len(found["token_ids"]) - 1),
  )


def _experts(found: Mapping[str, Any], tokens: int) -> np.ndarray | None:
  if "routed_experts" not in found:
    return None
  return np.frombuffer(b64decode(found["routed_experts"]), _EXPERTS).astype(np.int16).reshape(tokens, -1)
