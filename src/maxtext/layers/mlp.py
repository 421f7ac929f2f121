"""The dense feed-forward layer.

Shapes: B batch, S sequence, E width, F feed-forward width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.linear import Linear
from maxtext.layers.param_factory import ParamFactory

_HIDDEN = ("activation_batch", "activation_length", "activation_mlp")


# By the names of the configuration; gelu is the tanh approximation, which published models were trained with.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
  "silu": jax.nn.silu,
  "gelu": partial(jax.nn.gelu, approximate=True),
  "exact gelu": partial(jax.nn.gelu, approximate=False),  # of towers; not a value of the key
  "relu": jax.nn.relu,
  "sigmoid": jax.nn.sigmoid,
}


@dataclass(frozen=True)
class MLP:
  """act(x gate) * (x up), or act(x up) where it is not gated; then down.

  Attributes:
    limit: clamps the gate from above and `up` from both sides, before the activation.
    bias: all projections have biases.
  """

  width: int
  activation: str = "silu"
  gated: bool = True
  limit: float | None = None
  bias: bool = False

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "MLPLayer":
    """The layer."""
    return MLPLayer(factory, self, width, execution)


class MLPLayer(nnx.Module):
  """The layer of `MLP`."""

  def __init__(self, factory: ParamFactory, spec: MLP, width: int, execution: ExecutionConfig) -> None:
    self.execution, self.limit, self.activation = execution, spec.limit, ACTIVATIONS[spec.activation]
    x, wide = {"embed": width}, {"mlp": spec.width}
    self.gate = Linear(factory.scope("gate"), x, wide, execution, "mlpwi_0", bias=spec.bias) if spec.gated else None
    self.up = Linear(factory.scope("up"), x, wide, execution, "mlpwi_1" if spec.gated else "mlpwi", bias=spec.bias)
    self.down = Linear(factory.scope("down"), wide, x, execution, "mlpwo", bias=spec.bias)

  def __call__(
    self, x: jax.Array, real: jax.Array | None = None, replayed: jax.Array | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The output, and auxiliary outputs, of which there are none."""
    return self.down(self.execution.sharding.constrain(self._hidden(x), *_HIDDEN)), {}

  def _hidden(self, x: jax.Array) -> jax.Array:
    up = self._clamp(self.up(x))
    gate = None if self.gate is None else self._clamp(self.gate(x), from_below=False)
    return self._activate(up) if gate is None else self._activate(gate) * up

  def _clamp(self, x: jax.Array, from_below: bool = True) -> jax.Array:
    if self.limit is None:
      return x
    return jnp.clip(x, -self.limit if from_below else None, self.limit)

  def _activate(self, x: jax.Array) -> jax.Array:
    return self.activation(x.astype(jnp.float32) if self.execution.numerics.activations_in_float32 else x).astype(
      x.dtype
    )
