"""The engine: prefill, insert and generate over slots, compiled once each and always run for the whole batch.

The pure functions that it compiles are in `programs.py`.

A prompt without its last token is prefilled into a row of its own, in pieces whose lengths come from a short list. The
row is inserted into a slot of the cache. Each step then feeds the last token of every slot, so the first answer's token
comes from the step that feeds the last of the prompt, and tokens are chosen in one place. What a slot computes does not
depend on the others.

A step may also feed guesses behind the last token. Each place chooses its token as if it had been alone there, and what
was chosen counts as far as the guesses before it were right. So the text is the same as without, drawn tokens too: a
draw depends on the seed and the position alone.

A row always has a cache of its own. Where that of the slots lies in pages, `insert` cuts the row into them, and each
step is told which pages a slot has; who gets pages is the scheduler's.

The model's parameters are an argument of every program, so `update_params` swaps them without compiling anything. What
is in the slots stays: requests that run go on with the keys and values that older parameters have left in their cache.

Shapes: B slots, S tokens of a piece, T longest sequence, M most pages of a slot, W guesses, V vocabulary.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.checkpoint.checksum import added, checksums
from maxtext.inference.draft import Draft
from maxtext.inference.programs import Programs
from maxtext.inference.sampling import Chosen, Controls, SamplingParams, anything
from maxtext.inference.state import Caches, insert
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
    version: of the parameters, as `update_params` was told; 0 at first.
    updates: how often parameters were swapped; it tells two parameter trees apart whatever their versions are.
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
    programs = Programs.of(model, slots, length, ahead, draft)
    self.model, self._draft_params = model, {} if draft is None else draft.named
    self._structs = {path: _struct(array) for path, array in params.items()}
    self._params, self.version, self.updates = params | self._draft_params, 0, 0
    self._swap, self._stepping, self._next = threading.Lock(), False, _NO_UPDATE
    self._fingerprint = (-1, "")
    self.slots, self.length, self.longest_prompt, self.ahead = slots, programs.length, longest_prompt, ahead
    self._spec, self.vocab = model.spec, model.spec.vocab
    self._paged, self.pages = programs.pages is not None, programs.page_table()
    shortest = _SHORTEST_BLOCK if model.how.attention.kernel == "splash" else _SHORTEST
    self.sizes = _sizes(shortest, min(piece or longest_prompt, longest_prompt))
    self._goes_on = piece is not None or keeps_rows or (self._paged and self.length > self.sizes[-1])

    self.state = jax.jit(programs.begun)(self._params)
    shardings = jax.tree.map(lambda a: a.sharding, self.state)
    self._everywhere = NamedSharding(model.how.mesh, PartitionSpec())
    self._anything = jax.device_put(anything(slots, self.vocab), self._everywhere)
    self._begin = jax.jit(programs.begin)
    self._go_on = jax.jit(programs.go_on, donate_argnums=() if keeps_rows else 1)
    self._insert = jax.jit(partial(insert, programs.kinds()), donate_argnums=0, out_shardings=shardings)
    self._generate = jax.jit(programs.step, donate_argnums=1, out_shardings=(shardings, self._everywhere))
    self._score = jax.jit(programs.score)
    self._write = jax.jit(programs.write, donate_argnums=1, out_shardings=(shardings, self._everywhere))

  @cached_property
  def row(self) -> Caches:
    """Shapes of what `prefill` returns."""
    return self._begin.eval_shape(self._params, np.zeros((1, self.sizes[0]), np.int32), np.ones(1, np.int32))

  @property
  def fingerprint(self) -> str:
    """Tells this model and its parameters, the draft's too, from all others; computed once for each `update_params`."""
    with self._swap:
      params, updates = self._params, self.updates
    if self._fingerprint[0] != updates:
      self._fingerprint = updates, repr((self._spec, added(checksums(params)).tolist()))
    return self._fingerprint[1]

  def update_params(self, params: Mapping[str, jax.Array], version: int) -> None:
    """Swaps the model's parameters and buffers; nothing is compiled. Any thread may call it.

    They take effect at once, or after the step that is under way (`stepping`). Nothing is copied, and of the old ones
    no reference is kept. So the engine reads the arrays that it is given: whoever donates or deletes them, such as a
    train step that takes its state over, hands a copy in. A draft keeps its own parameters; it guesses worse at most.

    Args:
      params: by path, as the engine was made with (of the model as `Model.apart` leaves it).
      version: what tokens that they write are reported with; any number that says something to the caller.

    Raises:
      ValueError: a path is missing or unknown, or an array has another shape, dtype or sharding; the message names it.
    """
    update = _Update(checked_params(self._structs, params) | self._draft_params, version)
    with self._swap:
      if self._stepping:
        self._next = update
      else:
        self._use(update)

  @contextmanager
  def stepping(self) -> Iterator[None]:
    """Inside, parameters and `version` stay as they are; what `update_params` brings meanwhile is used afterwards."""
    with self._swap:
      self._stepping = True
    try:
      yield
    finally:
      with self._swap:
        self._stepping = False
        if self._next is not _NO_UPDATE:
          self._use(self._next)

  def _use(self, update: "_Update") -> None:
    self._params, self.version = update
    self.updates, self._next = self.updates + 1, _NO_UPDATE

  def score(self, tokens: Sequence[int]) -> np.ndarray:
    """Log-probabilities, float32, of every token but the first, each after those before it.

    It is the forward pass of training: all tokens at once, without a cache (experts drop no token). A program is
    compiled for each power of two of tokens.
    """
    size = next(size for size in _doubling(self.sizes[0]) if size >= len(tokens))
    scores = self._score(self._params, _filled(tokens, size, 0)[None])
    return np.asarray(scores)[0, : len(tokens) - 1]

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
    self, row: Caches, slot: int, prompt: Sequence[int], sampling_params: SamplingParams, answered: Sequence[int] = ()
  ) -> None:
    """Puts a prefilled prompt, and what it was answered so far, into a slot; the row is still there afterwards."""
    controls = Controls.of(sampling_params, len(prompt), self.vocab)
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
    self.insert(row, 0, [0], SamplingParams())
    for step in (self.generate, self.write):
      step([False] * self.slots)


class _Update(NamedTuple):
  """Parameters that the engine takes over when no step runs."""

  params: Params
  version: int


_NO_UPDATE = _Update({}, 0)


def checked_params(structs: Mapping[str, jax.ShapeDtypeStruct], params: Mapping[str, jax.Array]) -> Params:
  """The arrays, none of them copied, with exactly the shardings of `structs`, so that nothing is compiled for them.

  Raises:
    ValueError: they are not of the same paths, shapes, dtypes and placement; the message names the first such path.
  """
  if missing := sorted(structs.keys() - params.keys()):
    raise ValueError(f"update_params: {missing[0]} is missing ({len(missing)} of {len(structs)} paths are).")
  if unknown := sorted(params.keys() - structs.keys()):
    raise ValueError(f"update_params: {unknown[0]} is no parameter of this model.")
  return {path: _same(path, struct, params[path]) for path, struct in structs.items()}


def _same(path: str, struct: jax.ShapeDtypeStruct, array: jax.Array) -> jax.Array:
  if not isinstance(array, jax.Array):
    raise ValueError(
      f"update_params: {path} is a {type(array).__name__}; place it as a jax.Array on {struct.sharding}."
    )
  if array.is_deleted():
    raise ValueError(f"update_params: {path} was deleted or donated.")
  expected, found = (f"{x.dtype}{list(x.shape)}" for x in (struct, array))
  if found != expected:
    raise ValueError(f"update_params: {path} is {found}, and the model has {expected}.")
  if array.weak_type:
    raise ValueError(
      f"update_params: {path} is weakly typed, which would compile anew: make it with dtype={array.dtype}."
    )
  assert struct.sharding is not None
  if not array.sharding.is_equivalent_to(struct.sharding, array.ndim):
    raise ValueError(f"update_params: {path} is placed as {array.sharding}, and the model has it as {struct.sharding}.")
  if array.sharding == struct.sharding and array.committed:
    return array
  # The same placement in other words, by which a compiled program would not be found. The buffers stay the same.
  shards = [shard.data for shard in array.addressable_shards]
  return jax.make_array_from_single_device_arrays(array.shape, struct.sharding, shards)


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def dropless(model: Model) -> Model:
  """The model with experts that drop no token: which are dropped would depend on the rest of the batch."""
  experts = model.how.experts
  if not experts.drops:
    return model
  return Model.of(model.spec, replace(model.how, experts=replace(experts, method="dropless", buffer=None)))


def _sizes(shortest: int, longest: int) -> tuple[int, ...]:
  """Doubling from the shortest to the longest, so that few programs serve all prompts and little is filled up."""
  doubling = _doubling(shortest)
  sizes = [next(doubling)]
  while sizes[-1] < longest:
    sizes.append(next(doubling))
  return tuple(sizes)


def _doubling(first: int) -> Iterator[int]:
  """Without an end."""
  while True:
    yield first
    first *= 2


def _filled(tokens: Sequence[int], size: int, value: int) -> np.ndarray:
  filled = np.full(size, value, np.int32)
  filled[: len(tokens)] = tokens
  return filled
