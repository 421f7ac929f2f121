"""The gated delta net: linear attention by the gated delta rule, behind a short causal convolution.

Its cache does not grow: a matrix per head, and the last tokens that the convolution still sees.

Shapes: B batch, S sequence, E width, H heads (of keys or of values), D head dim, W tokens of the convolution.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.delta_rule import chunked, recurrent
from maxtext.layers.cache import Cache, Slots, replaced
from maxtext.layers.context import Context
from maxtext.layers.convolution import CausalConvolution
from maxtext.layers.how import How
from maxtext.layers.linear import Linear
from maxtext.layers.make import Make
from maxtext.layers.norm import Norm
from maxtext.layers.rope import Rope

_HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_head_dim")
_STATE = ("activation_batch", "activation_heads", None, None)


@dataclass(frozen=True)
class DeltaNet:
  """Key heads serve value heads in groups.

  Attributes:
    span: tokens that the convolution sees, the own one counted.
    chunk: tokens that are computed at once.
    norm: of each head's output, before the gate.
    unit_keys: queries and keys are scaled to length one.
  """

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  span: int = 4
  chunk: int = 64
  norm: Norm = field(default_factory=Norm)
  unit_keys: bool = True

  @property
  def window(self) -> int | None:
    """Tokens that a query is multiplied with: those of its chunk."""
    return self.chunk

  @property
  def attention_width(self) -> int:
    """Width of all value heads together, as the mean of keys and values."""
    return self.value_heads * (self.key_dim + self.value_dim) // 2

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """It needs no positions."""
    return ()

  def build(self, make: Make, width: int, how: How) -> "GatedDeltaNet":
    """The layer."""
    return GatedDeltaNet(make, self, width, how)


class GatedDeltaNet(nnx.Module):
  """Projections, convolution, delta rule, gated norm, output projection."""

  def __init__(self, make: Make, spec: DeltaNet, width: int, how: How) -> None:
    self.spec, self.how = spec, how
    x, per_head = {"embed": width}, {"heads": spec.value_heads}
    keys = {"heads": spec.key_heads, "head_dim": spec.key_dim}
    values = {**per_head, "head_dim": spec.value_dim}
    self.query = Linear(make.at("query"), x, keys, how, "query_proj")
    self.key = Linear(make.at("key"), x, keys, how, "key_proj")
    self.value = Linear(make.at("value"), x, values, how, "value_proj")
    self.gate = Linear(make.at("gate"), x, values, how, "delta_gate_proj")
    self.decay = Linear(make.at("decay"), x, per_head, how, "delta_decay_proj")
    self.strength = Linear(make.at("strength"), x, per_head, how, "delta_strength_proj")
    self.query_conv = CausalConvolution(make.at("query_conv"), spec.span, keys, how)
    self.key_conv = CausalConvolution(make.at("key_conv"), spec.span, keys, how)
    self.value_conv = CausalConvolution(make.at("value_conv"), spec.span, values, how)
    self.log_rate = make("log_rate", (spec.value_heads,), ("heads",), std=0.5, fill=1.0)
    self.decay_bias = make("decay_bias", (spec.value_heads,), ("heads",), fill=1.0)
    self.norm = spec.norm.build(make.at("norm"), spec.value_dim)
    self.out = Linear(make.at("out"), values, x, how, "out_proj")

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Cache | None]:
    spec, how = self.spec, self.how
    own = None if cache is None else {n: cache[n][repeat] for n in self.cache_slots(x.shape[0], 0)}
    tails, mixed = {}, {}
    for name, project, mix in (
      ("query", self.query, self.query_conv),
      ("key", self.key, self.key_conv),
      ("value", self.value, self.value_conv),
    ):
      tail = None if own is None else own[f"{name}_tail"]
      y, tails[f"{name}_tail"] = mix(how.shard(project(x), *_HEADS), context, tail)
      mixed[name] = how.shard(jax.nn.silu(y), *_HEADS)
    q, k = (self._per_value_head(mixed[name]) for name in ("query", "key"))
    decay = self.decay(x).astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32)
    g = -jnp.exp(self.log_rate[...].astype(jnp.float32)) * jax.nn.softplus(decay)
    beta = jax.nn.sigmoid(self.strength(x).astype(jnp.float32))
    if context.counts is not None:  # what does not count neither forgets nor writes
      g, beta = (jnp.where(context.counts[..., None], a, 0.0) for a in (g, beta))
    state = self._empty_state(x.shape[0]) if own is None else own["state"]
    arguments = q * spec.key_dim**-0.5, k, mixed["value"], g, beta, context.begins, state
    out, state = recurrent(*arguments) if x.shape[1] == 1 else chunked(*arguments, size=spec.chunk)
    out = self.norm(out.astype(x.dtype)) * jax.nn.silu(self.gate(x).astype(jnp.float32)).astype(x.dtype)
    if cache is not None:
      cache = replaced(cache, repeat, {"state": state} | tails)
    return self.out(how.shard(out, *_HEADS)), cache

  def cache_slots(self, batch: int, length: int) -> dict[str, Slots]:
    """The cache of one layer; its size does not depend on the length."""
    spec, before = self.spec, self.spec.span - 1

    def tail(heads: int, dim: int) -> Slots:
      return Slots((batch, before, heads, dim), _HEADS, self.how.dtype, ring=False)

    return {
      "state": Slots((batch, spec.value_heads, spec.key_dim, spec.value_dim), _STATE, jnp.float32, ring=False),
      "query_tail": tail(spec.key_heads, spec.key_dim),
      "key_tail": tail(spec.key_heads, spec.key_dim),
      "value_tail": tail(spec.value_heads, spec.value_dim),
    }

  def _per_value_head(self, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    if self.spec.unit_keys:
      x = x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return jnp.repeat(x, self.spec.value_heads // self.spec.key_heads, axis=2)

  def _empty_state(self, batch: int) -> jax.Array:
    spec = self.spec
    return self.how.shard(jnp.zeros((batch, spec.value_heads, spec.key_dim, spec.value_dim), jnp.float32), *_STATE)
