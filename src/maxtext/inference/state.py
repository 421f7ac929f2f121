"""What the slots of an engine hold, and the pure functions over it that its programs are made of.

Shapes: B slots, S tokens of a piece, T longest sequence, M most pages of a slot, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.inference.sampling import Chosen, Controls, History, choose
from maxtext.layers.cache import Cache, Slots
from maxtext.layers.pages import insert_row
from maxtext.models.model import Model, Params

Caches = list[list[Cache]]


class State(NamedTuple):
  """What the slots hold: the cache, and of each the token that is fed next, its position, and how to answer.

  Attributes:
    text: [B,T] all tokens so far, up to that position; without guesses nobody looks, and it has no places.
  """

  cache: Caches
  text: jax.Array
  tokens: jax.Array
  positions: jax.Array
  controls: Controls
  history: History


def empty(model: Model, params: Params, slots: int, length: int, text: int = 0) -> State:
  """Of slots that nobody is in, with that many places for what is written and for what is looked up."""
  nothing, vocab = jnp.zeros(slots, jnp.int32), model.spec.vocab
  history = History(jnp.zeros((slots, vocab), bool), jnp.zeros((slots, vocab), jnp.int32))
  cache = model.bind(params).empty_cache(slots, length)
  places = jnp.zeros((slots, text), jnp.int32)
  return State(cache, places, nothing, nothing, Controls.empty(slots, vocab), history)


def generate(
  model: Model,
  params: Params,
  state: State,
  active: jax.Array,
  allowed: jax.Array,
  pages: jax.Array | None = None,
) -> tuple[State, Chosen]:
  """Feeds every slot its last token, and chooses the next in those that are active; `pages` [B,M] are theirs."""
  fed = state.tokens[:, None]
  logits, cache = advance(model, params, state.cache, fed, state.positions, active=active, pages=pages)
  chosen = choose(logits[:, 0], state.controls, state.history, state.positions + 1, allowed)
  return accepted(state._replace(cache=cache), chosen.tokens, active), chosen


def fill(
  model: Model,
  params: Params,
  row: Caches,
  tokens: jax.Array,
  start: jax.Array,
  count: jax.Array,
  fresh: bool = False,
) -> Caches:
  """A row's cache after `count` [1] tokens of [1,S], from position `start` on."""
  positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  _, _, extended = model.bind(params).hidden(tokens, positions, cache=row, count=count, fresh=fresh)
  assert extended is not None
  return extended


def insert(
  kinds: list[list[dict[str, Slots]]],
  state: State,
  row: Caches,
  slot: jax.Array,
  pages: jax.Array,
  text: jax.Array,
  counts: jax.Array,
  controls: Controls,
) -> State:
  """The state with a row in a slot, and its pages [M]; the text [T] is filled up with the vocabulary's size.

  `counts` [2] are how many tokens of it are the prompt, and how many are there with what was answered.
  """
  places, count = jnp.arange(text.shape[0]), counts[1]

  def put(kind: Slots, whole: jax.Array, one: jax.Array) -> jax.Array:
    if kind.paged:
      return insert_row(whole, one, pages)
    return jax.lax.dynamic_update_slice_in_dim(whole, one, slot, axis=1)

  def times(where: jax.Array) -> jax.Array:
    counted = jnp.where(where, text, state.history.prompt.shape[1])
    return jnp.zeros_like(state.history.generated[0]).at[counted].add(1, mode="drop")

  history = History(
    state.history.prompt.at[slot].set(times(places < counts[0]) > 0),
    state.history.generated.at[slot].set(times(places >= counts[0])),
  )
  return State(
    jax.tree.map(put, kinds, state.cache, row),
    state.text.at[slot, places].set(text, mode="drop"),
    state.tokens.at[slot].set(text[count - 1]),
    state.positions.at[slot].set(count - 1),
    jax.tree.map(lambda all_rows, one: all_rows.at[slot].set(one), state.controls, controls),
    history,
  )


def advance(
  model: Model,
  params: Params,
  cache: Caches,
  tokens: jax.Array,
  positions: jax.Array,
  *,
  active: jax.Array | bool = True,
  pages: jax.Array | None = None,
) -> tuple[jax.Array, Caches]:
  """Feeds tokens [B,S] from a position of each row on; float32 logits [B,S,V] of what follows them, and the cache.

  The cache is read as far as the longest active row [B] has come; logits of the others mean nothing.
  """
  decoder = model.bind(params)
  places = positions[:, None] + jnp.arange(tokens.shape[1])
  end = jnp.max(jnp.where(active, positions, 0)) + tokens.shape[1]
  hidden, _, extended = decoder.hidden(tokens, places, cache=cache, pages=pages, end=end)
  assert extended is not None
  return decoder.logits(hidden).astype(jnp.float32), extended


def accepted(state: State, tokens: jax.Array, active: jax.Array) -> State:
  """The state with a next token [B] in each active slot; its keys are not in the cache yet."""
  rows, positions = jnp.arange(tokens.shape[0]), state.positions + active
  return State(
    state.cache,
    state.text.at[rows, jnp.where(active, positions, state.text.shape[1])].set(tokens, mode="drop"),
    jnp.where(active, tokens, state.tokens),
    positions,
    state.controls,
    state.history._replace(generated=state.history.generated.at[rows, tokens].add(active)),
  )
