"""A decoder made abstract: shapes, number formats and placement of every parameter before any array exists.

At run time parameters are a flat dict {path: array}; the modules are bound to them inside `jax.jit`.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from maxtext.layers.how import How
from maxtext.layers.make import Buffer
from maxtext.models.decoder import Decoder
from maxtext.models.spec import DecoderSpec

Params = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Model:
  """What initialisation, restore, import, planning and parameter counts all read.

  Attributes:
    abstract: {path: shape, dtype and sharding} of what is trained.
    buffers: the same for what no gradient touches.
  """

  spec: DecoderSpec
  how: How
  abstract: dict[str, jax.ShapeDtypeStruct]
  buffers: dict[str, jax.ShapeDtypeStruct]
  _graph: Any
  _variables: tuple[tuple[str, tuple, type[nnx.Variable], dict[str, Any]], ...]

  @staticmethod
  def of(spec: DecoderSpec, how: How) -> "Model":
    """Traces the modules' construction; nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(spec, how, 0)))
    variables: list[tuple] = []
    trained: dict[str, jax.ShapeDtypeStruct] = {}
    buffers: dict[str, jax.ShapeDtypeStruct] = {}
    for path, variable in nnx.to_flat_state(state):
      name, value = _name(path), variable.get_value()
      variables.append((name, path, type(variable), variable.get_metadata()))
      sharding = how.rules.sharding(how.mesh, variable.axes, value.shape)
      struct = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
      (buffers if isinstance(variable, Buffer) else trained)[name] = struct
    return Model(spec, how, trained, buffers, graph, tuple(variables))

  @property
  def size(self) -> int:
    """Number of parameters."""
    return sum(a.size for a in self.abstract.values())

  def init(self, seed: jax.typing.ArrayLike) -> tuple[Params, Params]:
    """Initial parameters and buffers; call it under `jax.jit` with the shardings of the abstract trees."""
    _, state = nnx.split(Decoder(self.spec, self.how, seed))
    values = {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return {n: values[n] for n in self.abstract}, {n: values[n] for n in self.buffers}

  def bind(self, params: Params) -> Decoder:
    """The decoder with these parameters and buffers; costs Python time, so call it inside `jax.jit`."""
    state = [(path, kind(params[name], **metadata)) for name, path, kind, metadata in self._variables]
    return nnx.merge(self._graph, nnx.from_flat_state(state))


def _name(path: tuple) -> str:
  return "/".join(map(str, path))
