"""Where rollouts are generated: with the trainer's own arrays, or with parameters that are sent to other devices."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.inference.llm import RequestOutput
from maxtext.inference.multimodal import PromptMedia
from maxtext.inference.sampling import SamplingParams
from maxtext.models.model import Model, Params
from maxtext.training.live_engine import LiveEngine


class RolloutEngine(Protocol):
  """Generates with the parameters of a policy.

  Attributes:
    sync_metrics: of the last transfer of parameters; empty where none are transferred.
    crowds_training: what `load` returns takes memory of the devices that train, and is to be let go before they do.
  """

  sync_metrics: dict[str, float]
  crowds_training: bool

  def load(self, params: Params, version: int) -> Params:
    """The parameters where `generate` reads them, whatever the trainer does with its own afterwards. For the thread
    that trains."""

  def generate(
    self,
    params: Params,
    version: int,
    prompts: Sequence[Sequence[int]],
    sampling_params: Sequence[SamplingParams],
    media: Sequence[PromptMedia | None] = (),
  ) -> list[RequestOutput]:
    """Outputs, in the order of the prompts, with their media if any has some. `params` are what `load` returned."""

  def close(self, finished: bool) -> None:
    """The run has ended, or reached its last update (`finished`)."""


class SharedEngine:
  """On the trainer's devices, with its arrays; with `keep`, with a copy of them, which the trainer goes on beside."""

  crowds_training = False

  def __init__(self, engine: LiveEngine, keep: bool) -> None:
    self.sync_metrics: dict[str, float] = {}
    self.generate, self._keep = engine.generate, keep

  def load(self, params: Params, version: int) -> Params:
    return jax.tree.map(jnp.copy, params) if self._keep else params

  def close(self, finished: bool) -> None:
    pass


class SeparateEngine:
  """On devices of its own in this process, with parameters in the layout of its model."""

  crowds_training = False

  def __init__(self, engine: LiveEngine, model: Model, chunk: int | None) -> None:
    self.sync_metrics: dict[str, float] = {}
    self.generate, self._structs, self._chunk = engine.generate, model.params | model.buffers, chunk

  def load(self, params: Params, version: int) -> Params:
    jax.block_until_ready(params)  # the step that makes them is no part of the transfer
    began = time.monotonic()
    placed: Params = {}
    for paths in chunks(params, self._chunk):
      shardings = {path: self._structs[path].sharding for path in paths}
      placed |= jax.block_until_ready(jax.device_put({path: params[path] for path in paths}, shardings))
    self.sync_metrics = sync_metrics(params, time.monotonic() - began)
    return placed

  def close(self, finished: bool) -> None:
    pass


class ProcessEngine:
  """One of several processes, each of which generates its share on its devices, with all parameters brought there.

  Bringing them is a collective, and generating is none: how long a process takes to answer is its own matter.

  Args:
    engine: of this process.
    model: its model, on the part of the trainer's mesh that this process has.
    mesh: the trainer's.
  """

  crowds_training = True

  def __init__(self, engine: LiveEngine, model: Model, mesh: Mesh) -> None:
    self.sync_metrics: dict[str, float] = {}
    self.generate, self._structs = engine.generate, model.params | model.buffers
    parts = [process_part(mesh, process) for process in range(jax.process_count())]
    self._all_parts = Mesh(np.stack(parts), ("processes", *mesh.axis_names))

  def load(self, params: Params, version: int) -> Params:
    jax.block_until_ready(params)  # the step that makes them is no part of the transfer
    began = time.monotonic()
    placed: Params = {}
    for path, struct in self._structs.items():
      # One after the other: of those started together, a process may run some that wait for another process, which runs
      # others and waits for this one.
      everywhere = jax.device_put(params[path], NamedSharding(self._all_parts, _spec(struct)))
      placed[path] = _local(jax.block_until_ready(everywhere), struct)
    self.sync_metrics = sync_metrics(params, time.monotonic() - began)
    return placed

  def close(self, finished: bool) -> None:
    pass


def process_part(mesh: Mesh, process: int) -> np.ndarray:
  """The devices of a process, as they lie in a mesh.

  Raises:
    ConfigError: they are no part along its axes.
  """
  own = np.vectorize(lambda device: device.process_index == process, otypes=[bool])(mesh.devices)
  axes = range(own.ndim)
  places = [np.flatnonzero(own.any(axis=tuple(other for other in axes if other != axis))) for axis in axes]
  if not own[np.ix_(*places)].all():
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    raise ConfigError(
      f"use_grpo=true: every process generates on its part of the mesh, and the devices of process {process} are no "
      f"part of {sizes} along its axes: choose axes that processes divide."
    )
  return mesh.devices[np.ix_(*places)]


def _spec(struct: jax.ShapeDtypeStruct) -> PartitionSpec:
  assert isinstance(struct.sharding, NamedSharding)
  return struct.sharding.spec


def _local(array: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
  """The array that the devices of this process hold among themselves."""
  shards = [shard.data for shard in array.addressable_shards]
  return jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, shards)


def chunks(params: Mapping[str, jax.Array], size: int | None) -> Iterator[list[str]]:
  """The paths of arrays that are moved at once."""
  paths = list(params)
  for i in range(0, len(paths), size or len(paths)):
    yield paths[i : i + (size or len(paths))]


def sync_metrics(params: Mapping[str, jax.Array], seconds: float) -> dict[str, float]:
  """What a transfer took."""
  return {"weight_sync_seconds": seconds, "weight_sync_bytes": float(sum(a.nbytes for a in params.values()))}


def check_same_model(trainer: Mapping[str, jax.ShapeDtypeStruct], sampler: Mapping[str, jax.ShapeDtypeStruct]) -> None:
  """Raises where the sampler's parameters are not those of the trainer."""
  ours, theirs = ({path: (tuple(s.shape), str(s.dtype)) for path, s in side.items()} for side in (trainer, sampler))
  for path in sorted(ours.keys() | theirs.keys()):
    if ours.get(path) != theirs.get(path):
      raise ConfigError(
        f"{path} is {_named(ours.get(path))} for the trainer and {_named(theirs.get(path))} for the sampler: start "
        f"both with the same keys, and train without pipeline parallelism."
      )


def generates_ahead(config: MaxTextConfig) -> bool:
  """Whether rollouts are generated while the trainer goes on."""
  return config.use_agentic_rollout and config.off_policy_steps > 0


def copies_on_sampler(config: MaxTextConfig) -> int:
  """Most copies of the parameters at once where they are sent: those that a rollout may still need, and the one that
  arrives. An evaluation loads a version too."""
  c = config
  if c.sampler_address:
    return c.off_policy_steps * c.num_iterations + 3
  return (c.off_policy_steps if c.use_agentic_rollout else 0) + 2


def engine_slots(config: MaxTextConfig, engines: int = 1) -> int:
  """Sequences that one of the engines generates at once."""
  c = config
  prompts = c.batch_size if c.rollout_micro_batch_size == -1 else c.rollout_micro_batch_size
  limits = c.max_concurrency if c.use_agentic_rollout else None, c.max_num_seqs
  return -(-min([prompts * c.num_generations, *(limit for limit in limits if limit is not None)]) // engines)


def _named(shape: tuple[tuple[int, ...], str] | None) -> str:
  return "no weight" if shape is None else f"{shape[1]}{list(shape[0])}"
