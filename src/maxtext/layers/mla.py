"""Multi-head latent attention: keys and values are products of one narrow latent per token.

A head's query and key are [without position | rotated]; the rotated part of the key is one for all heads.

Shapes: B batch, S sequence, T cached positions, E width, H heads, N width without position, R rotated width, V value
width, L latent width.
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

_HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_head_dim")
_CACHED = ("activation_batch", "activation_heads", "activation_length", "activation_head_dim")
_LATENT = ("activation_batch", "activation_length", None)


@dataclass(frozen=True)
class MLA:
  """What latent attention is.

  Attributes:
    plain_dim: width of a head's query and key that knows no position.
    value_dim: width of a head's value.
    kv_rank: width of the latent of keys and values.
    q_rank: width of the latent of queries; None projects them directly.
    rope: of the rest of queries and keys, whose width is its head_dim.
    scale: of logits; None is the width of a query to the -0.5.
    norm: of the latents.
    latent_cache: the cache holds latents, and a head's products with the latent move to its query and its output.
    indexer: chooses the keys that a query sees; None lets it see all.
    watched: keeps the largest logit of each head, until `clipped` is asked for.
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
    """How far back a query sees."""
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
    """What the kernel is told."""
    return ScoreSpec(self.key_dim**-0.5 if self.scale is None else self.scale)

  @property
  def order_invariant(self) -> bool:
    """Whether the tokens of a row may stand in any order, since positions say what comes before what."""
    return self.indexer is None and not self.tracked

  def clip_weights(self, weights: Mapping[str, jax.Array], gamma: jax.Array) -> dict[str, jax.Array]:
    """Weights of a stack of layers, by their path in the layer, that multiply the logits of its heads by gamma [R,H].

    Queries and keys share it, but the rotated key belongs to all heads, so its queries take all of theirs.
    """
    root = jnp.sqrt(gamma)
    plain, turned = jnp.split(weights["query/weight"], [self.qk_nope_head_dim], axis=-1)
    key, value = jnp.split(weights["kv/weight"], [self.qk_nope_head_dim], axis=-1)
    return {
      "query/weight": jnp.concatenate([per_head(plain, root), per_head(turned, gamma)], axis=-1),
      "kv/weight": jnp.concatenate([per_head(key, root), value], axis=-1),
    }

  def build(self, factory: ParamFactory, width: int, execution: ExecutionConfig) -> "LatentAttention":
    """The layer."""
    return LatentAttention(factory, self, width, execution)


class LatentAttention(nnx.Module):
  """Latents, their norms, products with them, rotation, attention, output projection."""

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
    assert (self.indexer is None) == (indexer is None), "an indexer's queries are products of the queries' latent"

  def __call__(
    self, x: jax.Array, context: Context, cache: Cache | None, repeat: jax.Array
  ) -> tuple[jax.Array, Cache | None]:
    spec, execution = self.spec, self.execution
    narrow = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
    table = context.table(spec.rope)
    plain, turned = jnp.split(self.query(narrow), [spec.qk_nope_head_dim], axis=-1)
    turned = rotate(turned, table, spec.rope.interleaved)
    latent, position = jnp.split(self.kv_down(x), [spec.kv_lora_rank], axis=-1)
    latent, position = self.kv_norm(latent), rotate(position[..., None, :], table, spec.rope.interleaved)[..., 0, :]
    queries = Tokens(context.positions, context.segments, context.spans)
    seen, keys = self._kept(x, latent, position, context), queries
    if cache is not None:
      cache, seen, keys = update_cache(cache, repeat, context, seen, execution.kv_cache.quantization, context.pages)
    assert self.indexer is None or context.spans is None, "the indexer chooses among earlier keys"
    selected = None if self.indexer is None else self.indexer(x, narrow, context, seen["index_key"], keys.positions)
    alone = cache is None or context.fresh  # tokens see each other alone
    if spec.latent_cache and not alone:
      out = self._absorbed(plain, turned, seen["latent"], seen["position"], queries, keys, selected)
      return self.out(execution.sharding.constrain(out, *_HEADS)), cache

    q, (k, v) = (
      execution.sharding.constrain(jnp.concatenate([plain, turned], axis=-1), *_HEADS),
      self._keys_and_values(seen),
    )
    if alone:
      track_max_logits(self.largest_logit, q, k, queries, spec.scoring, execution.numerics.precision)
      q_spec, kv_spec = (execution.sharding.partition(a.shape, *_HEADS) for a in (q, v))
      inputs = AttentionInputs(q, k, v, queries, selected=selected)
      sharding = AttentionSharding(execution.sharding.mesh, q_spec, kv_spec)
      out = execution.kernels.attention(inputs, spec.scoring, sharding, self.matmuls)
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
    return self.out(execution.sharding.constrain(out, *_HEADS)), cache

  def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
    """The cache of one layer."""
    spec, dtype, places = self.spec, self.execution.numerics.dtype, length + self.execution.kv_cache.speculative_tokens

    def narrow(width: int) -> CacheSpec:
      return CacheSpec((batch, places, width), _LATENT, dtype)

    def heads(width: int) -> CacheSpec:
      return CacheSpec((batch, spec.heads, places, width), _CACHED, dtype)

    if spec.latent_cache:
      slots = {"latent": narrow(spec.kv_lora_rank), "position": narrow(spec.rope.head_dim)}
    else:
      slots = {"key": heads(spec.key_dim), "value": heads(spec.v_head_dim)}
    if spec.indexer is not None:
      slots |= {"index_key": narrow(spec.indexer.head_dim)}
    return cache_arrays(slots, self.execution.kv_cache.quantization, self.execution.kv_cache.pages)

  def _kept(self, x: jax.Array, latent: jax.Array, position: jax.Array, context: Context) -> Cache:
    """What a cache holds of new tokens."""
    if self.spec.latent_cache:
      new = {"latent": latent, "position": position}
    else:
      new = dict(zip(("key", "value"), self._products(latent, position), strict=True))
    return new if self.indexer is None else new | {"index_key": self.indexer.keys(x, context)}

  def _keys_and_values(self, kept: Cache) -> tuple[jax.Array, jax.Array]:
    if self.spec.latent_cache:
      return self._products(kept["latent"], kept["position"])
    return kept["key"], kept["value"]

  def _products(self, latent: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [B,T,H,N+R] and values [B,T,H,V] of latents [B,T,L] and rotated keys [B,T,R]."""
    plain, value = jnp.split(self.kv(latent), [self.spec.qk_nope_head_dim], axis=-1)
    turned = jnp.broadcast_to(position[..., None, :], (*plain.shape[:-1], position.shape[-1]))
    key = jnp.concatenate([plain, turned], axis=-1)
    return self.execution.sharding.constrain(key, *_HEADS), self.execution.sharding.constrain(value, *_HEADS)

  def _absorbed(
    self,
    plain: jax.Array,
    turned: jax.Array,
    latent: jax.Array,
    position: jax.Array,
    queries: Tokens,
    slots: Tokens,
    selected: jax.Array | None,
  ) -> jax.Array:
    """Attention over the latents themselves, as one key head: q (W c) = (q W) c, and sum w (W c) = W (sum w c)."""
    cut = self.spec.qk_nope_head_dim
    absorbed = self.kv.contract("mla_absorb_key", "bshn,lhn->bshl", plain, (0, cut))
    q = jnp.concatenate([absorbed, turned], axis=-1)
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
