"""A model made abstract: shapes, number formats and placement of every parameter before any array exists.

At run time parameters are a flat dict {path: array}; the modules are bound to them inside `jax.jit`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.param_factory import Buffer, UpdateStatistic
from maxtext.layers.parameter_paths import join, one_layer
from maxtext.models.decoder import Decoder
from maxtext.models.spec import DecoderSpec

Params = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Model:
  """What initialisation, restore, import, planning and parameter counts all read.

  Attributes:
    spec: of the decoder, and of its towers where it is a `ModelSpec`.
    params: {path: shape, dtype and sharding} of what is trained.
    buffers: the same for what no gradient touches: buffers of layers, and parameters that are not trained.
    statistics: the same for what layers measure over an update, and nothing keeps.
  """

  spec: DecoderSpec
  execution: ExecutionConfig
  params: dict[str, jax.ShapeDtypeStruct]
  buffers: dict[str, jax.ShapeDtypeStruct]
  statistics: dict[str, jax.ShapeDtypeStruct]
  _graph: Any
  _variables: tuple[tuple[str, tuple, type[nnx.Variable], dict[str, Any]], ...]

  @staticmethod
  def of(spec: DecoderSpec, execution: ExecutionConfig, trained: Callable[[str], bool] = lambda path: True) -> "Model":
    """Builds the modules with shapes for values; nothing is allocated. `trained` says which parameters are, by path."""
    graph, state = nnx.split(Decoder(spec, execution, seed=None))
    variables: list[tuple] = []
    params: dict[str, jax.ShapeDtypeStruct] = {}
    buffers: dict[str, jax.ShapeDtypeStruct] = {}
    statistics: dict[str, jax.ShapeDtypeStruct] = {}
    for path, variable in nnx.to_flat_state(state):
      name, value = join(*path), variable.get_value()
      variables.append((name, path, type(variable), variable.get_metadata()))
      sharding = execution.sharding.rules.sharding(execution.sharding.mesh, variable.axes, value.shape)
      struct = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
      own = buffers if isinstance(variable, Buffer) or not trained(name) else params
      (statistics if isinstance(variable, UpdateStatistic) else own)[name] = struct
    return Model(spec, execution, params, buffers, statistics, graph, tuple(variables))

  @property
  def size(self) -> int:
    """Number of parameters, trained or not, and of the buffers that a file of weights holds."""
    return sum(self.struct(name).size for name in self.weight_names)

  @property
  def weight_names(self) -> list[str]:
    """What a file of weights holds: every parameter and buffer but those that implementations of the matmul keep."""
    return [n for n, *_ in self._variables if "/matmul/" not in n and n not in self.statistics]

  @property
  def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
    """The named dimensions of every parameter and buffer."""
    return {name: metadata["axes"] for name, _, _, metadata in self._variables}

  @property
  def contracted(self) -> dict[str, tuple[int, int]]:
    """How many dimensions of each variable stack layers and experts, and how many after them are summed over."""
    return {name: (metadata["stacked"], metadata["contracted"]) for name, _, _, metadata in self._variables}

  @property
  def matrices(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Which dimensions of the stacked layers' weights are summed over and which appear; others are independent."""
    found = {}
    for name, _, _, metadata in self._variables:
      if metadata["contracted"] and metadata["axes"][0] == "layers":
        start, end = metadata["stacked"], len(metadata["axes"])
        cut = start + metadata["contracted"]
        found[name] = tuple(range(start, cut)), tuple(range(cut, end))
    return found

  def init(self, seed: jax.typing.ArrayLike) -> tuple[Params, Params]:
    """Initial parameters and buffers; call it under `jax.jit` with the shardings of the abstract trees."""
    _, state = nnx.split(Decoder(self.spec, self.execution, seed))
    values = _values(state)
    return {n: values[n] for n in self.params}, {n: values[n] for n in self.buffers}

  @cached_property
  def shapes(self) -> Decoder:
    """The decoder with shapes for values, to ask what it is made of."""
    return self._bound({**self.params, **self.buffers, **self.statistics})

  def bind(self, params: Params) -> Decoder:
    """The decoder with these parameters and buffers, stacked or from `unstack_layers`; statistics default to zero.

    It costs Python time, so call it inside `jax.jit`.
    """
    return self._bound({name: self._whole(params, name) for name, *_ in self._variables})

  def unstack_layers(self, params: Params) -> Params:
    """Takes parameters out of a dict; those of layers that are not looped over come back layer by layer, but where
    devices share the layers of a stack out among them.

    A CPU copies what it cuts out of a stack, in every step, and a loop's weights too. Stacked inside a program and
    cut there, they cost nothing: the compiler sees that it gets what it had.
    """
    dimensions, found = self.logical_axes, Params()
    while params:
      name, value = params.popitem()
      shared_out = any(self.struct(name).sharding.spec[:1])
      whole = self.execution.scan_layers or dimensions[name][:1] != ("layers",) or shared_out
      found |= {name: value} if whole else {one_layer(name, i): value[i] for i in range(value.shape[0])}
    return found

  def _whole(self, params: Params, name: str) -> jax.Array:
    if name in params:
      return params[name]
    if (statistic := self.statistics.get(name)) is not None:
      return jnp.zeros(statistic.shape, statistic.dtype)
    return jnp.stack([params[one_layer(name, i)] for i in range(self.struct(name).shape[0])])

  def _bound(self, values: Mapping[str, Any]) -> Decoder:
    state = [(path, kind(values[name], **metadata)) for name, path, kind, metadata in self._variables]
    return nnx.merge(self._graph, nnx.from_flat_state(state))

  def buffers_of(self, decoder: Decoder) -> Params:
    """The buffers and statistics as a decoder left them."""
    values = _values(nnx.state(decoder))
    return {n: values[n] for n in (*self.buffers, *self.statistics)}

  def end_update(self, params: Params, buffers: Params) -> Params:
    """The buffers after an update, from those and the statistics of all its micro-batches."""
    if not self.statistics:
      return buffers
    decoder = self.bind(params | buffers)
    for _, module in nnx.iter_modules(decoder):
      if hasattr(module, "end_update"):
        module.end_update()
    ended = self.buffers_of(decoder)
    return {name: ended[name] for name in self.buffers}

  def struct(self, name: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a parameter or buffer."""
    return self.params.get(name) or self.buffers.get(name) or self.statistics[name]


def _values(state: Any) -> Params:
  return {join(*path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
