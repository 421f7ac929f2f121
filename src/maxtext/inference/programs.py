"""The functions that an engine compiles: what they depend on besides their arguments is the fields of one class.

Shapes: B slots, S tokens of a piece, T longest sequence, M most pages of a slot, W guesses, V vocabulary.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from maxtext.inference.draft import Draft
from maxtext.inference.lookup import guesses
from maxtext.inference.page_table import PageTable
from maxtext.inference.sampling import Chosen, choose
from maxtext.inference.state import Caches, State, accepted, advance, empty, fill, generate
from maxtext.layers.cache import Slots
from maxtext.layers.pages import Pages
from maxtext.models.model import Model, Params


@dataclass(frozen=True, eq=False)
class Programs:
  """Pure functions over parameters, rows of cache and the slots' state; each is compiled by the engine.

  Parameters are those of the model, and of the draft under its prefix (`Draft.named`). A cache has the groups of the
  model, then those of the draft.

  Attributes:
    row_model: prefills rows, each of which has a cache of its own.
    slot_model: steps the slots, whose cache may lie in pages.
    draft: guesses tokens with a cache beside the model's; None looks them up in the text.
    slots: sequences that are generated at once.
    length: longest sequence, the prompt counted.
    ahead: tokens that `write` guesses in a step.
  """

  row_model: Model
  slot_model: Model
  draft: Draft | None
  slots: int
  length: int
  ahead: int

  @staticmethod
  def of(model: Model, slots: int, length: int, ahead: int, draft: Draft | None) -> "Programs":
    """Makes room for guesses in the caches; `length` is at most what the pages of one slot hold."""
    if ahead:
      model = Model.of(model.spec, replace(model.how, cache_ahead=ahead))
    if draft is not None:
      draft = draft.roomy(ahead)
    pages = model.how.cache_pages
    if pages is None:
      return Programs(model, model, draft, slots, length, ahead)
    unpaged = Model.of(model.spec, replace(model.how, cache_pages=None))
    return Programs(unpaged, model, draft, slots, min(length, pages.per_row(length) * pages.size), ahead)

  @property
  def pages(self) -> Pages | None:
    """How the slots' cache is cut into pages; None where each slot has a row."""
    return self.slot_model.how.cache_pages

  def page_table(self) -> PageTable:
    """Who has which pages, at first nobody; without pages a slot has one that holds all of a text."""
    if self.pages is None:
      return PageTable(self.slots, self.length + self.ahead, self.slots, 1)
    return PageTable(self.pages.count, self.pages.size, self.slots, self.pages.per_row(self.length))

  def kinds(self) -> list[list[dict[str, Slots]]]:
    """What the slots' cache is made of."""
    own = self.slot_model.shapes.cache_slots(self.slots, self.length)
    return own if self.draft is None else own + self.draft.kinds(self.slots, self.length)

  def begun(self, params: Params) -> State:
    """The state of slots that nobody is in; it has the text only where guesses are looked up in it."""
    text = self.length if self.ahead and self.draft is None else 0
    state = empty(self.slot_model, params, self.slots, self.length, text)
    if self.draft is None:
      return state
    return state._replace(cache=state.cache + self.draft.empty(params, self.slots, self.length))

  def begin(self, params: Params, tokens: jax.Array, count: jax.Array) -> Caches:
    """A new row after the first `count` [1] tokens of [1,S]."""
    row = self.row_model.bind(params).empty_cache(1, self.length)
    if self.draft is not None:
      row = row + self.draft.empty(params, 1, self.length)
    return self._fill(params, row, tokens, jnp.zeros((), jnp.int32), count, fresh=True)

  def go_on(self, params: Params, row: Caches, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Caches:
    """A row after `count` [1] more tokens of [1,S], from position `start` on."""
    return self._fill(params, row, tokens, start, count, fresh=False)

  def score(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Float32 log-probabilities [B,S-1] of the tokens [B,S] but the first, by the forward pass of training."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    decoder = self.row_model.bind(params)
    hidden, _, _ = decoder.hidden(tokens, positions)
    log_probs = jax.nn.log_softmax(decoder.logits(hidden).astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]

  def step(
    self, params: Params, state: State, active: jax.Array, rows: jax.Array | None, allowed: jax.Array
  ) -> tuple[State, Chosen]:
    """One token in every active slot, of those that are allowed; the draft reads along.

    `rows` [B,M] are the pages of the slots, None without pages.
    """
    own, drafted = self._split(state.cache)
    pages = self._active_pages(rows, active)
    after, chosen = generate(self.slot_model, params, state._replace(cache=own), active, allowed, pages)
    followed = [] if self.draft is None else self.draft.follow(params, drafted, state, active)
    return after._replace(cache=after.cache + followed), chosen

  def write(
    self, params: Params, state: State, active: jax.Array, rows: jax.Array | None
  ) -> tuple[State, tuple[Chosen, jax.Array]]:
    """Guesses W tokens in every slot, feeds them all behind the last token, and takes them as far as they are right.

    Returns:
      The state, and for each of the W + 1 places the chosen tokens and the slots [B] that take them.
    """
    own, drafted = self._split(state.cache)
    pages = self._active_pages(rows, active)
    if self.draft is None:
      guessed, followed = guesses(state.text, state.positions, self.ahead), Caches()
    else:
      guessed, followed = self.draft.guess(params, drafted, state, active, self.ahead)
    guessed = jnp.minimum(guessed, self.slot_model.spec.vocab - 1)
    fed = jnp.concatenate([state.tokens[:, None], guessed], axis=1)
    logits, cache = advance(self.slot_model, params, own, fed, state.positions, active=active, pages=pages)
    expected = jnp.pad(guessed, ((0, 0), (0, 1)))  # nothing is taken behind the last place
    places = logits.swapaxes(0, 1), expected.swapaxes(0, 1)
    (state, _), written = jax.lax.scan(_verify, (state._replace(cache=[]), active), places)
    return state._replace(cache=cache + followed), written

  def _fill(
    self, params: Params, row: Caches, tokens: jax.Array, start: jax.Array, count: jax.Array, fresh: bool
  ) -> Caches:
    own, drafted = self._split(row)
    cache = fill(self.row_model, params, own, tokens, start, count, fresh)
    return cache if self.draft is None else cache + self.draft.fill(params, drafted, tokens, start, count, fresh)

  def _split(self, cache: Caches) -> tuple[Caches, Caches]:
    """The groups of the model, and those of the draft."""
    own = len(self.slot_model.spec.groups)
    return cache[:own], cache[own:]

  def _active_pages(self, rows: jax.Array | None, active: jax.Array) -> jax.Array | None:
    """Pages of the slots that step; the others have none, and so leave nothing in theirs."""
    if rows is None:
      return None
    assert self.pages is not None
    return jnp.where(active[:, None], rows, self.pages.count)


def _verify(
  carry: tuple[State, jax.Array], place: tuple[jax.Array, jax.Array]
) -> tuple[tuple[State, jax.Array], tuple[Chosen, jax.Array]]:
  """Chooses a token from the logits [B,V] of one place; a slot stays active while its guess [B] was right."""
  (state, active), (logits, guess) = carry, place
  chosen = choose(logits, state.controls, state.history, state.positions + 1)
  return (accepted(state, chosen.tokens, active), active & (chosen.tokens == guess)), (chosen, active)
