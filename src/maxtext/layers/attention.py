"""Grouped-query attention (GQA), of which multi-head and multi-query attention are special cases; with RoPE, sliding
windows, QK norm, soft caps and attention sinks.

Shapes: B batch, S sequence, T cached positions, E width, H query heads, K key heads, D head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.layers.cached_attention import CACHED, QUERIES, CachedAttention
from maxtext.layers.context import Context
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.kv_cache import Cache, CacheSpec, cache_arrays, update_cache
from maxtext.layers.linear import Linear
from maxtext.layers.matmul import attention_matmuls
from maxtext.layers.moba import MoBA
from maxtext.layers.norm import RMSNorm, RMSNormSpec
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.parameter_paths import split
from maxtext.layers.qk_clip import largest_logit, per_head, track_max_logits
from maxtext.layers.rope import RotaryEmbedding, rotate
from maxtext.layers.stack import Report

_KV = ("activation_batch", "activation_length", "activation_kv_heads", "activation_head_dim")


@dataclass(frozen=True)
class QueryKeyNorm:
  """QK norm: norms of queries and keys.

  Attributes:
    over: each head is normalized by itself, or all heads as one vector.
    rotated: the norm follows RoPE instead of preceding it.
  """

  norm: RMSNormSpec
  over: Literal["head", "all"] = "head"
  rotated: bool = False


@dataclass(frozen=True)
class QueryTemperature:
  """Scales queries by 1 + strength * log(1 + floor((position + 1) / length))."""

  length: int
  strength: float = 0.1

  def __call__(self, positions: jax.Array) -> jax.Array:
    """The factor of queries at these positions."""
    return 1.0 + self.strength * jnp.log1p(jnp.floor((positions + 1.0) / self.length))


@dataclass(frozen=True)
class GQA:
  """The spec of grouped-query attention: each key head serves heads/kv_heads query heads.

  Attributes:
    rope: None for a layer without position embeddings.
    window: length of the sliding window; where `chunked`, length of the chunks, outside of which a query sees nothing.
    scale: of logits; None is head_dim^-0.5.
    cap: soft cap of logits, cap * tanh(logit / cap).
    bias: query, key and value projections have biases; `out_bias`: the output projection has one.
    value_norm: of values; `shared_values`: values are the keys before norm and rotation.
    sinks: attention sinks: each head has a learned logit that takes part in the softmax.
    temperature: of queries, by position.
    gated: the output of attention is multiplied by a sigmoid gate per head and dimension, projected from the layer's
      input.
    out_width: width of the output; None is that of the input.
    fused: query, key and value are one projection; there are as many key heads as query heads.
    blocks: selects the blocks of keys that a query sees; None lets it see all.
    tracked: the layer records the largest logit of each head, for QK-clip (`clip_weights`).
    causal: False for bidirectional attention, as in an encoder, which has no cache.
    sees_spans: False for a layer that is causal in spans of tokens too, which other layers see both ways.
  """

  heads: int
  kv_heads: int
  head_dim: int
  rope: RotaryEmbedding | None
  window: int | None = None
  chunked: bool = False
  scale: float | None = None
  cap: float | None = None
  bias: bool = False
  out_bias: bool = False
  qk_norm: QueryKeyNorm | None = None
  value_norm: RMSNormSpec | None = None
  shared_values: bool = False
  sinks: bool = False
  temperature: QueryTemperature | None = None
  gated: bool = False
  out_width: int | None = None
  fused: bool = False
  blocks: MoBA | None = None
  tracked: bool = False
  causal: bool = True
  sees_spans: bool = True

  @property
  def attention_width(self) -> int:
    """Width of all query heads together."""
    return self.heads * self.head_dim

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]:
    """The rotary tables it needs."""
    return () if self.rope is None else (self.rope,)

  @property
  def scoring(self) -> ScoreSpec:
    """How the kernel computes logits."""
    scale = self.head_dim**-0.5 if self.scale is None else self.scale
    return ScoreSpec(scale, self.window, self.chunked, self.cap, self.causal)

  @property
  def cache_window(self) -> int | None:
    """Number of positions that the cache stores; None is all of them, which block selection needs."""
    return None if self.blocks is not None else self.window

  @property
  def order_invariant(self) -> bool:
    """Whether the tokens of a row may be in any order, because the layer depends on their positions only."""
    return self.blocks is None and not self.tracked

  def clip_weights(self, weights: Mapping[str, jax.Array], gamma: jax.Array) -> dict[str, jax.Array]:
    """The weights of stacked layers, by path in the layer, scaled so that logits are multiplied by gamma [R,H].

    A key head is scaled by the square root of the smallest gamma of its query heads, and each query head by the rest.
    """
    groups = gamma.reshape(*gamma.shape[:-1], self.kv_heads, -1)
    key = jnp.sqrt(groups.min(-1))
    factors = {"key": key, "query": (groups / key[..., None]).reshape(gamma.shape)}
    return {n: per_head(w, factors[split(n)[0]]) for n, w in weights.items() if split(n)[0] in factors}

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "GroupedQueryAttention":
    """The layer."""
    return GroupedQueryAttention(factory, self, width, execution)


class GroupedQueryAttention(nnx.Module):
  """Projections, norms, rotation, attention, output projection."""

  def __init__(self, factory: ParamFactory, spec: GQA, width: int, execution: ExecutionConfig) -> None:
    self.spec, self.execution = spec, execution
    self.matmuls = attention_matmuls(execution.matmul, factory.module_path, execution.fused_attention)
    x, q = {"embed": width}, {"heads": spec.heads, "head_dim": spec.head_dim}
    kv, out = {"kv_heads": spec.kv_heads, "head_dim": spec.head_dim}, {"embed": spec.out_width or width}

    def projection(name: str, outputs: dict[str, int]) -> Linear:
      return Linear(factory.scope(name), x, outputs, execution, f"{name}_proj", bias=spec.bias)

    self.qkv = projection("qkv", {"qkv": 3, **q}) if spec.fused else None
    self.query = None if spec.fused else projection("query", q)
    self.key = None if spec.fused else projection("key", kv)
    self.value = None if spec.fused or spec.shared_values else projection("value", kv)
    self.out = Linear(factory.scope("out"), q, out, execution, "out_proj", bias=spec.out_bias)
    self.gate = Linear(factory.scope("gate"), x, q, execution, "query_proj") if spec.gated else None
    self.query_norm, self.key_norm = self._head_norms(factory)
    self.value_norm = (
      None if spec.value_norm is None else spec.value_norm.build(factory.scope("value_norm"), spec.head_dim)
    )
    self.sinks = factory("sinks", (spec.heads,), ("heads",)) if spec.sinks else None
    self.largest_logit = largest_logit(factory, spec.heads) if spec.tracked else None

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Report, Cache | None]:
    spec, execution = self.spec, self.execution
    assert cache is None or spec.causal, "an encoder sees all of its input at once"
    if not spec.sees_spans:
      context = replace(context, spans=None)
    q, k, v = self._project(x)
    if self.value_norm is not None:
      v = self.value_norm(v)
    q, k = self._rotate(self.query_norm, q, context, QUERIES), self._rotate(self.key_norm, k, context, _KV)
    if spec.temperature is not None:
      q = q * spec.temperature(context.positions)[..., None, None].astype(q.dtype)
    v = execution.sharding.constrain(v, *_KV)
    tokens = Tokens(context.positions, context.segments, context.spans)
    sinks = None if self.sinks is None else self.sinks[...]
    if cache is not None and not context.fresh:
      over = CachedAttention(execution, spec.scoring, sinks, spec.blocks, self.matmuls)
      table = context.pages if spec.cache_window is None else None
      out, cache = over(q, {"key": k, "value": v}, cache, repeat, context, table)
      return self._out(x, out), {}, cache
    if cache is not None:
      cache, seen, _ = update_cache(cache, repeat, context, {"key": k, "value": v}, execution.kv_cache.quantization)
      k, v = seen["key"], seen["value"]
    selected = None if spec.blocks is None else spec.blocks.selected(q, k, tokens, tokens)
    track_max_logits(self.largest_logit, q, k, tokens, spec.scoring, execution.numerics.precision)
    q_spec, kv_spec = execution.sharding.partition(q.shape, *QUERIES), execution.sharding.partition(k.shape, *_KV)
    inputs = AttentionInputs(q, k, v, tokens, sinks, selected)
    sharding = AttentionSharding(execution.sharding.mesh, q_spec, kv_spec)
    out = execution.kernels.attention(inputs, spec.scoring, sharding, self.matmuls)
    return self._out(x, out), {}, cache

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
    """The cache of one layer."""
    spec, execution = self.spec, self.execution
    reach = length if spec.cache_window is None else min(spec.cache_window, length)
    slots = CacheSpec(
      (batch, spec.kv_heads, reach + execution.kv_cache.speculative_tokens, spec.head_dim),
      CACHED,
      execution.numerics.dtype,
    )
    pages = execution.kv_cache.pages if spec.cache_window is None else None
    return cache_arrays({"key": slots, "value": slots}, execution.kv_cache.quantization, pages)

  def _out(self, x: jax.Array, out: jax.Array) -> jax.Array:
    if self.gate is not None:
      out = out * jax.nn.sigmoid(self.gate(x))
    return self.out(self.execution.sharding.constrain(out, *QUERIES))

  def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if self.qkv is not None:
      q, k, v = jnp.unstack(self.qkv(x), axis=2)
      return q, k, v
    assert self.query is not None
    assert self.key is not None
    k = self.key(x)
    return self.query(x), k, k if self.value is None else self.value(x)

  def _head_norms(self, factory: ParamFactory) -> tuple[RMSNorm | None, RMSNorm | None]:
    spec, norms = self.spec, self.spec.qk_norm
    if norms is None:
      return None, None
    q, k = (spec.head_dim * (n if norms.over == "all" else 1) for n in (spec.heads, spec.kv_heads))
    return norms.norm.build(factory.scope("query_norm"), q), norms.norm.build(factory.scope("key_norm"), k)

  def _rotate(self, norm: RMSNorm | None, x: jax.Array, context: Context, axes: tuple[str, ...]) -> jax.Array:
    """Queries or keys with QK norm and RoPE applied, in the order of the spec."""
    rope, norms = self.spec.rope, self.spec.qk_norm

    def apply_norm(x: jax.Array) -> jax.Array:
      if norm is None or norms is None:
        return x
      return norm(x) if norms.over == "head" else norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    def apply_rope(x: jax.Array) -> jax.Array:
      return x if rope is None else rotate(x, context.table(rope), rope.interleaved, rope.parts)

    x = apply_norm(apply_rope(x)) if norms is not None and norms.rotated else apply_rope(apply_norm(x))
    return self.execution.sharding.constrain(x, *axes)
