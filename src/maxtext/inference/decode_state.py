"""The state of an engine's slots, and the pure functions over it that the engine's programs are made of.

Shapes: B slots, S tokens of a chunk, T longest sequence, M most pages of a slot, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.inference.sampling import SamplerOutput, SamplingState, TokenHistory, sample
from maxtext.layers.kv_cache import Cache, CacheSpec
from maxtext.layers.multi_lora import with_rows
from maxtext.layers.paged_kv_cache import insert_row
from maxtext.models.decoder import Decoder
from maxtext.models.model import Model, Params
from maxtext.models.routed_experts import as_vectors

Caches = list[list[Cache]]
_LOGITS = ("activation_embed_and_logits_batch", "activation_vocab")


class DecodeState(NamedTuple):
  """The state of all slots.

  Attributes:
    cache: the KV cache.
    sequences: [B,T] all tokens up to `positions`. T is 0 unless the n-gram proposer reads them.
    tokens: [B] the token that each slot feeds next.
    positions: [B] the position of that token.
    sampling: the sampling parameters of each slot.
    history: which tokens occurred, for the penalties.
    adapters: [B] the slot of each row's adapter in the tables of adapters; 0 is none.
    rotary_offsets: [B] what is added to the positions of tokens behind media for RoPE; 0 without mRoPE.
  """

  cache: Caches
  sequences: jax.Array
  tokens: jax.Array
  positions: jax.Array
  sampling: SamplingState
  history: TokenHistory
  adapters: jax.Array
  rotary_offsets: jax.Array


def init_decode_state(
  model: Model, params: Params, slots: int, max_model_len: int, sequence_len: int = 0
) -> DecodeState:
  """The state of empty slots.

  Args:
    model: the model.
    params: its parameters.
    slots: number of slots.
    max_model_len: longest sequence that the KV cache holds.
    sequence_len: length T of `DecodeState.sequences`.
  """
  zeros, vocab = jnp.zeros(slots, jnp.int32), model.spec.vocab
  # Sharded as logits are: otherwise every device has the counts of all slots, and they are gathered after each step.
  prompt, output = (
    model.execution.sharding.constrain(jnp.zeros((slots, vocab), dtype), *_LOGITS) for dtype in (bool, jnp.int32)
  )
  history = TokenHistory(prompt, output)
  cache = model.bind(params).init_cache(slots, max_model_len)
  sequences = jnp.zeros((slots, sequence_len), jnp.int32)
  return DecodeState(cache, sequences, zeros, zeros, SamplingState.empty(slots, vocab), history, zeros, zeros)


class MediaChunk(NamedTuple):
  """What a chunk of a prompt with media has beside its tokens.

  Attributes:
    features: [D,1,S,E] of the embeddings and of D - 1 layers, each at its token; None if the chunk has none.
    indices: [1,S] the number of the feature of each token; -1 for tokens of text.
    spans: [1,S] tokens with the same number other than 0 attend to each other in both directions; None if none do.
    rotary_positions: [1,S,3]; None without mRoPE.
  """

  features: jax.typing.ArrayLike | None
  indices: jax.typing.ArrayLike
  spans: jax.typing.ArrayLike | None
  rotary_positions: jax.typing.ArrayLike | None


_NONE = (None,) * 4


def decode_step(
  model: Model,
  params: Params,
  state: DecodeState,
  active: jax.Array,
  token_bitmask: jax.Array,
  pages: jax.Array | None = None,
) -> tuple[DecodeState, SamplerOutput]:
  """Feeds the last token of every slot and samples the next one; only active slots change.

  `pages` [B,M] is the block table of a paged KV cache.
  """
  logits, cache, routed_experts = forward_step(
    model,
    params,
    state.cache,
    state.tokens[:, None],
    state.positions,
    active=active,
    pages=pages,
    adapters=state.adapters,
    rotary_offsets=state.rotary_offsets,
  )
  sampling = state.sampling.where(active)
  output = sample(logits[:, 0], sampling, state.history, state.positions + 1, token_bitmask)
  if routed_experts is not None:
    output = output._replace(routed_experts=routed_experts[:, 0])
  return commit(state._replace(cache=cache), output.token_ids, active), output


def prefill(
  model: Model,
  params: Params,
  row: Caches,
  tokens: jax.Array,
  start: jax.Array,
  count: jax.Array,
  fresh: bool = False,
  adapters: jax.Array | None = None,
  media: MediaChunk | None = None,
) -> tuple[jax.Array, Caches, jax.Array | None]:
  """The hidden states [1,S,E] of a chunk [1,S], which begins at position `start`, the cache of its row after the
  first `count` [1] tokens, and the experts [1,S,N] of its tokens with `keep_routed_experts`.

  `adapters` [1] is the slot of the row's adapter; None is the base. `media` are features of the tokens, if any.
  """
  positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  decoder, embeddings, layer_inputs = bind(model, params, adapters), None, None
  features, indices, spans, rotary_positions = (
    None if array is None else jnp.asarray(array) for array in media or _NONE
  )
  if features is not None and indices is not None:
    embeddings, layer_inputs = decoder.with_features(decoder.embed(tokens, positions), list(features), indices)
  hidden, auxiliary, updated = decoder.hidden(
    tokens,
    positions,
    layer_inputs=layer_inputs,
    cache=row,
    count=count,
    fresh=fresh,
    embeddings=embeddings,
    rotary_positions=rotary_positions,
    spans=spans,
  )
  assert updated is not None
  return hidden, updated, _routed_experts(model, auxiliary)


def insert(
  cache_specs: list[list[dict[str, CacheSpec]]],
  state: DecodeState,
  row: Caches,
  slot: jax.Array,
  pages: jax.Array,
  sequence: jax.Array,
  counts: jax.Array,
  sampling: SamplingState,
  adapter: jax.Array,
  rotary_offset: jax.Array,
) -> DecodeState:
  """Puts a prefilled row into a slot.

  Args:
    cache_slots: the description of each array of the KV cache.
    state: the state of all slots.
    row: the prefilled cache of one sequence.
    slot: index of the slot.
    pages: [M] the pages of the slot.
    sequence: [T] prompt and output tokens, padded with the vocabulary size.
    counts: [2] the number of prompt tokens, and of prompt and output tokens together.
    sampling: the sampling parameters of the request.
    adapter: the slot of its adapter in the tables of adapters; 0 is none.
    rotary_offset: of its `DecodeState.rotary_offsets`.
  """
  indices, count = jnp.arange(sequence.shape[0]), counts[1]

  def put(kind: CacheSpec, whole: jax.Array, one: jax.Array) -> jax.Array:
    if kind.paged:
      return insert_row(whole, one, pages)
    return jax.lax.dynamic_update_slice_in_dim(whole, one, slot, axis=1)

  def token_counts(mask: jax.Array) -> jax.Array:
    counted = jnp.where(mask, sequence, state.history.prompt.shape[1])
    return jnp.zeros_like(state.history.output[0]).at[counted].add(1, mode="drop")

  history = TokenHistory(
    state.history.prompt.at[slot].set(token_counts(indices < counts[0]) > 0),
    state.history.output.at[slot].set(token_counts(indices >= counts[0])),
  )
  return DecodeState(
    jax.tree.map(put, cache_specs, state.cache, row),
    state.sequences.at[slot, indices].set(sequence, mode="drop"),
    state.tokens.at[slot].set(sequence[count - 1]),
    state.positions.at[slot].set(count - 1),
    jax.tree.map(lambda all_rows, one: all_rows.at[slot].set(one), state.sampling, sampling),
    history,
    state.adapters.at[slot].set(adapter),
    state.rotary_offsets.at[slot].set(rotary_offset),
  )


def bind(model: Model, params: Params, adapters: jax.Array | None) -> Decoder:
  """The decoder of a batch whose rows have the adapters in these slots [B]; None is the base."""
  return model.bind(params if adapters is None else with_rows(model.params, params, adapters))


def forward_step(
  model: Model,
  params: Params,
  cache: Caches,
  tokens: jax.Array,
  positions: jax.Array,
  *,
  active: jax.Array | bool = True,
  pages: jax.Array | None = None,
  adapters: jax.Array | None = None,
  rotary_offsets: jax.Array | None = None,
) -> tuple[jax.Array, Caches, jax.Array | None]:
  """Feeds tokens [B,S] that begin at `positions` [B]; returns float32 logits [B,S,V], the updated cache, and the
  experts [B,S,N] of the tokens with `keep_routed_experts`.

  The cache is read up to the longest active row [B]. The logits of inactive rows are undefined.
  """
  decoder = bind(model, params, adapters)
  token_positions = positions[:, None] + jnp.arange(tokens.shape[1])
  end = jnp.max(jnp.where(active, positions, 0)) + tokens.shape[1]
  rotary = None
  if rotary_offsets is not None and model.spec.has_mrope:
    rotary = token_positions + rotary_offsets[:, None]
  hidden, auxiliary, updated = decoder.hidden(
    tokens, token_positions, cache=cache, pages=pages, end=end, rotary_positions=rotary
  )
  assert updated is not None
  return decoder.logits(hidden).astype(jnp.float32), updated, _routed_experts(model, auxiliary)


def _routed_experts(model: Model, auxiliary: list[Any]) -> jax.Array | None:
  return as_vectors(auxiliary) if model.execution.keep_routed_experts else None


def commit(state: DecodeState, tokens: jax.Array, active: jax.Array) -> DecodeState:
  """Appends a token [B] to the sequence of each active slot. Its keys and values are not in the cache yet."""
  rows, positions = jnp.arange(tokens.shape[0]), state.positions + active
  return DecodeState(
    state.cache,
    state.sequences.at[rows, jnp.where(active, positions, state.sequences.shape[1])].set(tokens, mode="drop"),
    jnp.where(active, tokens, state.tokens),
    positions,
    state.sampling,
    state.history._replace(output=state.history.output.at[rows, tokens].add(active)),
    state.adapters,
    state.rotary_offsets,
  )
