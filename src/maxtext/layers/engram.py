"""N-gram memory (Engram): hashes of the last tokens select rows of large tables, which a gate adds to the residual.

Shapes: B batch, S sequence, N residual streams, E width, G n-gram lengths, K hash heads, D head dim, M = G*K*D.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.context import Context
from maxtext.layers.convolution import CausalConvolution
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.kv_cache import Cache, CacheSpec, latest, replaced
from maxtext.layers.linear import Linear
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.param_factory import ParamFactory

_MEMORY = ("activation_batch", "activation_length", None)
_STREAMS = ("activation_batch", "activation_length", None, "activation_embed")


@dataclass(frozen=True)
class EngramMemory:
  """The spec of the memory of one layer.

  Attributes:
    sizes: for each n-gram length from 2 up, the number of rows of the table of each of its hash heads.
    head_dim: width of a row.
    span: taps of the convolution; their distance is the length of the longest n-gram.
    seed: of the multipliers of the hash.
    streams: number of residual streams.
  """

  sizes: tuple[tuple[int, ...], ...]
  head_dim: int
  span: int
  seed: int
  norm: RMSNormSpec
  streams: int = 1

  @property
  def longest(self) -> int:
    """Length of the longest n-gram."""
    return len(self.sizes) + 1

  @property
  def multipliers(self) -> np.ndarray:
    """An odd multiplier of the hash for each token of an n-gram."""
    drawn = np.random.default_rng(self.seed).integers(0, 2**31, size=self.longest, dtype=np.uint32)
    return drawn * 2 + 1

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "NgramMemory":
    """The layer."""
    return NgramMemory(factory, self, width, execution)


class NgramMemory(nnx.Module):
  """(streams, context, cache, repeat) to (the update to add to the streams, cache)."""

  def __init__(self, factory: ParamFactory, spec: EngramMemory, width: int, execution: ExecutionConfig) -> None:
    self.spec, self.execution, self.width = spec, execution, width
    sizes = [size for length in spec.sizes for size in length]
    memory, streams = {"latent_out": len(sizes) * spec.head_dim}, {"streams": spec.streams, "embed": width}
    self.table = factory("table", (sum(sizes), spec.head_dim), (None, "memory"), std=spec.head_dim**-0.5)
    self.key = Linear(factory.scope("key"), memory, streams, execution, "engram_key", bias=True)
    self.value = Linear(factory.scope("value"), memory, {"embed": width}, execution, "engram_value", bias=True)
    self.norm = spec.norm.build(factory.scope("norm"), width)
    self.key_norm, self.query_norm, self.value_norm = (
      spec.norm.build(factory.scope(f"{name}_norm", streams=spec.streams), width) for name in ("key", "query", "value")
    )
    self.convolution = CausalConvolution(
      factory.scope("convolution"), spec.span, streams, execution, step=spec.longest, std=0.0
    )

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Cache | None]:
    """x is [B,S,N,E]."""
    own = None if cache is None else {n: cache[n][repeat] for n in self.cache_specs(x.shape[0])}
    rows, last = self._rows(context, None if own is None else own["memory_tokens"])
    memory = self.execution.sharding.constrain(
      self.table[...].astype(self.execution.numerics.dtype)[rows].reshape(*rows.shape[:2], -1), *_MEMORY
    )
    alike = (self.key_norm(self.key(memory)) * self.query_norm(self.norm(x))).astype(jnp.float32).sum(-1, keepdims=True)
    gate = jax.nn.sigmoid(_signed_root(alike * self.width**-0.5)).astype(x.dtype)
    value = self.execution.sharding.constrain(gate * self.value(memory)[:, :, None], *_STREAMS)
    mixed, tail = self.convolution(self.value_norm(value), context, None if own is None else own["memory_tail"])
    if cache is not None:
      cache = replaced(cache, repeat, {"memory_tokens": last, "memory_tail": tail})
    return checkpoint_name(jax.nn.silu(mixed) + value, "engram"), cache

  def cache_specs(self, batch: int) -> dict[str, CacheSpec]:
    """The last tokens, and the tail of the convolution."""
    spec = self.spec
    tail = (batch, self.convolution.reach, spec.streams, self.width)
    return {
      "memory_tokens": CacheSpec((batch, spec.longest - 1), ("activation_batch", None), jnp.int32, ring=False),
      "memory_tail": CacheSpec(tail, _STREAMS, self.execution.numerics.dtype, ring=False),
    }

  def _rows(self, context: Context, before: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Rows of the table [B,S,G*K], and the last tokens plus 1, 0 where the document has fewer."""
    assert context.tokens is not None, "the decoder passes them"
    spec, (B, S) = self.spec, context.tokens.shape
    reach = spec.longest - 1
    if before is None:
      before = jnp.zeros((B, reach), jnp.int32)
    line = jnp.concatenate([before, context.tokens + 1], axis=1)
    document = jnp.cumsum(context.begins, axis=1)
    documents = jnp.pad(document, ((0, 0), (reach, 0)))

    def back(distance: int) -> jax.Array:
      start = reach - distance
      same = documents[:, start : start + S] == document
      return jnp.where(same, line[:, start : start + S], 0).astype(jnp.uint32)

    mixed, offset, found = back(0) * spec.multipliers[0], 0, []
    for length, sizes in enumerate(spec.sizes, 2):
      mixed = mixed ^ (back(length - 1) * spec.multipliers[length - 1])
      for size in sizes:
        found.append((mixed % np.uint32(size)).astype(jnp.int32) + offset)
        offset += size
    last = jnp.where(latest(documents, reach, context) == document[:, -1:], latest(line, reach, context), 0)
    return jnp.stack(found, axis=-1), last


def _signed_root(x: jax.Array) -> jax.Array:
  """sign(x) sqrt(|x|), with |x| clamped from below so that the gradient is bounded near zero."""
  return jnp.sign(x) * jnp.sqrt(jnp.maximum(jnp.abs(x), 1e-6))
