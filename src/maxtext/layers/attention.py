"""Grouped-query attention; multi-head and multi-query are its two ends.

Shapes: B batch, S sequence, T cached positions, E width, H query heads, K key heads, D head dim.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.attention import Tokens, reference
from maxtext.layers.cache import Cache, Slots, extend
from maxtext.layers.context import Context
from maxtext.layers.how import How
from maxtext.layers.linear import Linear
from maxtext.layers.make import Make
from maxtext.layers.rope import Rope, rotate

_Q = ("activation_batch", "activation_length", "activation_heads", "activation_head_dim")
_KV = ("activation_batch", "activation_length", "activation_kv_heads", "activation_head_dim")


@dataclass(frozen=True)
class GQA:
  """Query heads share key heads in groups of heads/kv_heads."""

  heads: int
  kv_heads: int
  head_dim: int
  rope: Rope
  window: int | None = None

  @property
  def attention_width(self) -> int:
    """Width of all query heads together."""
    return self.heads * self.head_dim

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """The rotary tables it needs."""
    return (self.rope,)

  def build(self, make: Make, width: int, how: How) -> "GroupedQueryAttention":
    """The layer."""
    return GroupedQueryAttention(make, self, width, how)


class GroupedQueryAttention(nnx.Module):
  """Projections, rotation, attention, output projection."""

  def __init__(self, make: Make, spec: GQA, width: int, how: How) -> None:
    self.spec, self.how = spec, how
    q = {"heads": spec.heads, "head_dim": spec.head_dim}
    kv = {"kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
    self.query = Linear(make.at("query"), {"embed": width}, q, how, "query_proj")
    self.key = Linear(make.at("key"), {"embed": width}, kv, how, "key_proj")
    self.value = Linear(make.at("value"), {"embed": width}, kv, how, "value_proj")
    self.out = Linear(make.at("out"), q, {"embed": width}, how, "out_proj")

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Cache | None]:
    spec, how, table = self.spec, self.how, context.table(self.spec.rope)
    q = how.shard(rotate(self.query(x), table), *_Q)
    k = how.shard(rotate(self.key(x), table), *_KV)
    v = how.shard(self.value(x), *_KV)
    tokens, scale = Tokens(context.positions, context.segments), spec.head_dim**-0.5
    if cache is None:
      q_spec, kv_spec = how.partition(q.shape, *_Q), how.partition(k.shape, *_KV)
      out = how.attention(q, k, v, tokens, scale, spec.window, mesh=how.mesh, q_spec=q_spec, kv_spec=kv_spec)
    else:
      assert context.segments is None, "a cached row is one document"
      cache, layer = extend(cache, repeat, context.positions, {"key": k, "value": v})
      slots = Tokens(jnp.arange(layer["key"].shape[1])[None])
      out = reference(q, layer["key"], layer["value"], tokens, slots, scale, spec.window, how.precision)
    return self.out(how.shard(out, *_Q)), cache

  def cache_slots(self, batch: int, length: int) -> dict[str, Slots]:
    """The cache of one layer."""
    slots = Slots((batch, length, self.spec.kv_heads, self.spec.head_dim), _KV, self.how.dtype)
    return {"key": slots, "value": slots}
