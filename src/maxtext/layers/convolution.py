"""A causal convolution of each channel alone, which stops at the start of a document.

Shapes: B batch, S sequence, H and D channels, W tokens that it reaches back.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.cache import latest
from maxtext.layers.context import Context
from maxtext.layers.make import Make


class CausalConvolution(nnx.Module):
  """Each channel is a weighted sum of its last `span` tokens, `step` apart."""

  def __init__(
    self, make: Make, span: int, channels: Mapping[str, int], step: int = 1, std: float | None = None
  ) -> None:
    self.span, self.step = span, step
    std = span**-0.5 if std is None else std
    self.weight = make("weight", (span, *channels.values()), (None, *channels), std=std)

  @property
  def reach(self) -> int:
    """Tokens before the first that it needs."""
    return (self.span - 1) * self.step

  def __call__(self, x: jax.Array, context: Context, tail: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """x [B,S,H,D] and the tokens before it [B,W,H,D] to the sums, and the tokens that a next call needs before it."""
    B = x.shape[0]
    weight = self.weight[...].astype(x.dtype)
    if tail is None:
      tail = jnp.zeros((B, self.reach, *x.shape[2:]), x.dtype)
    document = jnp.cumsum(context.begins, axis=1)
    x = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    documents = jnp.pad(document, ((0, 0), (self.reach, 0)))

    def within(x: jax.Array, documents: jax.Array, own: jax.Array) -> jax.Array:
      return jnp.where((documents == own)[..., None, None], x, 0)

    def back(start: int) -> jax.Array:
      end = start + document.shape[1]
      return within(x[:, start:end], documents[:, start:end], document)

    y = sum((back(i * self.step) * weight[i] for i in range(self.span)), jnp.zeros((), x.dtype))
    return y, within(latest(x, self.reach, context), latest(documents, self.reach, context), document[:, -1:])
