"""The gated delta net: linear attention by the gated delta rule, after a short causal convolution.

Its cache has a fixed size: a state matrix per head, and the last tokens that the convolution needs.

Shapes: B batch, S sequence, E width, H heads (of keys or of values), D head dim, W tokens of the convolution.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.delta_rule import chunked, recurrent
from maxtext.layers.context import Context
from maxtext.layers.convolution import CausalConvolution
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.kv_cache import Cache, CacheSpec, replaced
from maxtext.layers.linear import Linear
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.rope import RotaryEmbedding
from maxtext.layers.stack import Report

_HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_head_dim")
_STATE = ("activation_batch", "activation_heads", None, None)


@dataclass(frozen=True)
class DeltaNet:
  """The spec of a gated delta net: each key head serves value_heads/key_heads value heads.

  Attributes:
    span: width of the convolution in tokens.
    chunk: tokens that are computed in parallel.
    norm: of each head's output, before the gate.
    unit_keys: queries and keys are normalized to unit length.
  """

  key_heads: int
  value_heads: int
  key_dim: int
  v_head_dim: int
  span: int = 4
  chunk: int = 64
  norm: RMSNormSpec = field(default_factory=RMSNormSpec)
  unit_keys: bool = True

  @property
  def window(self) -> int | None:
    """The chunk: a query is multiplied with the keys of its chunk only."""
    return self.chunk

  @property
  def attention_width(self) -> int:
    """Width of all value heads together, as the mean of keys and values."""
    return self.value_heads * (self.key_dim + self.v_head_dim) // 2

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]:
    """Empty: the layer uses no position embeddings."""
    return ()

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "GatedDeltaNet":
    """The layer."""
    return GatedDeltaNet(factory, self, width, execution)


class GatedDeltaNet(nnx.Module):
  """Projections, convolution, delta rule, gated norm, output projection."""

  def __init__(self, factory: ParamFactory, spec: DeltaNet, width: int, execution: ExecutionConfig) -> None:
    self.spec, self.execution = spec, execution
    x, per_head = {"embed": width}, {"heads": spec.value_heads}
    keys = {"heads": spec.key_heads, "head_dim": spec.key_dim}
    values = {**per_head, "head_dim": spec.v_head_dim}
    self.query = Linear(factory.scope("query"), x, keys, execution, "query_proj")
    self.key = Linear(factory.scope("key"), x, keys, execution, "key_proj")
    self.value = Linear(factory.scope("value"), x, values, execution, "value_proj")
    self.gate = Linear(factory.scope("gate"), x, values, execution, "delta_gate_proj")
    self.decay = Linear(factory.scope("decay"), x, per_head, execution, "delta_decay_proj")
    self.strength = Linear(factory.scope("strength"), x, per_head, execution, "delta_strength_proj")
    self.query_conv = CausalConvolution(factory.scope("query_conv"), spec.span, keys, execution)
    self.key_conv = CausalConvolution(factory.scope("key_conv"), spec.span, keys, execution)
    self.value_conv = CausalConvolution(factory.scope("value_conv"), spec.span, values, execution)
    self.log_rate = factory("log_rate", (spec.value_heads,), ("heads",), std=0.5, fill=1.0)
    self.decay_bias = factory("decay_bias", (spec.value_heads,), ("heads",), fill=1.0)
    self.norm = spec.norm.build(factory.scope("norm"), spec.v_head_dim)
    self.out = Linear(factory.scope("out"), values, x, execution, "out_proj")

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Report, Cache | None]:
    spec, execution = self.spec, self.execution
    own = None if cache is None else {n: cache[n][repeat] for n in self.cache_specs(x.shape[0], 0)}
    tails, mixed = {}, {}
    for name, project, mix in (
      ("query", self.query, self.query_conv),
      ("key", self.key, self.key_conv),
      ("value", self.value, self.value_conv),
    ):
      tail = None if own is None else own[f"{name}_tail"]
      y, tails[f"{name}_tail"] = mix(execution.sharding.constrain(project(x), *_HEADS), context, tail)
      mixed[name] = execution.sharding.constrain(jax.nn.silu(y), *_HEADS)
    q, k = (self._per_value_head(mixed[name]) for name in ("query", "key"))
    decay = self.decay(x).astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32)
    g = -jnp.exp(self.log_rate[...].astype(jnp.float32)) * jax.nn.softplus(decay)
    beta = jax.nn.sigmoid(self.strength(x).astype(jnp.float32))
    if context.counts is not None:  # invalid tokens leave the state unchanged
      g, beta = (jnp.where(context.counts[..., None], a, 0.0) for a in (g, beta))
    state = self._empty_state(x.shape[0]) if own is None else own["state"]
    arguments = q * spec.key_dim**-0.5, k, mixed["value"], g, beta, context.begins, state
    out, state = recurrent(*arguments) if x.shape[1] == 1 else chunked(*arguments, size=spec.chunk)
    out = self.norm(out.astype(x.dtype)) * jax.nn.silu(self.gate(x).astype(jnp.float32)).astype(x.dtype)
    if cache is not None:
      cache = replaced(cache, repeat, {"state": state} | tails)
    return self.out(execution.sharding.constrain(out, *_HEADS)), {}, cache

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
    """The cache of one layer; its size does not depend on the length."""
    spec, before = self.spec, self.spec.span - 1

    def tail(heads: int, dim: int) -> CacheSpec:
      return CacheSpec((batch, before, heads, dim), _HEADS, self.execution.numerics.dtype, ring=False)

    return {
      "state": CacheSpec((batch, spec.value_heads, spec.key_dim, spec.v_head_dim), _STATE, jnp.float32, ring=False),
      "query_tail": tail(spec.key_heads, spec.key_dim),
      "key_tail": tail(spec.key_heads, spec.key_dim),
      "value_tail": tail(spec.value_heads, spec.v_head_dim),
    }

  def _per_value_head(self, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    if self.spec.unit_keys:
      x = x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return jnp.repeat(x, self.spec.value_heads // self.spec.key_heads, axis=2)

  def _empty_state(self, batch: int) -> jax.Array:
    spec = self.spec
    return self.execution.sharding.constrain(
      jnp.zeros((batch, spec.value_heads, spec.key_dim, spec.v_head_dim), jnp.float32), *_STATE
    )
