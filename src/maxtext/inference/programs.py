"""The functions that an engine compiles. Besides their arguments they depend only on the fields of `Programs`.

Shapes: B slots, S tokens of a chunk, T longest sequence, M most pages of a slot, W draft tokens, V vocabulary.
"""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext.inference.block_table import BlockTable
from maxtext.inference.decode_state import (
  Caches,
  DecodeState,
  MediaChunk,
  bind,
  commit,
  decode_step,
  forward_step,
  init_decode_state,
  prefill,
)
from maxtext.inference.draft_model import DraftModel
from maxtext.inference.ngram_proposer import propose
from maxtext.inference.sampling import PromptLogprobs, SamplerOutput, prompt_logprobs, sample
from maxtext.layers.kv_cache import CacheSpec
from maxtext.layers.paged_kv_cache import PagedKVCache
from maxtext.models.model import Model, Params
from maxtext.models.spec import towers_of

_SHORTEST_ROW = 256  # positions


@dataclass(frozen=True, eq=False)
class Programs:
  """Pure functions over parameters, cache rows and the decode state.

  Parameters are those of the model, and those of the draft model under its prefix (`DraftModel.prefixed_params`). A
  cache has the groups of the model, followed by those of the draft model.

  Attributes:
    row_model: prefills rows, each of which has a contiguous cache.
    slot_model: decodes the slots, whose cache may be paged.
    draft_model: proposes draft tokens; None proposes by prompt lookup (n-gram).
    slots: number of sequences that are decoded at once.
    max_model_len: longest sequence, prompt and output.
    num_speculative_tokens: draft tokens of a `speculative_step`.
  """

  row_model: Model
  slot_model: Model
  draft_model: DraftModel | None
  slots: int
  max_model_len: int
  num_speculative_tokens: int

  @staticmethod
  def of(
    model: Model, slots: int, max_model_len: int, num_speculative_tokens: int, draft_model: DraftModel | None
  ) -> "Programs":
    """Adds room for draft tokens to the caches; `max_model_len` is limited by what the pages of one slot hold."""
    if num_speculative_tokens:
      model = Model.of(model.spec, model.execution.replace(speculative_tokens=num_speculative_tokens))
    if draft_model is not None:
      draft_model = draft_model.with_speculation(num_speculative_tokens)
    pages = model.execution.kv_cache.pages
    if pages is None:
      return Programs(model, model, draft_model, slots, max_model_len, num_speculative_tokens)
    unpaged = Model.of(model.spec, model.execution.replace(pages=None))
    max_model_len = min(max_model_len, pages.per_row(max_model_len) * pages.size)
    return Programs(unpaged, model, draft_model, slots, max_model_len, num_speculative_tokens)

  @property
  def pages(self) -> PagedKVCache | None:
    """The layout of a paged KV cache; None where each slot has a contiguous row."""
    return self.slot_model.execution.kv_cache.pages

  def block_table(self) -> BlockTable:
    """An empty block table; without pages each slot has one page that holds the longest sequence."""
    if self.pages is None:
      return BlockTable(self.slots, self.max_model_len + self.num_speculative_tokens, self.slots, 1)
    return BlockTable(self.pages.count, self.pages.size, self.slots, self.pages.per_row(self.max_model_len))

  @property
  def row_lengths(self) -> tuple[int, ...]:
    """Lengths that the cache of a row may have, in few sizes; the last is that of the longest sequence.

    The row of a short prompt is short, so that little is copied into its slot. Pages are cut from whole rows.
    """
    shorter = (_SHORTEST_ROW * 4**i for i in itertools.count())
    lengths = itertools.takewhile(lambda length: length < self.max_model_len, shorter)
    return (*(() if self.pages else lengths), self.max_model_len)

  def row_shapes(self, length: int) -> Caches:
    """Shapes and dtypes of a row of this length."""
    specs = self.row_model.shapes.cache_specs(1, length)
    specs += [] if self.draft_model is None else self.draft_model.cache_specs(1, length)
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)

  def grow(self, row: Caches, length: int) -> Caches:
    """A row as one of a greater length."""

    def pad(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
      return jnp.pad(array, [(0, most - size) for size, most in zip(array.shape, like.shape, strict=True)])

    return jax.tree.map(pad, row, self.row_shapes(length))

  def cache_specs(self) -> list[list[dict[str, CacheSpec]]]:
    """The description of each array of the slots' KV cache."""
    own = self.slot_model.shapes.cache_specs(self.slots, self.max_model_len)
    return own if self.draft_model is None else own + self.draft_model.cache_specs(self.slots, self.max_model_len)

  def init_state(self, params: Params) -> DecodeState:
    """The state of empty slots. It holds the sequences only if the n-gram proposer reads them."""
    sequence_len = self.max_model_len if self.num_speculative_tokens and self.draft_model is None else 0
    state = init_decode_state(self.slot_model, params, self.slots, self.max_model_len, sequence_len)
    if self.draft_model is None:
      return state
    return state._replace(cache=state.cache + self.draft_model.init_cache(params, self.slots, self.max_model_len))

  def encode(self, params: Params, arrays: dict[str, jax.Array], tower: str) -> jax.Array:
    """The features [D,T,E] that a tower makes of one input (`tower_inputs`), of the embeddings and of D - 1 layers."""
    found = jnp.concatenate(self.row_model.bind(params).towers[tower].features(**arrays))
    most = 1 + max(len(one.deepstack) for one in towers_of(self.row_model.spec))
    return jnp.pad(found, ((0, most - len(found)), (0, 0), (0, 0)))

  def prefill(
    self,
    params: Params,
    tokens: jax.Array,
    count: jax.Array,
    adapter: jax.Array,
    media: MediaChunk | None = None,
  ) -> Caches:
    """A new row after the first `count` [1] tokens of [1,S], by the adapter [1] in a slot of the tables."""
    return self._prefill(params, None, tokens, jnp.zeros((), jnp.int32), count, adapter, media)[1]

  def prefill_chunk(
    self,
    params: Params,
    row: Caches,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    adapter: jax.Array,
    media: MediaChunk | None = None,
  ) -> Caches:
    """A row after `count` [1] more tokens of [1,S], which begin at position `start`."""
    return self._prefill(params, row, tokens, start, count, adapter, media)[1]

  def prefill_with_logprobs(
    self,
    params: Params,
    row: Caches | None,
    tokens: jax.Array,
    next_tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    adapter: jax.Array,
    media: MediaChunk | None = None,
  ) -> tuple[Caches, PromptLogprobs]:
    """`prefill_chunk`, or `prefill` without a row, with the log-probabilities of the token [1,S] after each."""
    hidden, cache, _ = self._prefill(params, row, tokens, start, count, adapter, media)
    return cache, prompt_logprobs(bind(self.row_model, params, adapter).logits, hidden, next_tokens)

  def prefill_with_routed_experts(
    self,
    params: Params,
    row: Caches | None,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    adapter: jax.Array,
    media: MediaChunk | None = None,
  ) -> tuple[Caches, jax.Array]:
    """`prefill_chunk`, or `prefill` without a row, with the experts [S,N] of its tokens, as vectors."""
    _, cache, routed = self._prefill(params, row, tokens, start, count, adapter, media)
    assert routed is not None, "the model keeps them"
    return cache, routed[0]

  def score(self, params: Params, tokens: jax.Array, adapters: jax.Array) -> jax.Array:
    """Float32 log-probabilities [B,S-1] of all tokens [B,S] but the first, by the forward pass of training."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    decoder = bind(self.row_model, params, adapters)
    hidden, _, _ = decoder.hidden(tokens, positions)
    logprobs = jax.nn.log_softmax(decoder.logits(hidden).astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]

  def embed(self, params: Params, tokens: jax.Array, count: jax.Array, adapters: jax.Array) -> jax.Array:
    """The mean of the last hidden states of the first `count` [B] tokens [B,S], as float32 unit vectors [B,E]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _, _ = bind(self.row_model, params, adapters).hidden(tokens, positions)
    counted = (positions < count[:, None])[..., None]
    pooled = jnp.sum(jnp.where(counted, hidden.astype(jnp.float32), 0), axis=1) / count[:, None]
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)

  def decode_step(
    self, params: Params, state: DecodeState, active: jax.Array, block_table: jax.Array | None, token_bitmask: jax.Array
  ) -> tuple[DecodeState, SamplerOutput]:
    """Samples one token in every active slot; the cache of the draft model is updated with it.

    `block_table` [B,M] are the pages of the slots, None without pages.
    """
    own, draft = self._split(state.cache)
    pages = self._active_pages(block_table, active)
    after, output = decode_step(self.slot_model, params, state._replace(cache=own), active, token_bitmask, pages)
    updated = [] if self.draft_model is None else self.draft_model.update_cache(params, draft, state, active)
    return after._replace(cache=after.cache + updated), output

  def speculative_step(
    self, params: Params, state: DecodeState, active: jax.Array, block_table: jax.Array | None
  ) -> tuple[DecodeState, tuple[SamplerOutput, jax.Array]]:
    """Proposes W draft tokens in every slot, feeds them after the last token, and commits the accepted ones.

    Returns:
      The state, and for each of the W + 1 positions the sampled tokens and the slots [B] that commit them.
    """
    own, draft = self._split(state.cache)
    pages = self._active_pages(block_table, active)
    if self.draft_model is None:
      draft_tokens = propose(state.sequences, state.positions, self.num_speculative_tokens)
      updated = Caches()
    else:
      draft_tokens, updated = self.draft_model.propose(params, draft, state, active, self.num_speculative_tokens)
    draft_tokens = jnp.minimum(draft_tokens, self.slot_model.spec.vocab - 1)
    tokens = jnp.concatenate([state.tokens[:, None], draft_tokens], axis=1)
    logits, cache, _ = forward_step(
      self.slot_model,
      params,
      own,
      tokens,
      state.positions,
      active=active,
      pages=pages,
      adapters=state.adapters,
      rotary_offsets=state.rotary_offsets,
    )
    expected = jnp.pad(draft_tokens, ((0, 0), (0, 1)))  # nothing is accepted after the last position
    positions = logits.swapaxes(0, 1), expected.swapaxes(0, 1)
    (state, _), outputs = jax.lax.scan(_verify, (state._replace(cache=[]), active), positions)
    return state._replace(cache=cache + updated), outputs

  def _prefill(
    self,
    params: Params,
    row: Caches | None,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    adapter: jax.Array,
    media: MediaChunk | None,
  ) -> tuple[jax.Array, Caches, jax.Array | None]:
    """The hidden states of a chunk, its row, which is new if none is given, and the experts of its tokens."""
    fresh = row is None
    if row is None:
      length = next((length for length in self.row_lengths if length >= tokens.shape[1]), self.max_model_len)
      row = self.row_model.bind(params).init_cache(1, length)
      if self.draft_model is not None:
        row = row + self.draft_model.init_cache(params, 1, length)
    own, draft = self._split(row)
    hidden, cache, routed = prefill(self.row_model, params, own, tokens, start, count, fresh, adapter, media)
    if self.draft_model is not None:
      cache = cache + self.draft_model.prefill(params, draft, tokens, start, count, fresh)
    return hidden, cache, routed

  def _split(self, cache: Caches) -> tuple[Caches, Caches]:
    """The groups of the model, and those of the draft model."""
    own = len(self.slot_model.spec.groups)
    return cache[:own], cache[own:]

  def _active_pages(self, block_table: jax.Array | None, active: jax.Array) -> jax.Array | None:
    """The block table without the pages of inactive slots, so that a step does not write to them."""
    if block_table is None:
      return None
    assert self.pages is not None
    return jnp.where(active[:, None], block_table, self.pages.count)


def _verify(
  carry: tuple[DecodeState, jax.Array], position: tuple[jax.Array, jax.Array]
) -> tuple[tuple[DecodeState, jax.Array], tuple[SamplerOutput, jax.Array]]:
  """Samples from the logits [B,V] of one position; a slot stays active while its draft token [B] is the sampled one."""
  (state, active), (logits, draft_tokens) = carry, position
  output = sample(logits, state.sampling.where(active), state.history, state.positions + 1)
  return (commit(state, output.token_ids, active), active & (output.token_ids == draft_tokens)), (output, active)
