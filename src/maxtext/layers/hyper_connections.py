"""Manifold-constrained hyper-connections: several residual streams, which a branch of a layer reads, mixes and writes
with weights per token. The mixing matrix is doubly stochastic, so that signals neither grow nor vanish with depth.

Shapes: B batch, S sequence, N streams, E width.
"""

from dataclasses import dataclass
from math import log

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.linear import Linear
from maxtext.layers.norm import unit_rms
from maxtext.layers.param_factory import ParamFactory


@dataclass(frozen=True)
class HyperConnections:
  """Number of streams, and iterations of the normalization of the mixing matrix (Sinkhorn-Knopp)."""

  count: int
  iterations: int = 20
  epsilon: float = 1e-6

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "HyperConnectionWeights":
    """The weights of one branch of a layer."""
    return HyperConnectionWeights(factory, self, width, execution)


class HyperConnectionWeights(nnx.Module):
  """Streams [B,S,N,E] to the weights with which a branch reads, mixes and writes them."""

  def __init__(self, factory: ParamFactory, spec: HyperConnections, width: int, execution: ExecutionConfig) -> None:
    self.spec = spec
    n = spec.count
    inputs, outputs = {"streams": n, "embed": width}, {"router": 2 * n + n * n}
    self.product = Linear(factory.scope("product"), inputs, outputs, execution, "stream_weights")
    self.scale = factory("scale", (n, width), (None, "norm"), fill=1.0)
    self.gain = factory("gain", (3,), (None,), fill=0.01)
    # Initially a branch reads the mean of the streams, writes to all of them, and mixes little.
    self.read_bias = factory("read_bias", (n,), (None,), fill=-log(n - 1))
    self.write_bias = factory("write_bias", (n,), (None,))
    self.mix_bias = factory("mix_bias", (n, n), (None, None), fill=5 * np.eye(n))

  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Read weights [B,S,N], write weights [B,S,N], and the mixing matrix [B,S,N,N], in float32."""
    n = self.spec.count
    y = unit_rms(x, self.spec.epsilon, axis=(-2, -1)) * self.scale[...].astype(jnp.float32)
    found = jnp.split(self.product(y, dtype=jnp.float32), [n, 2 * n], axis=-1)
    gains = jnp.unstack(self.gain[...].astype(jnp.float32))
    read, write, mix = (gain * part for gain, part in zip(gains, found, strict=True))
    read = jax.nn.sigmoid(read + self.read_bias[...])
    write = 2 * jax.nn.sigmoid(write + self.write_bias[...])
    mix = _doubly_stochastic(mix.reshape(*mix.shape[:-1], n, n) + self.mix_bias[...], self.spec.iterations)
    return read, write, mix


def branch_input(x: jax.Array, read: jax.Array) -> jax.Array:
  """Streams [B,S,N,E] to the input of a branch [B,S,E]."""
  return jnp.einsum("bsn,bsne->bse", read, x.astype(jnp.float32)).astype(x.dtype)


def rejoined(x: jax.Array, y: jax.Array, write: jax.Array, mix: jax.Array) -> jax.Array:
  """The streams after a branch with output y [B,S,E]."""
  mixed = jnp.einsum("bsnm,bsme->bsne", mix, x.astype(jnp.float32))
  return (mixed + write[..., None] * y[..., None, :].astype(jnp.float32)).astype(x.dtype)


def _doubly_stochastic(logits: jax.Array, iterations: int) -> jax.Array:
  """Sinkhorn-Knopp: normalizes columns and rows alternately, in log space, which does not overflow."""
  for _ in range(iterations):
    logits = logits - jax.nn.logsumexp(logits, axis=-2, keepdims=True)
    logits = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  return jnp.exp(logits)
