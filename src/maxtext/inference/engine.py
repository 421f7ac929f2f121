"""The engine: prefill, insert and generate, pure functions that are compiled once each and always run the whole batch.

A prompt without its last token is prefilled into a row of its own, in pieces whose lengths come from a short list. The
row is inserted into a slot of the cache. Each step then feeds the last token of every slot, so the first answer's token
comes from the step that feeds the last of the prompt, and tokens are chosen in one place. What a slot computes does not
depend on the others.

A step may also feed guesses behind the last token. Each place chooses its token as if it had been alone there, and what
was chosen counts as far as the guesses before it were right. So the text is the same as without, drawn tokens too: a
draw depends on the seed and the position alone.

A row always has a cache of its own. Where that of the slots lies in pages, `insert` cuts the row into them, and each
step is told which pages a slot has; who gets pages is the scheduler's.

Shapes: B slots, S tokens of a piece, T longest sequence, M most pages of a slot, W guesses, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.checkpoint.checksum import added, checksums
from maxtext.inference.draft import Draft
from maxtext.inference.lookup import guesses
from maxtext.inference.page_table import PageTable
from maxtext.inference.sampling import Chosen, Controls, Settings, anything, choose
from maxtext.inference.state import Caches, State, accepted, advance, empty, fill, generate, insert
from maxtext.layers.cache import Cache
from maxtext.models.model import Model, Params

_SHORTEST = 16  # shorter pieces are filled up; a kernel of blocks wants more
_SHORTEST_BLOCK = 128


class Piece(NamedTuple):
  """A part of a prompt that is prefilled at once."""

  start: int
  tokens: Sequence[int]


class Engine:
  """Compiled programs over the slots. It knows no request; who is where is the scheduler's.

  Args:
    model: the model, whose experts drop no token here.
    params: its parameters and buffers, placed.
    slots: sequences that are generated at once.
    length: longest sequence, the prompt counted.
    longest_prompt: in tokens.
    piece: longest piece of a prompt; None prefills prompts at once.
    keeps_rows: a row is still there after another piece went on from it.
    ahead: tokens that `write` guesses and checks in a step; not for models with layers that keep a state.
    draft: who guesses them, in place of what followed the same words before.

  Attributes:
    pages: those of the slots; without pages a slot has one that holds all of a text.
  """

  def __init__(
    self,
    model: Model,
    params: Params,
    slots: int,
    length: int,
    longest_prompt: int,
    piece: int | None = None,
    keeps_rows: bool = False,
    ahead: int = 0,
    draft: Draft | None = None,
  ) -> None:
    if ahead:
      model = Model.of(model.spec, replace(model.how, cache_ahead=ahead))
    if draft is not None:
      draft, params = draft.roomy(ahead), params | draft.named
    self.ahead, own = ahead, len(model.spec.groups)  # behind its own groups a cache has those of the draft
    paged, pages = model, model.how.cache_pages
    if pages is None:
      self.pages = PageTable(slots, length + ahead, slots, 1)
    else:
      model, most = Model.of(model.spec, replace(model.how, cache_pages=None)), pages.per_row(length)
      self.pages, length = PageTable(pages.count, pages.size, slots, most), min(length, most * pages.size)
    self._params, self._paged, self._spec, self.vocab = params, pages is not None, model.spec, model.spec.vocab
    self.slots, self.length, self.longest_prompt = slots, length, longest_prompt
    shortest = _SHORTEST_BLOCK if model.how.attention.kernel == "splash" else _SHORTEST
    self.sizes = _sizes(shortest, min(piece or longest_prompt, longest_prompt))
    self._goes_on = piece is not None or keeps_rows or (pages is not None and length > self.sizes[-1])

    def begin(params: Params, tokens: jax.Array, count: jax.Array) -> Caches:
      row = model.bind(params).empty_cache(1, length) + ([] if draft is None else draft.empty(params, 1, length))
      return filled(params, row, tokens, jnp.zeros((), jnp.int32), count, fresh=True)

    def go_on(params: Params, row: Caches, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Caches:
      return filled(params, row, tokens, start, count)

    def filled(
      params: Params, row: Caches, tokens: jax.Array, start: jax.Array, count: jax.Array, fresh: bool = False
    ) -> Caches:
      cache = fill(model, params, row[:own], tokens, start, count, fresh)
      return cache if draft is None else cache + draft.fill(params, row[own:], tokens, start, count, fresh)

    def step(
      params: Params, state: State, active: jax.Array, rows: jax.Array | None, allowed: jax.Array
    ) -> tuple[State, Chosen]:
      rows = _of_active(rows, active, self.pages.count)
      after, chosen = generate(paged, params, state._replace(cache=state.cache[:own]), active, allowed, rows)
      followed = [] if draft is None else draft.follow(params, state.cache[own:], state, active)
      return after._replace(cache=after.cache + followed), chosen

    def write(
      params: Params, state: State, active: jax.Array, rows: jax.Array | None
    ) -> tuple[State, tuple[Chosen, jax.Array]]:
      rows = _of_active(rows, active, self.pages.count)
      if draft is None:
        guessed, followed = guesses(state.text, state.positions, ahead), list[list[Cache]]()
      else:
        guessed, followed = draft.guess(params, state.cache[own:], state, active, ahead)
      guessed = jnp.minimum(guessed, self.vocab - 1)
      fed = jnp.concatenate([state.tokens[:, None], guessed], axis=1)
      logits, cache = advance(paged, params, state.cache[:own], fed, state.positions, active=active, pages=rows)

      def take(
        carry: tuple[State, jax.Array], place: tuple[jax.Array, jax.Array]
      ) -> tuple[tuple[State, jax.Array], tuple[Chosen, jax.Array]]:
        (state, active), (logits, guess) = carry, place
        chosen = choose(logits, state.controls, state.history, state.positions + 1)
        return (accepted(state, chosen.tokens, active), active & (chosen.tokens == guess)), (chosen, active)

      expected = jnp.pad(guessed, ((0, 0), (0, 1)))  # nothing is taken behind the last place
      places = logits.swapaxes(0, 1), expected.swapaxes(0, 1)
      (state, _), written = jax.lax.scan(take, (state._replace(cache=[]), active), places)
      return state._replace(cache=cache + followed), written

    def begun(params: Params) -> State:
      state = empty(paged, params, slots, length, length if ahead and draft is None else 0)
      return state if draft is None else state._replace(cache=state.cache + draft.empty(params, slots, length))

    self.state = jax.jit(begun)(params)
    shardings = jax.tree.map(lambda a: a.sharding, self.state)
    everywhere = NamedSharding(model.how.mesh, PartitionSpec())
    self._everywhere, self._anything = everywhere, jax.device_put(anything(slots, self.vocab), everywhere)
    self._begin = jax.jit(begin)
    self._go_on = jax.jit(go_on, donate_argnums=() if keeps_rows else 1)
    kinds = paged.shapes.cache_slots(slots, length) + ([] if draft is None else draft.kinds(slots, length))
    self._insert = jax.jit(partial(insert, kinds), donate_argnums=0, out_shardings=shardings)
    self._generate = jax.jit(step, donate_argnums=1, out_shardings=(shardings, everywhere))
    self._write = jax.jit(write, donate_argnums=1, out_shardings=(shardings, everywhere))

  @cached_property
  def row(self) -> Caches:
    """Shapes of what `prefill` returns."""
    return self._begin.eval_shape(self._params, np.zeros((1, self.sizes[0]), np.int32), np.ones(1, np.int32))

  @cached_property
  def fingerprint(self) -> str:
    """Tells this model and its parameters from all others."""
    return repr((self._spec, added(checksums(self._params)).tolist()))

  def pieces(self, prompt: Sequence[int], start: int = 0) -> Iterator[Piece]:
    """What must be prefilled before `insert`: from `start` on everything but the last token.

    A prompt of one token has an empty piece, which makes its row.
    """
    most, end = self.sizes[-1], len(prompt) - 1
    for first in range(start, max(end, 1), most):
      yield Piece(first, prompt[first : min(first + most, end)])

  def prefill(self, piece: Piece, row: Caches | None = None) -> Caches:
    """The cache of a row after a piece; pieces come in order, each with the row that the last one left."""
    size = next(size for size in self.sizes if size >= len(piece.tokens))
    tokens, count = _filled(piece.tokens, size, 0)[None], np.full(1, len(piece.tokens), np.int32)
    if row is None:
      assert piece.start == 0
      return self._begin(self._params, tokens, count)
    return self._go_on(self._params, row, tokens, np.int32(piece.start), count)

  def prefilled(self, prompt: Sequence[int]) -> Caches:
    """The cache of a whole prompt, ready for `insert`."""
    row = None
    for piece in self.pieces(prompt):
      row = self.prefill(piece, row)
    assert row is not None, "a prompt has a piece at least"
    return row

  def insert(
    self, row: Caches, slot: int, prompt: Sequence[int], settings: Settings, answered: Sequence[int] = ()
  ) -> None:
    """Puts a prefilled prompt, and what it was answered so far, into a slot; the row is still there afterwards."""
    controls = Controls.of(settings, len(prompt), self.vocab)
    text, pages = [*prompt, *answered], self.pages.rows[slot].copy()
    counts = np.array([len(prompt), len(text)], np.int32)
    tokens = _filled(text, self.length, self.vocab)
    self.state = self._insert(self.state, row, np.int32(slot), pages, tokens, counts, controls)

  def generate(self, active: Sequence[bool], allowed: np.ndarray | None = None) -> Chosen:
    """One step of all slots; those that are not active stay as they are, and what is chosen for them is nothing.

    Args:
      active: the slots that have a request.
      allowed: bits of the tokens that may come next in each slot; None allows all, and costs no transfer.
    """
    bits = self._anything if allowed is None else jax.device_put(allowed, self._everywhere)
    self.state, chosen = self._generate(self._params, self.state, np.array(active, bool), self._rows, bits)
    return jax.device_get(chosen)

  def write(self, active: Sequence[bool], allowed: np.ndarray | None = None) -> list[tuple[Chosen, np.ndarray]]:
    """One step of all slots that may write several tokens: one after the other, each with the slots that it is for.

    What is allowed is known of the next token alone, so there it writes only that.
    """
    if not self.ahead or allowed is not None:
      return [(self.generate(active, allowed), np.array(active, bool))]
    self.state, written = self._write(self._params, self.state, np.array(active, bool), self._rows)
    chosen, there = jax.device_get(written)
    return [(Chosen(*arrays), slots) for *arrays, slots in zip(*chosen, there, strict=True)]

  @property
  def _rows(self) -> np.ndarray | None:
    """The pages that a step is told of; a copy, since steps run on while the table changes."""
    return self.pages.rows.copy() if self._paged else None

  def warm_up(self) -> None:
    """Compiles every program."""
    for size in self.sizes:
      row = self.prefill(Piece(0, [0] * size))
      if self._goes_on:
        row = self.prefill(Piece(size, [0] * size), row)
    self.insert(row, 0, [0], Settings())
    for step in (self.generate, self.write):
      step([False] * self.slots)


def dropless(model: Model) -> Model:
  """The model with experts that drop no token: which are dropped would depend on the rest of the batch."""
  experts = model.how.experts
  if not experts.drops:
    return model
  return Model.of(model.spec, replace(model.how, experts=replace(experts, method="dropless", buffer=None)))


def _of_active(rows: jax.Array | None, active: jax.Array, none: int) -> jax.Array | None:
  """Pages of the slots that step; the others leave nothing in theirs."""
  return None if rows is None else jnp.where(active[:, None], rows, none)


def _sizes(shortest: int, longest: int) -> tuple[int, ...]:
  """Doubling from the shortest to the longest, so that few programs serve all prompts and little is filled up."""
  sizes = [shortest]
  while sizes[-1] < longest:
    sizes.append(sizes[-1] * 2)
  return tuple(sizes)


def _filled(tokens: Sequence[int], size: int, value: int) -> np.ndarray:
  filled = np.full(size, value, np.int32)
  filled[: len(tokens)] = tokens
  return filled
