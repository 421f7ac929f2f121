"""Guesses of what comes next by a small model, which reads and writes along with the one it guesses for.

Its cache stands behind the other's, in rows and slots, so that prefill, insert and kept beginnings know of no draft. It
chooses tokens as the other does, by the request's sampling parameters and the same draws, since what is likely to both
is then likely to be the same. A guess is only ever checked.

Shapes: B slots, W guesses.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from maxtext.inference.sampling import choose
from maxtext.inference.state import Caches, State, accepted, advance, fill
from maxtext.layers.cache import Slots
from maxtext.models.model import Model, Params

_PREFIX = "draft/"


@dataclass(frozen=True, eq=False)
class Draft:
  """A small model and its parameters, of the same vocabulary and on the same devices as the large one."""

  model: Model
  params: Params

  @property
  def named(self) -> Params:
    """Its parameters under names that the large model's do not have."""
    return {_PREFIX + name: array for name, array in self.params.items()}

  def roomy(self, ahead: int) -> "Draft":
    """The same with places for guesses that are taken back, in rows of their own."""
    how = replace(self.model.how, cache_ahead=ahead, cache_pages=None)
    return Draft(Model.of(self.model.spec, how), self.params)

  def kinds(self, rows: int, length: int) -> list[list[dict[str, Slots]]]:
    """What its cache is made of."""
    return self.model.shapes.cache_slots(rows, length)

  def empty(self, params: Params, rows: int, length: int) -> Caches:
    """A cache of nothing."""
    return self.model.bind(_own(params)).empty_cache(rows, length)

  def fill(
    self, params: Params, row: Caches, tokens: jax.Array, start: jax.Array, count: jax.Array, fresh: bool
  ) -> Caches:
    """A row's cache after a piece of a prompt."""
    return fill(self.model, _own(params), row, tokens, start, count, fresh)

  def follow(self, params: Params, cache: Caches, state: State, active: jax.Array) -> Caches:
    """The cache after the tokens that the slots feed; nothing is guessed."""
    return advance(self.model, _own(params), cache, state.tokens[:, None], state.positions, active=active)[1]

  def guess(
    self, params: Params, cache: Caches, state: State, active: jax.Array, count: int
  ) -> tuple[jax.Array, Caches]:
    """The `count` tokens [B,W] that may follow in each slot, and the cache after all of them were fed."""
    own = _own(params)

    def one(carry: tuple[State, Caches], _: None) -> tuple[tuple[State, Caches], jax.Array]:
      state, cache = carry
      logits, cache = advance(self.model, own, cache, state.tokens[:, None], state.positions, active=active)
      tokens = choose(logits[:, 0], state.controls, state.history, state.positions + 1).tokens
      return (accepted(state, tokens, active), cache), tokens

    # Once more than there are guesses, so that the last is in the cache too where all of them are right.
    (_, cache), guessed = jax.lax.scan(one, (state._replace(cache=[]), cache), None, length=count + 1)
    return jnp.swapaxes(guessed[:count], 0, 1), cache


def _own(params: Params) -> Params:
  return {name.removeprefix(_PREFIX): array for name, array in params.items() if name.startswith(_PREFIX)}
