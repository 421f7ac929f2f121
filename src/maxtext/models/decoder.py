"""One decoder for every spec.

Shapes: B batch, S sequence, E width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.layers.block import RESIDUAL
from maxtext.layers.context import Context
from maxtext.layers.embedding import Embedding, Positions, sinusoids
from maxtext.layers.execution import ExecutionConfig
from maxtext.layers.kv_cache import Cache, CacheSpec
from maxtext.layers.linear import Linear
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.stack import Stack
from maxtext.models.spec import DecoderSpec, towers_of
from maxtext.models.tower import Tower

_TOKENS = ("activation_embed_and_logits_batch", "activation_norm_length", "activation_embed")
_LOGITS = ("activation_embed_and_logits_batch", "activation_length", "activation_vocab")


class Decoder(nnx.Module):
  """Tokens to hidden states, hidden states to logits.

  The towers of a `ModelSpec` stand beside it: `towers[name](inputs)` returns features, which `merge_features` puts
  among what `embed` returns.
  """

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
    beside = factory.scope("towers")
    self.towers = nnx.Dict({t.name: Tower(beside.scope(t.name), t, spec.width, execution) for t in towers_of(spec)})
    width, vocab = {"embed": spec.width}, {"vocab": spec.vocab}
    self.head = Linear(factory.scope("head"), width, vocab, execution, "logits", tied=spec.tied, role="head")

  def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Tokens [B,S] at positions [B,S] to embeddings [B,S,E], what `hidden` takes in their place.

    They are scaled, and learned or sinusoidal positions are added, as the spec says. Features of other inputs, such as
    images, are merged into the result with `merge_features`.
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
  ) -> tuple[jax.Array, list[Any], list[list[Cache]] | None]:
    """Tokens [B,S] to normed hidden states [B,S,E], the layers' reports per group, and the extended cache.

    `embeddings` [B,S,E] take the place of the tokens' own, from `embed`; the tokens may then be None, unless layers
    look them up (`DecoderSpec.looks_up_tokens`).

    `positions` [B,S] order the tokens of a document. Rotary embeddings turn by `rotary_positions`, [B,S] or [B,S,3]
    (mRoPE: tokens of an image share their time), where they are given. Tokens of a document with the same number in
    `spans` [B,S], other than 0, see each other both ways; with a cache, one call has all tokens of a span.

    Layer inputs and caches are lists over groups of what a `Stack` takes; the layer inputs of a group may be None. With
    a cache, only the first `count` [B] tokens of a row count, `fresh` says that nothing is in it, and `end` that
    nothing behind that position is needed; `pages` [B,M] are those of each row.
    """
    execution = self.execution
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
    )
    if embeddings is None:
      assert tokens is not None
      embeddings = self.embed(tokens, positions)
    x, reports, caches = self._spread(execution.sharding.constrain(embeddings, *RESIDUAL)), [], []
    for i, group in enumerate(self.groups):
      own_inputs, own_cache = (None if tree is None else tree[i] for tree in (layer_inputs, cache))
      x, report, extended = group(x, own_inputs, context, own_cache)
      reports.append(report)
      caches.append(extended)
    return self.final_norm(self._gathered(x)), reports, None if cache is None else caches

  def mtp_hidden(
    self,
    hidden: jax.Array,
    next_tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None = None,
    rotary_positions: jax.Array | None = None,
    spans: jax.Array | None = None,
  ) -> tuple[list[jax.Array], list[Any]]:
    """Hidden states that predict the second token on, the third, ..., and the layers' reports.

    `hidden` and `next_tokens` [B,S] are those of `hidden()` and what follows its tokens; positions and segments are
    those that it had. States at the end of a row or of a document, whose further tokens are not known, are there but
    say nothing.
    """
    context = Context.of(
      positions,
      segments,
      self.spec.ropes,
      self.execution.numerics.dtype,
      rotary_positions=rotary_positions,
      spans=spans,
    )
    found, reports = [], []
    for layer in self.mtp:
      tokens = self.execution.sharding.constrain(self.embedding(next_tokens), *RESIDUAL)
      hidden, report = layer(hidden, tokens, context)
      found.append(hidden)
      reports.append(report)
      next_tokens = jnp.roll(next_tokens, -1, axis=1)
    return found, reports

  def _spread(self, x: jax.Array) -> jax.Array:
    streams = self.spec.streams
    return x if streams == 1 else jnp.broadcast_to(x[:, :, None], (*x.shape[:2], streams, x.shape[2]))

  def _gathered(self, x: jax.Array) -> jax.Array:
    return x if self.spec.streams == 1 else x.mean(2)

  def logits(self, x: jax.Array) -> jax.Array:
    """Hidden states [B,S,E] to logits [B,S,V]."""
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
  def supports_rollback(self) -> bool:
    """Whether the last tokens can be taken back from a cache: every layer has places for them."""
    return all(slots.ring for slots in jax.tree.leaves(self.cache_specs(1, 1)))

  def cache_specs(self, batch: int, length: int) -> list[list[dict[str, CacheSpec]]]:
    """The arrays of a cache for `length` positions."""
    return [group.cache_specs(batch, length) for group in self.groups]

  def init_cache(self, batch: int, length: int) -> list[list[Cache]]:
    """That cache, placed like the activations it will hold."""

    def zeros(slots: CacheSpec) -> jax.Array:
      return self.execution.sharding.constrain(jnp.zeros(slots.shape, slots.dtype), *slots.axes)

    return jax.tree.map(zeros, self.cache_specs(batch, length))
