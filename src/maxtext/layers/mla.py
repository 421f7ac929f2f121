"""Multi-head latent attention (MLA): keys and values are projections of one narrow latent per token.

A head's query and key are [nope part | rope part]: without position, and rotated. Heads share the rope part of keys.

Shapes: B batch, S sequence, T cached positions, E width, H heads, N width of the nope part, R width of the rope part, V
value width, L latent width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.kernels.attention import reference
from maxtext.kernels.attention_inputs import AttentionInputs, AttentionSharding
from maxtext.kernels.attention_mask import ScoreSpec, Tokens
from maxtext.layers.context import Context
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.indexer import Indexer
from maxtext.layers.kv_cache import Cache, CacheSpec, cache_arrays, update_cache
from maxtext.layers.linear import Linear
from maxtext.layers.matmul import attention_matmuls
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.qk_clip import largest_logit, per_head, track_max_logits
from maxtext.layers.rope import RotaryEmbedding, rotate
from maxtext.layers.stack import Report

_HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_head_dim")
_CACHED = ("activation_batch", "activation_heads", "activation_length", "activation_head_dim")
_LATENT = ("activation_batch", "activation_length", None)


@dataclass(frozen=True)
class MLA:
  """The spec of multi-head latent attention.

  Attributes:
    qk_nope_head_dim: width of a head's query and key without position.
    v_head_dim: width of a head's value.
    kv_lora_rank: width of the latent of keys and values.
    q_lora_rank: width of the latent of queries; None projects them directly.
    rope: of the rope part of queries and keys, whose width is its head_dim.
    scale: of logits; None is key_dim^-0.5.
    norm: of the latents.
    latent_cache: the cache stores latents, and the projections from the latent are absorbed into queries and outputs.
    indexer: selects the keys that a query sees; None lets it see all.
    tracked: the layer records the largest logit of each head, for QK-clip (`clip_weights`).
  """

  heads: int
  qk_nope_head_dim: int
  v_head_dim: int
  kv_lora_rank: int
  q_lora_rank: int | None
  rope: RotaryEmbedding
  scale: float | None = None
  norm: RMSNormSpec = field(default_factory=RMSNormSpec)
  latent_cache: bool = False
  indexer: Indexer | None = None
  tracked: bool = False

  @property
  def window(self) -> int | None:
    """None: a query sees all earlier keys."""
    return None

  @property
  def key_dim(self) -> int:
    """Width of a head's query and key."""
    return self.qk_nope_head_dim + self.rope.head_dim

  @property
  def attention_width(self) -> int:
    """Width of all heads together, as the mean of keys and values."""
    return self.heads * (self.key_dim + self.v_head_dim) // 2

  @property
  def ropes(self) -> tuple[RotaryEmbedding, ...]:
    """The rotary tables it needs."""
    return (self.rope, *(() if self.indexer is None else (self.indexer.rope,)))

  @property
  def scoring(self) -> ScoreSpec:
    """How the kernel computes logits."""
    return ScoreSpec(self.key_dim**-0.5 if self.scale is None else self.scale)

  @property
  def order_invariant(self) -> bool:
    """Whether the tokens of a row may be in any order, because the layer depends on their positions only."""
    return self.indexer is None and not self.tracked

  def clip_weights(self, weights: Mapping[str, jax.Array], gamma: jax.Array) -> dict[str, jax.Array]:
    """The weights of stacked layers, by path in the layer, scaled so that logits are multiplied by gamma [R,H].

    Nope parts of queries and keys are scaled by sqrt(gamma) each. All heads share the rope part of keys, so the rope
    part of queries is scaled by gamma.
    """
    root = jnp.sqrt(gamma)
    nope_part, rope_part = jnp.split(weights["query/weight"], [self.qk_nope_head_dim], axis=-1)
    key, value = jnp.split(weights["kv/weight"], [self.qk_nope_head_dim], axis=-1)
    return {
      "query/weight": jnp.concatenate([per_head(nope_part, root), per_head(rope_part, gamma)], axis=-1),
      "kv/weight": jnp.concatenate([per_head(key, root), value], axis=-1),
    }

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "LatentAttention":
    """The layer."""
    return LatentAttention(factory, self, width, execution)


class LatentAttention(nnx.Module):
  """Latents, their norms, up-projections, RoPE, attention, output projection."""

  def __init__(self, factory: ParamFactory, spec: MLA, width: int, execution: ExecutionConfig) -> None:
    self.spec, self.execution = spec, execution
    self.matmuls = attention_matmuls(execution.matmul, factory.module_path, execution.fused_attention)
    x, heads = {"embed": width}, {"heads": spec.heads}
    q, kv = {**heads, "head_dim": spec.key_dim}, {**heads, "head_dim": spec.qk_nope_head_dim + spec.v_head_dim}
    rank = spec.q_lora_rank
    self.query_down = (
      None if rank is None else Linear(factory.scope("query_down"), x, {"latent_out": rank}, execution, "query_wa_proj")
    )
    self.query_norm = None if rank is None else spec.norm.build(factory.scope("query_norm"), rank)
    narrow = x if rank is None else {"latent": rank}
    self.query = Linear(factory.scope("query"), narrow, q, execution, "query_proj")
    latent = {"latent_out": spec.kv_lora_rank + spec.rope.head_dim}
    self.kv_down = Linear(factory.scope("kv_down"), x, latent, execution, "kv_wa_proj")
    self.kv_norm = spec.norm.build(factory.scope("kv_norm"), spec.kv_lora_rank)
    self.kv = Linear(factory.scope("kv"), {"latent": spec.kv_lora_rank}, kv, execution, "key_proj")
    self.out = Linear(factory.scope("out"), {**heads, "head_dim": spec.v_head_dim}, x, execution, "out_proj")
    self.largest_logit = largest_logit(factory, spec.heads) if spec.tracked else None
    indexer = spec.indexer
    self.indexer = (
      None if indexer is None or rank is None else indexer.build(factory.scope("indexer"), width, rank, execution)
    )
    assert (self.indexer is None) == (indexer is None), (
      "the queries of an indexer are projections of the queries' latent"
    )

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Report, Cache | None]:
    spec, execution = self.spec, self.execution
    narrow = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
    table = context.table(spec.rope)
    nope_part, rope_part = jnp.split(self.query(narrow), [spec.qk_nope_head_dim], axis=-1)
    rope_part = rotate(rope_part, table, spec.rope.interleaved)
    latent, position = jnp.split(self.kv_down(x), [spec.kv_lora_rank], axis=-1)
    latent, position = self.kv_norm(latent), rotate(position[..., None, :], table, spec.rope.interleaved)[..., 0, :]
    queries = Tokens(context.positions, context.segments, context.spans)
    seen, keys = self._cache_entries(x, latent, position, context), queries
    if cache is not None:
      cache, seen, keys = update_cache(cache, repeat, context, seen, execution.kv_cache.quantization, context.pages)
    assert self.indexer is None or context.spans is None, "the indexer selects earlier keys only"
    selected = None
    if self.indexer is not None and self.indexer.spec.selects:
      selected = self.indexer(x, narrow, context, seen["index_key"], keys.positions)
    uncached = cache is None or context.fresh  # nothing is in the cache yet
    if spec.latent_cache and not uncached:
      out = self._attend_to_latents(nope_part, rope_part, seen["latent"], seen["position"], queries, keys, selected)
      return self.out(execution.sharding.constrain(out, *_HEADS)), {}, cache

    q, (k, v) = (
      execution.sharding.constrain(jnp.concatenate([nope_part, rope_part], axis=-1), *_HEADS),
      self._keys_and_values(seen),
    )
    aux: Report = {}
    if uncached:
      track_max_logits(self.largest_logit, q, k, queries, spec.scoring, execution.numerics.precision)
      q_spec, kv_spec = (execution.sharding.partition(a.shape, *_HEADS) for a in (q, v))
      inputs = AttentionInputs(q, k, v, queries, selected=selected)
      sharding = AttentionSharding(execution.sharding.mesh, q_spec, kv_spec)
      out = execution.kernels.attention(inputs, spec.scoring, sharding, self.matmuls)
      if self.indexer is not None and self.indexer.spec.loss_weight and cache is None:
        aux["indexer_loss"] = self.indexer.loss(x, narrow, context, seen["index_key"], inputs, spec.scoring)
    else:
      out = reference(
        q,
        k,
        v,
        queries,
        keys,
        spec.scoring,
        precision=execution.numerics.precision,
        selected=selected,
        matmuls=self.matmuls,
      )
    return self.out(execution.sharding.constrain(out, *_HEADS)), aux, cache

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
    """The cache of one layer."""
    spec, dtype, slots_per_row = (
      self.spec,
      self.execution.numerics.dtype,
      length + self.execution.kv_cache.speculative_tokens,
    )

    def narrow(width: int) -> CacheSpec:
      return CacheSpec((batch, slots_per_row, width), _LATENT, dtype)

    def heads(width: int) -> CacheSpec:
      return CacheSpec((batch, spec.heads, slots_per_row, width), _CACHED, dtype)

    if spec.latent_cache:
      slots = {"latent": narrow(spec.kv_lora_rank), "position": narrow(spec.rope.head_dim)}
    else:
      slots = {"key": heads(spec.key_dim), "value": heads(spec.v_head_dim)}
    if spec.indexer is not None:
      slots |= {"index_key": narrow(spec.indexer.head_dim)}
    return cache_arrays(slots, self.execution.kv_cache.quantization, self.execution.kv_cache.pages)

  def _cache_entries(self, x: jax.Array, latent: jax.Array, position: jax.Array, context: Context) -> Cache:
    """The cache entries of new tokens."""
    if self.spec.latent_cache:
      new = {"latent": latent, "position": position}
    else:
      new = dict(zip(("key", "value"), self._up_project(latent, position), strict=True))
    return new if self.indexer is None else new | {"index_key": self.indexer.keys(jax.lax.stop_gradient(x), context)}

  def _keys_and_values(self, cached: Cache) -> tuple[jax.Array, jax.Array]:
    if self.spec.latent_cache:
      return self._up_project(cached["latent"], cached["position"])
    return cached["key"], cached["value"]

  def _up_project(self, latent: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [B,T,H,N+R] and values [B,T,H,V] of latents [B,T,L] and the rope part of keys [B,T,R]."""
    nope_part, value = jnp.split(self.kv(latent), [self.spec.qk_nope_head_dim], axis=-1)
    rope_part = jnp.broadcast_to(position[..., None, :], (*nope_part.shape[:-1], position.shape[-1]))
    key = jnp.concatenate([nope_part, rope_part], axis=-1)
    return self.execution.sharding.constrain(key, *_HEADS), self.execution.sharding.constrain(value, *_HEADS)

  def _attend_to_latents(
    self,
    nope_part: jax.Array,
    rope_part: jax.Array,
    latent: jax.Array,
    position: jax.Array,
    queries: Tokens,
    slots: Tokens,
    selected: jax.Array | None,
  ) -> jax.Array:
    """Weight absorption: attention over latents, as one key head: q (W c) = (q W) c, and sum w (W c) = W (sum w c)."""
    cut = self.spec.qk_nope_head_dim
    absorbed = self.kv.contract("mla_absorb_key", "bshn,lhn->bshl", nope_part, (0, cut))
    q = jnp.concatenate([absorbed, rope_part], axis=-1)
    key = jnp.concatenate([latent, position], axis=-1)[:, :, None]
    summed = reference(
      q,
      key,
      latent[:, :, None],
      queries,
      slots,
      self.spec.scoring,
      precision=self.execution.numerics.precision,
      selected=selected,
      matmuls=self.matmuls,
    )
    return self.kv.contract("mla_absorb_value", "bshl,lhv->bshv", summed, (cut, cut + self.spec.v_head_dim))
