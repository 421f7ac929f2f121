"""Speculative decoding with a draft model: a smaller model proposes the draft tokens that the large one verifies.

The KV cache of the draft model follows the groups of the large model's, in rows and in slots, so prefill, insert and
the prefix cache need no special case. The draft model samples with the request's sampling parameters and the same
random numbers as the large model, so tokens that are likely under both are often the same.

Shapes: B slots, W draft tokens.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext.inference.decode_state import Caches, DecodeState, commit, forward_step, prefill
from maxtext.inference.sampling import sample
from maxtext.layers.kv_cache import CacheSpec
from maxtext.models.model import Model, Params

_PREFIX = "draft/"


@dataclass(frozen=True, eq=False)
class DraftModel:
  """A small model and its parameters, with the vocabulary and on the devices of the large model."""

  model: Model
  params: Params

  @property
  def prefixed_params(self) -> Params:
    """The parameters under names that do not collide with those of the large model."""
    return {_PREFIX + name: array for name, array in self.params.items()}

  def with_speculation(self, num_speculative_tokens: int) -> "DraftModel":
    """A copy whose cache, which is never paged, has room for draft tokens that are rejected."""
    execution = self.model.execution.replace(speculative_tokens=num_speculative_tokens, pages=None)
    return DraftModel(Model.of(self.model.spec, execution), self.params)

  def cache_specs(self, rows: int, max_model_len: int) -> list[list[dict[str, CacheSpec]]]:
    """The description of each array of the KV cache."""
    return self.model.shapes.cache_specs(rows, max_model_len)

  def init_cache(self, params: Params, rows: int, max_model_len: int) -> Caches:
    """An empty KV cache."""
    return self.model.bind(_draft_params(params)).init_cache(rows, max_model_len)

  def prefill(
    self, params: Params, row: Caches, tokens: jax.Array, start: jax.Array, count: jax.Array, fresh: bool
  ) -> Caches:
    """The cache of a row after a chunk of a prompt."""
    return prefill(self.model, _draft_params(params), row, tokens, start, count, fresh)[1]

  def update_cache(self, params: Params, cache: Caches, state: DecodeState, active: jax.Array) -> Caches:
    """The cache after the tokens that the slots feed, where nothing is proposed."""
    own = _draft_params(params)
    return forward_step(self.model, own, cache, state.tokens[:, None], state.positions, active=active)[1]

  def propose(
    self, params: Params, cache: Caches, state: DecodeState, active: jax.Array, count: int
  ) -> tuple[jax.Array, Caches]:
    """Proposes `count` draft tokens [B,W] for each slot; returns them and the cache after all of them were fed."""
    own = _draft_params(params)

    def step(carry: tuple[DecodeState, Caches], _: None) -> tuple[tuple[DecodeState, Caches], jax.Array]:
      state, cache = carry
      logits, cache = forward_step(self.model, own, cache, state.tokens[:, None], state.positions, active=active)[:2]
      tokens = sample(logits[:, 0], state.sampling, state.history, state.positions + 1).token_ids
      return (commit(state, tokens, active), cache), tokens

    # One step more than draft tokens, so that the last one is in the cache if all of them are accepted.
    (_, cache), tokens = jax.lax.scan(step, (state._replace(cache=[]), cache), None, length=count + 1)
    return jnp.swapaxes(tokens[:count], 0, 1), cache


def _draft_params(params: Params) -> Params:
  return {name.removeprefix(_PREFIX): array for name, array in params.items() if name.startswith(_PREFIX)}
