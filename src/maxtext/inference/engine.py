"""The engine: prefill, insert and decode over slots. Each program is compiled once and always runs the whole batch.

The pure functions that the engine compiles are in `programs.py`.

Chunked prefill: a prompt without its last token is prefilled into a row of its own, in chunks whose sizes come from a
short list. `insert` copies the row into a slot of the KV cache. Each step then feeds the last token of every slot, so
the first output token comes from the step that feeds the last prompt token, and tokens are sampled in one place. The
result of a slot does not depend on the other slots.

Speculative decoding: a step may feed draft tokens after the last token. Every position is sampled as if it had been
decoded alone, and the sampled tokens are committed up to the first one that differs from its draft token. So the output
is the same as without, sampled tokens included: the random choice depends only on the seed and the position.

Paged KV cache: a row is always contiguous. `insert` cuts it into the pages of the slot, and each step gets the block
table. The scheduler allocates the pages.

The model's parameters are an argument of every program, so `update_params` swaps them without compilation. Running
requests keep the keys and values that the older parameters wrote.

LoRA adapters are in tables of a fixed number of slots (`layers/multi_lora.py`), so `write_adapter` replaces one in
place and without compilation. Every row of a batch has the slot of its adapter, 0 for the base.

Shapes: B slots, S tokens of a chunk, T longest sequence, M most pages of a slot, W draft tokens, V vocabulary.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.checkpoint.checksum import added, checksums
from maxtext.inference.decode_state import Caches, MediaChunk, insert
from maxtext.inference.draft_model import DraftModel
from maxtext.inference.multimodal import PromptMedia
from maxtext.inference.programs import Programs
from maxtext.inference.sampling import (
  PromptLogprobs,
  SamplerOutput,
  SamplingParams,
  SamplingState,
  full_token_bitmask,
)
from maxtext.layers.multi_lora import MultiLoraMatmul, is_rows, is_table
from maxtext.layers.parameter_paths import is_one_layer, one_layer
from maxtext.models.media import tower_inputs
from maxtext.models.model import Model, Params
from maxtext.models.spec import towers_of

StepOutput = list[tuple[SamplerOutput, np.ndarray]]  # for each position the tokens, and the slots that commit them

_MIN_CHUNK = 16  # shorter chunks are padded
_MIN_CHUNK_SPLASH = 128  # the splash kernel needs whole blocks


class PrefillChunk(NamedTuple):
  """A part of a prompt that is prefilled at once."""

  start: int
  tokens: Sequence[int]


class EncodedMedia(NamedTuple):
  """The features of a prompt's media, on the host.

  Attributes:
    features: [D,F,E] of the embeddings and of D - 1 layers; None if no token that is prefilled needs them.
    indices: [S] the feature of each token; -1 for tokens of text.
    spans: [S] tokens with the same number other than 0 attend to each other in both directions; None if none do.
    rotary_positions: [S,3]; None without mRoPE.
  """

  features: np.ndarray | None
  indices: np.ndarray
  spans: np.ndarray | None
  rotary_positions: np.ndarray | None

  def with_output(self, count: int) -> "EncodedMedia":
    """The same where the prompt is followed by so many tokens of output."""
    behind, rotary = (0, count), self.rotary_positions
    return EncodedMedia(
      self.features,
      np.pad(self.indices, behind, constant_values=-1),
      None if self.spans is None else np.pad(self.spans, behind),
      None if rotary is None else np.concatenate([rotary, rotary[-1] + 1 + np.arange(count)[:, None]]),
    )

  def of_chunk(self, chunk: PrefillChunk, size: int) -> MediaChunk | None:
    """What a chunk that is padded to `size` tokens has; None where it is as in a prompt of text."""
    here = slice(chunk.start, chunk.start + len(chunk.tokens))
    rotary = None
    if self.rotary_positions is not None:
      rotary = np.zeros((1, size, 3), np.int32)
      rotary[0, : len(chunk.tokens)] = self.rotary_positions[here]
    indices, features, spans = _pad(self.indices[here], size, -1), None, None
    there = indices >= 0
    if there.any():
      assert self.features is not None, "media that are not in the cache were encoded"
      features = np.zeros((len(self.features), 1, size, self.features.shape[2]), self.features.dtype)
      features[:, 0, there] = self.features[:, indices[there]]
      spans = None if self.spans is None else _pad(self.spans[here], size, 0)[None]
    elif rotary is None:
      return None
    return MediaChunk(features, np.where(there, np.arange(size), -1).astype(np.int32)[None], spans, rotary)


class Engine:
  """Compiled programs over the slots. The engine does not know requests; the scheduler assigns them to slots.

  Args:
    model: the model. Its experts must drop no token (`dropless`).
    params: the parameters and buffers, already on the devices.
    slots: number of sequences that are decoded at once.
    max_model_len: longest sequence, prompt and output.
    max_prompt_len: longest prompt.
    chunk_size: longest prefill chunk; None prefills a prompt at once.
    reuse_rows: whether a row stays valid after the next chunk was prefilled from it, as prefix caching needs.
    num_speculative_tokens: draft tokens of a step; not for models with recurrent layers.
    draft_model: proposes the draft tokens; None is prompt lookup (n-gram).
    adapters: the tables of adapters; None serves the base alone.

  Attributes:
    model: the model without the tables of adapters.
    block_table: the pages of the slots; without a paged KV cache each slot has one page that holds a whole sequence.
    version: the version of the parameters as given to `update_params`; 0 at first.
    keeps_routed_experts: whether steps report the experts of tokens (`ExecutionConfig.keep_routed_experts`).
    num_updates: how often the parameters were swapped. It identifies a parameter tree, which `version` need not do.
  """

  def __init__(
    self,
    model: Model,
    params: Params,
    slots: int,
    max_model_len: int,
    max_prompt_len: int,
    chunk_size: int | None = None,
    reuse_rows: bool = False,
    num_speculative_tokens: int = 0,
    draft_model: DraftModel | None = None,
    adapters: MultiLoraMatmul | None = None,
  ) -> None:
    adapted = model if adapters is None else with_adapters(model, adapters)
    programs = Programs.of(adapted, slots, max_model_len, num_speculative_tokens, draft_model)
    self.model, self._draft_params = model, {} if draft_model is None else draft_model.prefixed_params
    self._structs = {path: _struct(array) for path, array in params.items()}
    self._weights, self.version, self.num_updates = params | self._draft_params, 0, 0
    self._adapted, self._tables, self._base_rows = adapted, _zeros(adapted, is_table), _zeros(adapted, is_rows)
    self._params = self._all_params()
    self._params_lock, self._params_held, self._pending_update = threading.Lock(), False, _NO_UPDATE
    self._pending_adapters: list[tuple[int, Params]] = []
    self._fingerprint = (-1, "")
    self.slots, self.max_model_len, self.max_prompt_len = slots, programs.max_model_len, max_prompt_len
    self.num_speculative_tokens = num_speculative_tokens
    self.keeps_routed_experts = model.execution.keep_routed_experts
    assert not (self.keeps_routed_experts and num_speculative_tokens), "a speculative step reports no experts"
    self._spec, self.vocab = model.spec, model.spec.vocab
    self._paged, self.block_table = programs.pages is not None, programs.block_table()
    min_chunk = _MIN_CHUNK_SPLASH if model.execution.kernels.attention.kernel == "splash" else _MIN_CHUNK
    self.chunk_sizes = _chunk_sizes(min_chunk, min(chunk_size or max_prompt_len, max_prompt_len))
    # Preempted requests are prefilled with their output, which may be longer than the longest prompt.
    resumes_long = self._paged and self.max_model_len > self.chunk_sizes[-1]
    self._multi_chunk = chunk_size is not None or reuse_rows or resumes_long
    self._rows = {length: programs.row_shapes(length) for length in programs.row_lengths}
    self._reach = np.zeros(slots, np.int64)  # positions of each slot below which anything was written

    self._init_state = jax.jit(programs.init_state)
    self.state = self._init_state(self._params)
    shardings = jax.tree.map(lambda a: a.sharding, self.state)
    self._replicated = NamedSharding(model.execution.sharding.mesh, PartitionSpec())
    self._full_bitmask = jax.device_put(full_token_bitmask(slots, self.vocab), self._replicated)
    self._encode = jax.jit(programs.encode, static_argnames="tower")
    self._prefill = jax.jit(programs.prefill)
    self._prefill_with_logprobs = jax.jit(programs.prefill_with_logprobs)
    self._prefill_chunk = jax.jit(programs.prefill_chunk, donate_argnums=() if reuse_rows else 1)
    self._prefill_with_routed_experts = jax.jit(programs.prefill_with_routed_experts)
    self._grow = jax.jit(programs.grow, static_argnames="length")
    self._insert = jax.jit(partial(insert, programs.cache_specs()), donate_argnums=0, out_shardings=shardings)
    out_shardings = (shardings, self._replicated)
    self._decode_step = jax.jit(programs.decode_step, donate_argnums=1, out_shardings=out_shardings)
    self._score, self._embed = jax.jit(programs.score), jax.jit(programs.embed)
    self._speculative_step = jax.jit(programs.speculative_step, donate_argnums=1, out_shardings=out_shardings)
    table_shardings = {path: table.sharding for path, table in self._tables.items()}
    self._write_tables = jax.jit(_write_tables, donate_argnums=0, out_shardings=table_shardings)

  @property
  def row(self) -> Caches:
    """Shapes and dtypes of a row of the longest sequence; `prefill` returns shorter ones for short prompts."""
    return self._rows[self.max_model_len]

  @property
  def fingerprint(self) -> str:
    """A checksum of the model and all its parameters, the draft model's included and adapters not; computed once per
    `update_params`."""
    with self._params_lock:
      params, num_updates = self._weights, self.num_updates
    if self._fingerprint[0] != num_updates:
      self._fingerprint = num_updates, repr((self._spec, added(checksums(params)).tolist()))
    return self._fingerprint[1]

  def update_params(self, params: Mapping[str, jax.Array], version: int) -> None:
    """Swaps the parameters and buffers without compilation. Any thread may call it.

    The swap happens at once, or after the step that is running (`hold_params`). Nothing is copied and no reference to
    the old arrays is kept. The caller must not donate or delete the arrays while the engine uses them. A draft model
    keeps its own parameters; at worst fewer of its tokens are accepted. Adapters stay as they are.

    Args:
      params: arrays by path, as the engine was made with (after `Model.apart`).
      version: reported with every token that these parameters generate; any number.

    Raises:
      ValueError: a path is missing or unknown, or an array has another shape, dtype or sharding; the message names it.
    """
    update = _Update(validate_params(self._structs, params) | self._draft_params, version)
    with self._params_lock:
      if self._params_held:
        self._pending_update = update
      else:
        self._apply_update(update)

  def release(self, *, slots: bool = False) -> None:
    """Frees the parameters if nothing else has them, and the memory of the slots if asked to, until `update_params`.
    Programs stay compiled. No request may be running."""
    with self._params_lock:
      assert not self._params_held, "a step is running"
      self._weights, self._params = {}, {}
      if slots:
        self.state = None

  @property
  def tables(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the tables of adapters [R, N, ...]: R layers of a stack, N slots."""
    return {path: struct for path, struct in self._adapted.params.items() if is_table(path)}

  def write_adapter(self, slot: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Replaces the adapter in a slot of the tables, in place and without compilation. Any thread may call it.

    It is written at once, or after the step that is running (`hold_params`), and so before any step that begins later.
    No request may use the slot.

    Args:
      slot: of the tables; slot 0 is the base's and must stay zero.
      arrays: A [R, inputs, rank] and B [R, rank, outputs] by the paths of their tables. Tables without one get zeros.
    """
    values: dict[str, np.ndarray] = {}
    for path, struct in self.tables.items():
      value = arrays.get(path, np.zeros((struct.shape[0], *struct.shape[2:]))).astype(struct.dtype)
      apart = {one_layer(path, i): one for i, one in enumerate(value)}
      values |= {path: value} if path in self._tables else apart
    placed = jax.device_put(values, self._replicated)
    with self._params_lock:
      self._pending_adapters.append((slot, placed))
      if not self._params_held:
        self._apply_adapters()

  @contextmanager
  def hold_params(self) -> Iterator[None]:
    """Inside this context the parameters and `version` do not change; a pending update is applied at its end."""
    with self._params_lock:
      self._params_held = True
    try:
      yield
    finally:
      with self._params_lock:
        self._params_held = False
        if self._pending_update is not _NO_UPDATE:
          self._apply_update(self._pending_update)
        self._apply_adapters()

  def _apply_update(self, update: "_Update") -> None:
    self._weights, self.version = update
    self._params = self._all_params()
    self.num_updates, self._pending_update = self.num_updates + 1, _NO_UPDATE
    if self.state is None:
      self.state, self._reach = self._init_state(self._params), np.zeros_like(self._reach)

  def _apply_adapters(self) -> None:
    while self._pending_adapters:
      slot, values = self._pending_adapters.pop(0)
      self._tables = self._write_tables(self._tables, values, np.int32(slot))
      self._params = self._all_params()

  def _all_params(self) -> Params:
    return self._weights | self._base_rows | self._tables

  def score(self, tokens: Sequence[int], adapter: int = 0) -> np.ndarray:
    """Float32 log-probabilities of every token but the first, given the tokens before it.

    This is the forward pass of training: all tokens at once, without a cache (experts drop no token). One program is
    compiled for each power of two of tokens. `adapter` is a slot of the tables, 0 for the base.
    """
    return self._forward(self._score, tokens, adapter)[: len(tokens) - 1]

  def embed(self, tokens: Sequence[int], adapter: int = 0) -> np.ndarray:
    """The mean of the last hidden states of tokens, as a float32 vector of length 1; by the same pass as `score`."""
    return self._forward(self._embed, tokens, np.full(1, len(tokens), np.int32), adapter)

  def _forward(self, program: Callable[..., jax.Array], tokens: Sequence[int], *arguments: Any) -> np.ndarray:
    """The result of a program over whole tokens, without a cache."""
    size = next(size for size in _doubling_sizes(self.chunk_sizes[0]) if size >= len(tokens))
    *others, adapter = arguments
    with self._params_lock if self._tables else nullcontext():  # another thread may write an adapter, in place
      found = program(self._params, _pad(tokens, size, 0)[None], *others, np.full(1, adapter, np.int32))
    return np.asarray(found)[0]

  @property
  def has_spans(self) -> bool:
    """Whether the tokens of an image attend to each other in both directions."""
    return any(tower.bidirectional_features for tower in towers_of(self._spec))

  def encode_media(self, media: PromptMedia, start: int = 0) -> Iterator[EncodedMedia | None]:
    """The features of a prompt's media, by the towers, if any token from `start` on needs them.

    Each `next` encodes one image, frame or sound, and is None; the last is the result.
    """
    features, towers = None, {tower.name: tower for tower in towers_of(self._spec)}
    if (media.indices[start:] >= 0).any():
      found = list[np.ndarray]()
      for name, medium in media.media:
        for arrays, real in tower_inputs(towers[name], medium):
          found.append(np.asarray(self._encode(self._params, arrays, tower=name))[:, real])
          yield None
      features = np.concatenate(found, axis=1)
      assert media.indices.max() == features.shape[1] - 1, "every feature has a token"
    yield EncodedMedia(features, media.indices, media.spans if self.has_spans else None, media.rotary_positions)

  def prefill_chunks(
    self, prompt: Sequence[int], start: int = 0, spans: np.ndarray | None = None
  ) -> Iterator[PrefillChunk]:
    """The chunks to prefill before `insert`: the tokens from `start` on without the last one.

    A prompt of one token has one empty chunk, which creates its row. Tokens with the same number in `spans`, other than
    0, are never in two chunks.
    """
    most, end, first = self.chunk_sizes[-1], len(prompt) - 1, start
    while first < max(end, 1):
      last = min(first + most, end)
      if spans is not None and 0 < last < end and spans[last] and spans[last] == spans[last - 1]:
        last = int(np.flatnonzero(spans == spans[last])[0])
      assert last > first or not end, "a span is longer than a chunk"
      yield PrefillChunk(first, prompt[first:last])
      first = max(last, first + 1)

  def prefill_chunk(
    self, chunk: PrefillChunk, row: Caches | None = None, adapter: int = 0, media: EncodedMedia | None = None
  ) -> Caches:
    """The cache of a row after a chunk. Chunks come in order, each with the row of the one before.

    `adapter` is a slot of the tables, 0 for the base. `media` is that of the whole prompt.
    """
    tokens, *rest = self._chunk_arguments(chunk, adapter, media)
    if row is None:
      assert chunk.start == 0
      return self._prefill(self._params, tokens, *rest)
    return self._prefill_chunk(self._params, self._grown(row, self.max_model_len), tokens, np.int32(chunk.start), *rest)

  def prefill_with_logprobs(
    self,
    chunk: PrefillChunk,
    next_tokens: Sequence[int],
    row: Caches | None = None,
    adapter: int = 0,
    media: EncodedMedia | None = None,
  ) -> tuple[Caches, PromptLogprobs]:
    """`prefill_chunk` with the log-probabilities of the token after each of the chunk, on the host.

    Its programs are compiled with their first use.
    """
    tokens, *rest = self._chunk_arguments(chunk, adapter, media)
    after = _pad(next_tokens, tokens.shape[1], 0)[None]
    row = None if row is None else self._grown(row, self.max_model_len)
    row, found = self._prefill_with_logprobs(self._params, row, tokens, after, np.int32(chunk.start), *rest)
    return row, jax.device_get(found)

  def prefill_with_routed_experts(
    self, chunk: PrefillChunk, row: Caches | None = None, adapter: int = 0, media: EncodedMedia | None = None
  ) -> tuple[Caches, jax.Array]:
    """`prefill_chunk` with the experts [S,N] of its tokens, and of padding behind them, as vectors of
    `models/routed_experts.py`. For a model with `keep_routed_experts`."""
    tokens, *rest = self._chunk_arguments(chunk, adapter, media)
    row = None if row is None else self._grown(row, self.max_model_len)
    row, routed = self._prefill_with_routed_experts(self._params, row, tokens, np.int32(chunk.start), *rest)
    routed.copy_to_host_async()
    return row, routed

  def _chunk_arguments(
    self, chunk: PrefillChunk, adapter: int, media: EncodedMedia | None
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, MediaChunk | None]:
    """The padded tokens of a chunk, their number, the slot of the adapter and the features of media."""
    size = next(size for size in self.chunk_sizes if size >= len(chunk.tokens))
    tokens, count = _pad(chunk.tokens, size, 0)[None], np.full(1, len(chunk.tokens), np.int32)
    features = None if media is None else media.of_chunk(chunk, size)
    return tokens, count, np.full(1, adapter, np.int32), features

  def prefill(self, prompt: Sequence[int], adapter: int = 0, media: EncodedMedia | None = None) -> Caches:
    """The cache of a whole prompt, ready for `insert`."""
    row = None
    for chunk in self.prefill_chunks(prompt, spans=None if media is None else media.spans):
      row = self.prefill_chunk(chunk, row, adapter, media)
    assert row is not None, "a prompt has at least one chunk"
    return row

  def insert(
    self,
    row: Caches,
    slot: int,
    prompt: Sequence[int],
    sampling_params: SamplingParams,
    output: Sequence[int] = (),
    adapter: int = 0,
    rotary_offset: int = 0,
  ) -> None:
    """Puts a prefilled prompt, and its output so far, into a slot. The row stays valid.

    What the slot's last request has written is overwritten, with zeros beyond the row.
    """
    row = self._grown(row, int(self._reach[slot]) + 1 + self.num_speculative_tokens)  # idle slots write the next token
    sampling = SamplingState.of(sampling_params, len(prompt), self.vocab)
    sequence, pages = [*prompt, *output], self.block_table.entries[slot].copy()
    counts = np.array([len(prompt), len(sequence)], np.int32)
    tokens = _pad(sequence, self.max_model_len, self.vocab)
    numbers = np.int32(adapter), np.int32(rotary_offset)
    self.state = self._insert(self.state, row, np.int32(slot), pages, tokens, counts, sampling, *numbers)
    self._reach[slot] = len(sequence)

  def _grown(self, row: Caches, length: int) -> Caches:
    """A row with room for so many positions, or for the longest sequence."""
    shapes = [array.shape for array in jax.tree.leaves(row)]
    own = next(n for n, like in self._rows.items() if shapes == [struct.shape for struct in jax.tree.leaves(like)])
    wanted = next((n for n in self._rows if n >= length), self.max_model_len)
    return row if own >= wanted else self._grow(row, length=wanted)

  def decode_step(self, active: Sequence[bool], token_bitmask: np.ndarray | None = None) -> SamplerOutput:
    """One step of all slots. Inactive slots do not change, and their output is undefined.

    Args:
      active: the slots that have a request.
      token_bitmask: the tokens that may be sampled in each slot; None allows all and needs no transfer.
    """
    return jax.device_get(self._start_decode_step(active, token_bitmask))

  def _start_decode_step(self, active: Sequence[bool], token_bitmask: np.ndarray | None) -> SamplerOutput:
    self._reach += np.array(active, bool)
    bitmask = self._full_bitmask if token_bitmask is None else jax.device_put(token_bitmask, self._replicated)
    self.state, output = self._decode_step(
      self._params, self.state, np.array(active, bool), self._device_block_table, bitmask
    )
    return output

  def speculative_step(self, active: Sequence[bool], token_bitmask: np.ndarray | None = None) -> StepOutput:
    """One step that may commit several tokens: one output for each position, with the slots that commit it.

    It is a `decode_step` where `num_speculative_tokens` is 0, and where a bitmask is given: bitmasks are known for the
    next token only.
    """
    return self.start_step(active, token_bitmask)()

  def start_step(self, active: Sequence[bool], token_bitmask: np.ndarray | None = None) -> Callable[[], StepOutput]:
    """Starts a `speculative_step`; what is returned waits for its result. Other work may be started before."""
    slots = np.array(active, bool)
    if not self.num_speculative_tokens or token_bitmask is not None:
      output = self._start_decode_step(active, token_bitmask)
      jax.tree.map(lambda array: array.copy_to_host_async(), output)
      return lambda: [(jax.device_get(output), slots)]
    self._reach += slots * (1 + self.num_speculative_tokens)
    self.state, outputs = self._speculative_step(self._params, self.state, slots, self._device_block_table)

    def result() -> StepOutput:
      sampled, committed = jax.device_get(outputs)
      return [(jax.tree.map(lambda a, i=i: a[i], sampled), slots) for i, slots in enumerate(committed)]

    return result

  @property
  def _device_block_table(self) -> np.ndarray | None:
    """A copy of the block table, since a step may still run while the scheduler changes it."""
    return self.block_table.entries.copy() if self._paged else None

  def warm_up(self) -> None:
    """Compiles every program."""
    for size in self.chunk_sizes:
      row = self.prefill_chunk(PrefillChunk(0, [0] * size))
      for length in self._rows:
        self.insert(self._grown(row, length), 0, [0], SamplingParams())
      if self._multi_chunk:
        self.prefill_chunk(PrefillChunk(size, [0] * size), row)
    for step in (self.decode_step, self.speculative_step):
      step([False] * self.slots)
    if self._tables:
      self.write_adapter(0, {})


class _Update(NamedTuple):
  """Parameters that the engine uses from the next step on."""

  params: Params
  version: int


_NO_UPDATE = _Update({}, 0)


def validate_params(structs: Mapping[str, jax.ShapeDtypeStruct], params: Mapping[str, jax.Array]) -> Params:
  """The arrays, not copied, with exactly the shardings of `structs`, so that no program is compiled again.

  Raises:
    ValueError: a path, shape, dtype or sharding differs; the message names the first such path.
  """
  if missing := sorted(structs.keys() - params.keys()):
    raise ValueError(f"update_params: {missing[0]} is missing ({len(missing)} of {len(structs)} paths are).")
  if unknown := sorted(params.keys() - structs.keys()):
    raise ValueError(f"update_params: {unknown[0]} is no parameter of this model.")
  return {path: _validate_array(path, struct, params[path]) for path, struct in structs.items()}


def _validate_array(path: str, struct: jax.ShapeDtypeStruct, array: jax.Array) -> jax.Array:
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
  # An equivalent sharding that is another object would miss the compiled program. The buffers stay the same.
  shards = [shard.data for shard in array.addressable_shards]
  return jax.make_array_from_single_device_arrays(array.shape, struct.sharding, shards)


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _zeros(model: Model, selected: Callable[[str], bool]) -> Params:
  """Zeros for the selected parameters: tables without an adapter in them, and rows of the base."""
  found: Params = {}
  for path, struct in model.params.items():
    if selected(path):  # one at a time, since to unstack is to copy
      found |= model.unstack_layers({path: jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)})
  return found


def _write_tables(tables: Params, values: Params, slot: jax.Array) -> Params:
  """The tables [N, ...], or [R, N, ...] of stacked layers, with values [...] or [R, ...] in one of N slots."""

  def put(path: str) -> jax.Array:
    stacked = int(not is_one_layer(path))
    return jax.lax.dynamic_update_index_in_dim(tables[path], values[path], slot, axis=stacked)

  return {path: put(path) for path in tables}


def dropless(model: Model) -> Model:
  """The model with experts that drop no token: which tokens are dropped would depend on the rest of the batch."""
  experts = model.execution.kernels.experts
  if not experts.drops:
    return model
  return Model.of(model.spec, model.execution.replace(experts=replace(experts, method="dropless", buffer=None)))


def with_adapters(model: Model, adapters: MultiLoraMatmul) -> Model:
  """The model with tables of adapters beside its weights."""
  return Model.of(model.spec, model.execution.replace(matmul=(adapters, *model.execution.matmul)))


def _chunk_sizes(shortest: int, longest: int) -> tuple[int, ...]:
  """Sizes that double from the shortest to the longest: few programs, and little padding."""
  doubling = _doubling_sizes(shortest)
  sizes = [next(doubling)]
  while sizes[-1] < longest:
    sizes.append(next(doubling))
  return tuple(sizes)


def _doubling_sizes(first: int) -> Iterator[int]:
  """An endless sequence that doubles."""
  while True:
    yield first
    first *= 2


def _pad(tokens: Sequence[int] | np.ndarray, size: int, value: int) -> np.ndarray:
  padded = np.full(size, value, np.int32)
  padded[: len(tokens)] = tokens
  return padded
