"""The decoder module, built from any `DecoderSpec`.

Shapes: B batch, S sequence, E width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.block import RESIDUAL
from maxtext.layers.context import Context
from maxtext.layers.dropout import dropout, token_keys
from maxtext.layers.embedding import Embedding, Positions, merge_features, sinusoids
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.kv_cache import Cache, CacheSpec
from maxtext.layers.linear import Linear
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.stack import Stack
from maxtext.models.media import Media
from maxtext.models.routed_experts import of_groups
from maxtext.models.spec import DecoderSpec, towers_of
from maxtext.models.tower import Tower

_TOKENS = ("activation_embed_and_logits_batch", "activation_norm_length", "activation_embed")
_LOGITS = ("activation_embed_and_logits_batch", "activation_length", "activation_vocab")


class Decoder(nnx.Module):
  """Maps tokens to hidden states, and hidden states to logits.

  It also holds the towers of a `ModelSpec`, which encode the `media` of a batch.

  Attributes:
    dropout_key: the random key of dropout, which the train step sets; None is no dropout.
  """

  dropout_key: nnx.Variable[jax.Array] | None = None

  def __init__(self, spec: DecoderSpec, execution: ExecutionConfig, seed: jax.typing.ArrayLike | None) -> None:
    self.spec, self.execution = spec, execution
    factory = ParamFactory(seed, execution.numerics.weight_dtype)
    std = spec.width**-0.5 if spec.tied else 1.0
    self.embedding = Embedding(factory.scope("embedding"), spec.vocab, spec.width, execution, std, spec.embedding_scale)
    rows = spec.learned_positions
    self.positions = None if rows is None else Positions(factory.scope("positions"), rows, spec.width, execution)
    groups = factory.scope("groups")
    pipelines = execution.pipelines or (None,) * len(spec.groups)
    self.groups = nnx.List(
      [
        Stack(groups.scope(i), group.cycle, group.repeats, spec.width, execution, pipeline)
        for i, (group, pipeline) in enumerate(zip(spec.groups, pipelines, strict=True))
      ]
    )
    self.final_norm = spec.final_norm.build(factory.scope("final_norm"), spec.width)
    mtp = factory.scope("mtp")
    self.mtp = nnx.List(
      [] if spec.mtp is None else [spec.mtp.build(mtp.scope(i), spec.width, execution) for i in range(spec.mtp.count)]
    )
    towers = factory.scope("towers")
    self.towers = nnx.Dict({t.name: Tower(towers.scope(t.name), t, spec.width, execution) for t in towers_of(spec)})
    width, vocab = {"embed": spec.width}, {"vocab": spec.vocab}
    self.head = Linear(factory.scope("head"), width, vocab, execution, "logits", tied=spec.tied, role="head")

  def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Embeds tokens [B,S] at positions [B,S] to [B,S,E], which `hidden` takes as `embeddings`.

    Scaling and learned or sinusoidal positions are applied as the spec says. `merge_features` inserts features of
    other inputs, such as images, into the result.
    """
    x = self.embedding(tokens)
    if self.positions is not None:
      x = x + self.positions(positions)
    if self.spec.sinusoidal_positions:
      x = x + sinusoids(positions, self.spec.width, self.execution.numerics.dtype)
    return self.execution.sharding.constrain(x, *_TOKENS)

  def hidden(
    self,
    tokens: jax.Array | None,
    positions: jax.Array,
    segments: jax.Array | None = None,
    layer_inputs: Sequence[list[Any] | None] | None = None,
    cache: list[list[Cache]] | None = None,
    count: jax.Array | None = None,
    fresh: bool = False,
    pages: jax.Array | None = None,
    end: jax.Array | None = None,
    embeddings: jax.Array | None = None,
    rotary_positions: jax.Array | None = None,
    spans: jax.Array | None = None,
    media: Media | None = None,
    routed_experts: jax.Array | None = None,
  ) -> tuple[jax.Array, list[Any], list[list[Cache]] | None]:
    """Runs the layers on tokens [B,S].

    Args:
      tokens: [B,S]; may be None if `embeddings` are given, unless layers look tokens up (`DecoderSpec.needs_tokens`).
      positions: [B,S], of tokens in their document.
      segments: [B,S]; tokens attend only within their segment.
      layer_inputs: a list over groups of what a `Stack` takes, or None for a group.
      cache: a list over groups, from `init_cache`.
      count: [B]; with a cache, only the first `count` tokens of a row are valid.
      fresh: whether the cache is empty.
      pages: [B,M], the block table of a paged KV cache.
      end: the cache is read only up to this position.
      embeddings: [B,S,E] from `embed`, used instead of embedding the tokens here.
      rotary_positions: [B,S] or [B,S,3] (mRoPE: tokens of an image share their time) for RoPE; None uses `positions`.
      spans: [B,S]; tokens of a document with the same number other than 0 attend to each other in both directions.
        With a cache, one call must have all tokens of a span.
      media: inputs of towers, whose features replace the embeddings of their tokens; they set `spans` where the tower
        says so.
      routed_experts: [B,S,N], from `models/routed_experts.py`; tokens are routed to these experts.

    Returns:
      The normed hidden states [B,S,E], the auxiliary outputs of each group's layers, and the updated cache.
    """
    execution = self.execution
    if media:
      embeddings, spans, layer_inputs = self._merge_media(tokens, positions, media, embeddings, spans, layer_inputs)
    if tokens is None and embeddings is None:
      raise ValueError("hidden() takes tokens, embeddings, or both; both are None.")
    if tokens is None and self.spec.needs_tokens:
      raise ValueError("hidden() needs the tokens beside their embeddings: layers of this model look them up.")
    if spans is not None and self.spec.chooses_keys:
      raise ValueError("spans are not supported by layers that choose the keys a query sees (MoBA, an indexer).")
    looked_up = tokens if self.spec.needs_tokens else None
    context = Context.of(
      positions,
      segments,
      self.spec.ropes,
      execution.numerics.dtype,
      looked_up,
      count,
      fresh,
      pages,
      end,
      rotary_positions,
      spans,
      self._dropout_keys(positions),
    )
    if embeddings is None:
      assert tokens is not None
      embeddings = self.embed(tokens, positions)
    x = execution.sharding.constrain(embeddings, *RESIDUAL)
    x = dropout(x, context.dropout_keys, execution.dropout_rate, len(self.groups))
    x, auxiliary, caches = self._expand_streams(x), [], []
    replayed = [None] * len(self.groups) if routed_experts is None else of_groups(self.spec.groups, routed_experts)
    for i, group in enumerate(self.groups):
      group_inputs, group_cache = (None if tree is None else tree[i] for tree in (layer_inputs, cache))
      own = replace(context.fold_in(i), routed_experts=replayed[i])
      x, outputs, updated = group(x, group_inputs, own, group_cache)
      auxiliary.append(outputs)
      caches.append(updated)
    return self.final_norm(self._merge_streams(x)), auxiliary, None if cache is None else caches

  def _merge_media(
    self,
    tokens: jax.Array | None,
    positions: jax.Array,
    media: Media,
    embeddings: jax.Array | None,
    spans: jax.Array | None,
    layer_inputs: Sequence[list[Any] | None] | None,
  ) -> tuple[jax.Array, jax.Array | None, Sequence[list[Any] | None] | None]:
    """Embeddings with the features of media in their places, the spans of tokens that see each other, and what joins
    the residual in the first layers."""
    if embeddings is None:
      assert tokens is not None
      embeddings = self.embed(tokens, positions)
    for name, one in media.items():
      rows = one.inputs.shape[0]
      features = self.towers[name].features(**one.of_tower())
      if self.towers[name].spec.bidirectional_features:
        assert spans is None, "one tower or the caller numbers the spans"
        spans = one.spans(features[0].shape[1])
      of_rows = [f.reshape(rows, -1, f.shape[-1]) for f in features]
      rate = self.towers[name].spec.projector_dropout
      embeddings, early = self.with_features(embeddings, of_rows, one.indices, self._dropout_keys(positions), rate)
      if early:
        assert layer_inputs is None, "one tower or the caller has inputs of layers"
        layer_inputs = early
    return embeddings, spans, layer_inputs

  def with_features(
    self,
    embeddings: jax.Array,
    features: Sequence[jax.Array],
    indices: jax.Array,
    dropout_keys: jax.Array | None = None,
    rate: float = 0.0,
  ) -> tuple[jax.Array, list[list[Any] | None] | None]:
    """Embeddings with the first of the features [B,N,E] in their places, and what `hidden` takes as `layer_inputs` of
    the others, which join the residual in the first layers (DeepStack). All have dropout where there are keys."""
    first, *early = features
    nothing, parts = jnp.zeros_like(embeddings), len(self.groups) + len(self.mtp) + 1  # that draw masks of their own
    embeddings = merge_features(embeddings, first, indices)
    if rate:
      embeddings = jnp.where((indices >= 0)[..., None], dropout(embeddings, dropout_keys, rate, parts), embeddings)
    if not early:
      return embeddings, None
    merged = [merge_features(nothing, one, indices) for one in early]
    joined = [dropout(one, dropout_keys, rate, parts + i) for i, one in enumerate(merged, 1)]
    return embeddings, [[jnp.stack([nothing, *joined])], *[None] * (len(self.groups) - 1)]

  def mtp_hidden(
    self,
    hidden: jax.Array,
    next_tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None = None,
    rotary_positions: jax.Array | None = None,
    spans: jax.Array | None = None,
  ) -> tuple[list[jax.Array], list[Any]]:
    """Runs the multi-token prediction (MTP) layers.

    Args:
      hidden: [B,S,E] from `hidden()`.
      next_tokens: [B,S], the token after each input token.
      positions: the arguments of `hidden()`, like the remaining ones.

    Returns:
      One array of hidden states per layer, for the second next token, the third, ..., and the layers' auxiliary
      outputs. States at the end of a row or document have no target and are meaningless.
    """
    context = Context.of(
      positions,
      segments,
      self.spec.ropes,
      self.execution.numerics.dtype,
      rotary_positions=rotary_positions,
      spans=spans,
      dropout_keys=self._dropout_keys(positions),
    )
    found, auxiliary = [], []
    for i, layer in enumerate(self.mtp, len(self.groups) + 1):
      own = context.fold_in(i)
      tokens = self.execution.sharding.constrain(self.embedding(next_tokens), *RESIDUAL)
      tokens = dropout(tokens, own.dropout_keys, self.execution.dropout_rate, 1)  # number 0 is the layer's
      hidden, outputs = layer(hidden, tokens, own)
      found.append(hidden)
      auxiliary.append(outputs)
      next_tokens = jnp.roll(next_tokens, -1, axis=1)
    return found, auxiliary

  def _dropout_keys(self, positions: jax.Array) -> jax.Array | None:
    """The key of each token [B,S,2]; it depends on the token's row and place in the text, not on its place here."""
    if self.dropout_key is None:
      return None
    (rows, length), order = positions.shape, self.execution.kernels.attention.order
    places = jnp.arange(length) if order is None else order.sequence(length)
    return token_keys(self.dropout_key[...], rows, places)

  def _expand_streams(self, x: jax.Array) -> jax.Array:
    streams = self.spec.streams
    return x if streams == 1 else jnp.broadcast_to(x[:, :, None], (*x.shape[:2], streams, x.shape[2]))

  def _merge_streams(self, x: jax.Array) -> jax.Array:
    return x if self.spec.streams == 1 else x.mean(2)

  def logits(self, x: jax.Array) -> jax.Array:
    """Maps hidden states [B,S,E] to logits [B,S,V]."""
    execution, spec = self.execution, self.spec
    dtype = jnp.float32 if execution.numerics.logits_dot_in_float32 else execution.numerics.dtype
    weight = self.embedding.as_head if spec.tied else None
    logits = execution.sharding.constrain(self.head(x, weight, dtype), *_LOGITS)
    if execution.numerics.cast_logits_to_float32:
      logits = logits.astype(jnp.float32)
    if spec.logit_scale != 1.0:
      logits = logits * spec.logit_scale
    return logits if spec.logit_cap is None else spec.logit_cap * jnp.tanh(logits / spec.logit_cap)

  @property
  def has_dropout(self) -> bool:
    """Whether any part draws dropout masks, where there is a key."""
    rates = [tower.projector_dropout for tower in towers_of(self.spec)]
    return max(self.execution.dropout_rate, *rates, 0.0) > 0

  @property
  def supports_rollback(self) -> bool:
    """Whether the last tokens can be removed from a cache: all layers cache per position, without running state."""
    return all(slots.ring for slots in jax.tree.leaves(self.cache_specs(1, 1)))

  def cache_specs(self, batch: int, length: int) -> list[list[dict[str, CacheSpec]]]:
    """Shapes, dtypes and logical axes of the arrays of a KV cache for `length` positions."""
    return [group.cache_specs(batch, length) for group in self.groups]

  def init_cache(self, batch: int, length: int) -> list[list[Cache]]:
    """An empty KV cache, sharded like the activations it will hold."""

    def zeros(slots: CacheSpec) -> jax.Array:
      return self.execution.sharding.constrain(jnp.zeros(slots.shape, slots.dtype), *slots.axes)

    return jax.tree.map(zeros, self.cache_specs(batch, length))
