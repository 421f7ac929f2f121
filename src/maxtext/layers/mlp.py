"""The dense feed-forward layer.

Shapes: B batch, S sequence, E width, F feed-forward width.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.how import How
from maxtext.layers.linear import Linear
from maxtext.layers.make import Make

_HIDDEN = ("activation_batch", "activation_length", "activation_mlp")


@dataclass(frozen=True)
class MLP:
  """act(x gate) * (x up), or act(x up) where it is not gated; then down."""

  width: int
  activation: str = "silu"
  gated: bool = True

  def build(self, make: Make, width: int, how: How) -> "FeedForward":
    """The layer."""
    return FeedForward(make, self, width, how)


class FeedForward(nnx.Module):
  """Two or three products around an activation."""

  def __init__(self, make: Make, spec: MLP, width: int, how: How) -> None:
    self.how, self.activation = how, getattr(jax.nn, spec.activation)
    wide = {"mlp": spec.width}
    self.gate = Linear(make.at("gate"), {"embed": width}, wide, how, "mlpwi_0") if spec.gated else None
    self.up = Linear(make.at("up"), {"embed": width}, wide, how, "mlpwi_1" if spec.gated else "mlpwi")
    self.down = Linear(make.at("down"), wide, {"embed": width}, how, "mlpwo")

  def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The output, and what a layer reports (nothing here; experts report their load)."""
    up = self.up(x)
    hidden = self._activate(up) if self.gate is None else self._activate(self.gate(x)) * up
    return self.down(self.how.shard(hidden, *_HIDDEN)), {}

  def _activate(self, x: jax.Array) -> jax.Array:
    return self.activation(x.astype(jnp.float32) if self.how.activations_in_float32 else x).astype(x.dtype)
