"""An abstract model: shape, dtype and sharding of every parameter before any array exists.

At run time parameters are a flat dict {path: array}; the modules are bound to them inside `jax.jit`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.param_factory import Buffer, UpdateStatistic
from maxtext.layers.parameter_paths import all_layers, join, one_layer, outputs_first
from maxtext.layers.quantized_weight import is_scale
from maxtext.models.decoder import Decoder
from maxtext.models.spec import DecoderSpec

Params = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Model:
  """The abstract model that initialisation, checkpoint restore, weight import, planning and parameter counts read.

  Attributes:
    spec: the decoder, with its towers if it is a `ModelSpec`.
    params: {path: shape, dtype and sharding} of the trained parameters.
    buffers: the same for everything without gradients: buffers of layers, and frozen parameters.
    statistics: the same for what layers measure during one update. Checkpoints do not store them.
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
    """Builds the modules with shapes for values and allocates nothing. `trained` selects trained parameters by path."""
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
      target = buffers if isinstance(variable, Buffer) or not trained(name) else params
      (statistics if isinstance(variable, UpdateStatistic) else target)[name] = struct
    return Model(spec, execution, params, buffers, statistics, graph, tuple(variables))

  @property
  def size(self) -> int:
    """Number of elements of all parameters, trained or frozen, and of the buffers that a weight file holds."""
    return sum(map(self.count, self.weight_names))

  def count(self, path: str) -> int:
    """Number of elements of a parameter; of a weight at rest in few bits, those that it stands for, and none of its
    scales."""
    if is_scale(path):
      return 0
    packed = self.execution.weight_format.per_item if f"{path}_scale" in self.logical_axes else 1
    return self.struct(path).size * packed

  @property
  def weight_names(self) -> list[str]:
    """Paths of the weights in a weight file: all parameters and buffers, except the state of matmul implementations."""
    return [n for n, *_ in self._variables if "/matmul/" not in n and n not in self.statistics]

  @property
  def matmul_buffers(self) -> list[str]:
    """Paths of the buffers of matmul implementations, which weight files do not have."""
    return [
      n for n, _, kind, _ in self._variables if "/matmul/" in n and issubclass(kind, Buffer) and n in self.buffers
    ]

  @property
  def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of every parameter and buffer."""
    return {name: metadata["axes"] for name, _, _, metadata in self._variables}

  @property
  def contracted(self) -> dict[str, tuple[int, int]]:
    """{path: (number of leading layer and expert dimensions, number of contracted dimensions after them)}."""
    return {name: (metadata["stacked"], metadata["contracted"]) for name, _, _, metadata in self._variables}

  @property
  def matrices(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """{path: (contracted dimensions, output dimensions)} of stacked layers' weights; the rest are batch dimensions."""
    found = {}
    for name, _, _, metadata in self._variables:
      if metadata["contracted"] and metadata["axes"][0] == "layers":
        start, end = metadata["stacked"], len(metadata["axes"])
        split = start + metadata["contracted"]
        found[name] = tuple(range(start, split)), tuple(range(split, end))
    return found

  def init(self, seed: jax.typing.ArrayLike) -> tuple[Params, Params]:
    """Returns initial parameters and buffers. Call it under `jax.jit` with the shardings of the abstract trees."""
    _, state = nnx.split(Decoder(self.spec, self.execution, seed))
    values = _values(state)
    return {n: values[n] for n in self.params}, {n: values[n] for n in self.buffers}

  @cached_property
  def shapes(self) -> Decoder:
    """The decoder with shapes for values, to inspect its modules."""
    return self._bound({**self.params, **self.buffers, **self.statistics})

  def bind(self, params: Params) -> Decoder:
    """Returns the decoder with these parameters and buffers, stacked or from `unstack_layers`.

    Missing statistics are zero. Binding takes Python time, so call it inside `jax.jit`.
    """
    return self._bound({name: self._stacked(params, name) for name, *_ in self._variables})

  @property
  def unstacked(self) -> set[str]:
    """Stacked parameters of which a program takes one entry per layer: if the layers do not run in a scan, and the
    layer axis is not sharded.

    On a CPU, slicing a stack copies the weights in every step, and so does a scan. When the program itself stacks the
    layers and slices them, the compiler removes both operations.
    """
    if self.execution.scan_layers:
      return set()
    layered = (name for name, axes in self.logical_axes.items() if axes[:1] == ("layers",))
    return {name for name in layered if not any(self.struct(name).sharding.spec[:1])}

  def unstack_layers(self, params: Params) -> Params:
    """Empties `params` and returns them as programs take them: with one entry per layer of those that are `unstacked`,
    and the matrices that are `turned`."""
    unstacked, turned, found = self.unstacked, self.turned, Params()
    while params:
      name, value = params.popitem()
      layers = {one_layer(name, i): value[i] for i in range(value.shape[0])} if name in unstacked else {name: value}
      del value
      while layers:
        one, array = layers.popitem()
        if all_layers(name) in turned:
          one, array = outputs_first(one), self._turn(all_layers(name), array)
        found[one] = array
    return found

  @property
  def turned(self) -> set[str]:
    """Matrices that a program of one CPU takes as [outputs, inputs], both flat, if the layers do not run in a scan.

    So its matmuls read memory in order, which counts where there are few rows, as in a decode step.
    """
    mesh = self.execution.sharding.mesh
    if self.execution.scan_layers or mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
      return set()
    unstacked, axes = self.unstacked, self.logical_axes
    plain = {name for name in self.weight_names if f"{name}_scale" not in axes}
    return {
      name
      for name, (stacked, contracted) in self.contracted.items()
      if contracted and stacked == int(name in unstacked) and name in plain
    }

  def _turn(self, name: str, matrix: jax.Array) -> jax.Array:
    """A matrix of one layer as [outputs, inputs]."""
    contracted = self.contracted[name][1]
    return matrix.reshape(math.prod(matrix.shape[:contracted]), -1).T

  def _stacked(self, params: Params, name: str) -> jax.Array:
    """A parameter from the entries that a program takes."""
    if name in params:
      return params[name]
    if (statistic := self.statistics.get(name)) is not None:
      return jnp.zeros(statistic.shape, statistic.dtype)
    shape = self.struct(name).shape

    def entry(name: str, shape: tuple[int, ...]) -> jax.Array:
      return params[name] if name in params else params[outputs_first(name)].T.reshape(shape)

    if outputs_first(name) in params:
      return entry(name, shape)
    return jnp.stack([entry(one_layer(name, i), shape[1:]) for i in range(shape[0])])

  def _bound(self, values: Mapping[str, Any]) -> Decoder:
    state = [(path, kind(values[name], **metadata)) for name, path, kind, metadata in self._variables]
    return nnx.merge(self._graph, nnx.from_flat_state(state))

  def buffers_of(self, decoder: Decoder) -> Params:
    """The current buffers and statistics of a bound decoder."""
    values = _values(nnx.state(decoder))
    return {n: values[n] for n in (*self.buffers, *self.statistics)}

  def end_update(self, params: Params, buffers: Params) -> Params:
    """Returns the buffers after an update. `buffers` also holds the statistics of all its micro-batches."""
    if not self.statistics and not self.execution.matmul:
      return buffers
    decoder = self.bind(params | buffers)
    for _, module in nnx.iter_modules(decoder):
      if hasattr(module, "end_update"):
        module.end_update()
    updated = self.buffers_of(decoder)
    return {name: updated[name] for name in self.buffers}

  def initial_buffers(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Params:
    """The initial values of these buffers, on the devices that they want."""
    shardings = {name: struct.sharding for name, struct in wanted.items()}
    return jax.jit(lambda: {name: self.init(0)[1][name] for name in wanted}, out_shardings=shardings)()

  def struct(self, name: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a parameter or buffer."""
    return next((part for part in (self.params, self.buffers) if name in part), self.statistics)[name]


def _values(state: Any) -> Params:
  return {join(*path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
