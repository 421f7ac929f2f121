"""Sampling of the next token: each row of a batch by its own `SamplingParams`, independent of the other rows.

The order is: penalties, logit bias, token bitmask (early stop tokens and what a grammar forbids), temperature, min-p,
top-k, top-p, and a random choice that is a function of the request's seed and the position only.

Shapes: B rows, S tokens of a chunk, V vocabulary, W words of 32 bits for it, K stop tokens, N biases, L
log-probabilities per token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import SamplingStrategy

MAX_STOP_TOKENS = 10  # stop tokens of a request: its own, and those of the tokenizer and its chat template
MAX_LOGPROBS = 20  # most likely tokens that are reported with a token
MAX_LOGIT_BIAS = 300  # tokens of a request that have a bias
_LARGEST = 1e30  # of numbers that scale logits, which are float32 and stay finite
_LOGITS_BLOCK = 64  # tokens of a prompt whose logits exist at once


@dataclass(frozen=True)
class SamplingParams:
  """Sampling parameters of one request, with vLLM's names.

  Attributes:
    temperature: divides the logits; 0 is greedy sampling.
    top_k: samples from the k most likely tokens; 0 is all.
    top_p: samples from the smallest set of most likely tokens whose probabilities sum to at least this.
    min_p: samples from tokens that are at least this likely beside the most likely one.
    logit_bias: added to the logits of tokens, by token; converted to pairs.
    seed: seed of the random choice, which is a function of the seed and the position: the same prompt with the same
      seed gets the same output. Several outputs for one prompt need different seeds.
    repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the prompt or the output.
    presence_penalty: subtracted from the logits of tokens in the output.
    frequency_penalty: subtracted from the logits of tokens in the output, once per occurrence.
    min_tokens: stop tokens are not sampled before this many tokens.
    max_tokens: most tokens of the output; None is as many as fit, and 0 only reads the prompt.
    stop_token_ids: tokens that end the output and are not part of its text.
    ignore_eos: whether the output goes on after the tokens that end documents and turns.
    stop: strings that end the output and are not part of it. A single string is converted to a tuple.
    logprobs: number of most likely tokens reported with each token; 0 reports the log-probabilities of the sampled
      tokens only, None reports none in a `RequestOutput`.
    prompt_logprobs: the same for the tokens of the prompt; such a prompt is always prefilled as a whole.

  Raises:
    ConfigError: (a ValueError) a value is out of range.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
  seed: int = 0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  min_tokens: int = 0
  max_tokens: int | None = None
  stop_token_ids: Sequence[int] = ()
  ignore_eos: bool = False
  stop: Sequence[str] = ()
  logprobs: int | None = None
  prompt_logprobs: int | None = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
    object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
    object.__setattr__(self, "logit_bias", self.biases)
    reported = f"0 to {MAX_LOGPROBS}, or None"
    for name, allowed, valid_range in (
      ("temperature", 0 <= self.temperature <= _LARGEST, f"0 to {_LARGEST:g}"),
      ("top_k", 0 <= self.top_k < 2**31, "at least 0, which is all tokens, and less than 2^31"),
      ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
      ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
      ("repetition_penalty", 1 / _LARGEST <= self.repetition_penalty <= _LARGEST, f"more than 0, up to {_LARGEST:g}"),
      ("presence_penalty", abs(self.presence_penalty) <= _LARGEST, f"at most {_LARGEST:g}, either way"),
      ("frequency_penalty", abs(self.frequency_penalty) <= _LARGEST, f"at most {_LARGEST:g}, either way"),
      ("min_tokens", 0 <= self.min_tokens < 2**30, "at least 0, and less than 2^30"),
      ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "at least 0, or None"),
      ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, reported),
      ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS, reported),
    ):
      if not allowed:
        raise ConfigError(f"{name}={getattr(self, name)}: it must be {valid_range}.")
    if len(self.logit_bias) > MAX_LOGIT_BIAS:
      raise ConfigError(f"logit_bias: {len(self.logit_bias)} tokens have a bias, and {MAX_LOGIT_BIAS} may.")
    if wrong := [(token, bias) for token, bias in self.biases if not abs(bias) <= _LARGEST]:
      raise ConfigError(f"logit_bias: token {wrong[0][0]} has {wrong[0][1]}: it must be finite, {_LARGEST:g} at most.")
    if "" in self.stop:
      raise ConfigError("stop: an empty string would end every output at once.")

  @property
  def biases(self) -> tuple[tuple[int, float], ...]:
    """`logit_bias` as pairs."""
    return tuple(dict(self.logit_bias).items())

  @staticmethod
  def of(config: MaxTextConfig) -> "SamplingParams":
    """The defaults of a server or an `LLM`, from `decode_sampling_strategy` and its keys."""
    c, strategy = config, config.decode_sampling_strategy
    if strategy == SamplingStrategy.GREEDY:
      return SamplingParams(temperature=0.0)
    nucleus = strategy in (SamplingStrategy.NUCLEUS, SamplingStrategy.COMPOSITE)
    limited = strategy in (SamplingStrategy.TOPK, SamplingStrategy.COMPOSITE)
    return SamplingParams(
      temperature=c.decode_sampling_temperature,
      top_k=c.decode_sampling_top_k if limited else 0,
      top_p=c.decode_sampling_nucleus_p if nucleus else 1.0,
    )


class SamplingState(NamedTuple):
  """The sampling parameters of every row as arrays [B]; `stop_token_ids` [B,K] and `bias_token_ids` [B,N] are padded
  with the vocabulary size."""

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  bias_token_ids: jax.Array
  biases: jax.Array
  seed: jax.Array
  repetition_penalty: jax.Array
  presence_penalty: jax.Array
  frequency_penalty: jax.Array
  stop_token_ids: jax.Array
  min_stop_position: jax.Array  # the first position at which a stop token may be sampled
  num_logprobs: jax.Array

  @staticmethod
  def of(params: SamplingParams, prompt_length: int, vocab: int) -> "SamplingState":
    """The state of one row."""
    s = params
    stop_token_ids = np.full(MAX_STOP_TOKENS, vocab, np.int32)
    stop_token_ids[: len(s.stop_token_ids)] = s.stop_token_ids
    bias_token_ids, biases = np.full(MAX_LOGIT_BIAS, vocab, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    for place, (token, bias) in enumerate(s.biases):
      bias_token_ids[place], biases[place] = token, bias
    row: Any = (
      np.float32(s.temperature),
      np.int32(s.top_k),
      np.float32(s.top_p),
      np.float32(s.min_p),
      bias_token_ids,
      biases,
      np.uint32(s.seed & 0xFFFFFFFF),
      np.float32(s.repetition_penalty),
      np.float32(s.presence_penalty),
      np.float32(s.frequency_penalty),
      stop_token_ids,
      np.int32(prompt_length + s.min_tokens),
      np.int32(s.logprobs or 0),
    )
    return SamplingState(*row)  # NumPy: one transfer, with the program that takes it

  def where(self, active: jax.Array) -> "SamplingState":
    """The same with inactive rows [B] as the cheapest: greedy, without a report."""
    temperature, num_logprobs = (jnp.where(active, x, 0) for x in (self.temperature, self.num_logprobs))
    return self._replace(temperature=temperature, num_logprobs=num_logprobs)

  @staticmethod
  def empty(rows: int, vocab: int) -> "SamplingState":
    """The state of rows without a request."""
    return SamplingState(*(jnp.broadcast_to(x, (rows, *x.shape)) for x in SamplingState.of(SamplingParams(), 0, vocab)))


class TokenHistory(NamedTuple):
  """The tokens that occurred, for penalties: whether each is in the prompt and its count in the output, both [B,V]."""

  prompt: jax.Array
  output: jax.Array


class SamplerOutput(NamedTuple):
  """The sampled tokens [B] with the model's log-probabilities, and the most likely tokens [B,L] with theirs.

  With `keep_routed_experts`, `routed_experts` are those [B,N] of the tokens in front of them, as vectors.
  """

  token_ids: jax.Array
  logprobs: jax.Array
  top_token_ids: jax.Array
  top_logprobs: jax.Array
  routed_experts: jax.Array | None = None


class PromptLogprobs(NamedTuple):
  """Log-probabilities [1,S] of the tokens that follow those of a chunk, the numbers of tokens that are at least as
  likely, and the most likely tokens [1,S,L] with theirs."""

  logprobs: jax.Array
  ranks: jax.Array
  top_token_ids: jax.Array
  top_logprobs: jax.Array


def prompt_logprobs(
  logits: Callable[[jax.Array], jax.Array], hidden: jax.Array, next_tokens: jax.Array
) -> PromptLogprobs:
  """The log-probabilities of tokens [1,S] by the hidden states [1,S,E] in front of them, a block of them at a time."""
  length = hidden.shape[1]
  size = min(_LOGITS_BLOCK, length)
  assert length % size == 0, "chunks are padded to powers of two"

  def one_block(block: tuple[jax.Array, jax.Array]) -> PromptLogprobs:
    states, tokens = block
    logprobs = jax.nn.log_softmax(logits(states[None])[0].astype(jnp.float32), axis=-1)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    top, top_ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logprobs.shape[-1]))
    return PromptLogprobs(own[:, 0], jnp.sum(logprobs >= own, axis=-1), top_ids, top)

  blocks = hidden.reshape(-1, size, hidden.shape[-1]), next_tokens.reshape(-1, size)
  return jax.tree.map(lambda x: x.reshape(1, length, *x.shape[2:]), jax.lax.map(one_block, blocks))


def sample(
  logits: jax.Array,
  state: SamplingState,
  history: TokenHistory,
  positions: jax.Array,
  token_bitmask: jax.Array | None = None,
) -> SamplerOutput:
  """Samples the tokens at `positions` [B] from logits [B,V].

  `token_bitmask` [B,W] restricts the choice to tokens whose bit is set; None allows all.
  """
  adjusted = apply_logit_bias(apply_penalties(logits, state, history, positions), state)
  if token_bitmask is not None:
    adjusted = apply_token_bitmask(adjusted, token_bitmask)
  greedy = _argmax(adjusted)
  random = state.temperature > 0
  token_ids = jax.lax.cond(
    jnp.any(random),
    lambda: jnp.where(random, _gumbel_sample(apply_top_k_top_p(adjusted, state), state.seed, positions), greedy),
    lambda: greedy,
  ).astype(jnp.int32)
  logprobs = jax.nn.log_softmax(logits, axis=-1)
  top_logprobs, top_token_ids = _top_logprobs(logprobs, state)
  token_logprobs = jnp.take_along_axis(logprobs, token_ids[:, None], axis=1)[:, 0]
  return SamplerOutput(token_ids, token_logprobs, top_token_ids, top_logprobs)


def apply_penalties(logits: jax.Array, state: SamplingState, history: TokenHistory, positions: jax.Array) -> jax.Array:
  """Logits after the penalties; stop tokens before `min_tokens` get minus infinity."""
  counts, repetition = history.output, state.repetition_penalty[:, None]
  penalized = jnp.where(logits > 0, logits / repetition, logits * repetition)
  logits = jnp.where(history.prompt | (counts > 0), penalized, logits)
  logits = logits - state.presence_penalty[:, None] * (counts > 0) - state.frequency_penalty[:, None] * counts
  rows = jnp.arange(logits.shape[0])[:, None]
  early = jnp.where((positions < state.min_stop_position)[:, None], state.stop_token_ids, logits.shape[1])
  return logits.at[rows, early].set(-jnp.inf, mode="drop")


def apply_logit_bias(logits: jax.Array, state: SamplingState) -> jax.Array:
  """Logits plus the biases of each row; nothing is computed where no row has any."""
  rows = jnp.arange(logits.shape[0])[:, None]
  return jax.lax.cond(
    jnp.any(state.biases != 0),
    lambda: logits.at[rows, state.bias_token_ids].add(state.biases, mode="drop"),
    lambda: logits,
  )


def full_token_bitmask(rows: int, vocab: int) -> np.ndarray:
  """A token bitmask [B,W] that allows all tokens."""
  return np.full((rows, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)


def apply_token_bitmask(logits: jax.Array, token_bitmask: jax.Array) -> jax.Array:
  """Logits with minus infinity where a token's bit is 0. Token 0 is the lowest bit of the first word."""
  bits = (token_bitmask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
  return jnp.where(bits.reshape(len(bits), -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def apply_top_k_top_p(logits: jax.Array, state: SamplingState) -> jax.Array:
  """Logits over temperature, with minus infinity outside of min-p, top-k and top-p. Equal logits are kept or cut
  together.

  Each limit is a least logit, found by bisection instead of a sort of the vocabulary. A row's result does not depend on
  whether other rows have limits; where none has, nothing is computed.
  """
  scaled = logits / jnp.maximum(state.temperature, 1e-6)[:, None]
  kept = scaled >= scaled.max(axis=-1, keepdims=True) + jnp.log(state.min_p)[:, None]
  order, random = _order(scaled), state.temperature > 0

  def top_k() -> jax.Array:
    return kept & (
      order >= _largest_with(order, jnp.ones_like(scaled), jnp.where(state.top_k > 0, state.top_k, jnp.inf))
    )

  def top_p(kept: jax.Array) -> jax.Array:
    share = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)
    least = jnp.maximum(state.top_p, jnp.finfo(jnp.float32).tiny)  # of 0 the most likely token would be cut too
    return kept & (order >= _largest_with(order, share, jnp.where(state.top_p < 1, least, jnp.inf)))

  kept = jax.lax.cond(jnp.any(random & (state.top_k > 0)), top_k, lambda: kept)
  kept = jax.lax.cond(jnp.any(random & (state.top_p < 1)), top_p, lambda kept: kept, kept)
  return jnp.where(kept, scaled, -jnp.inf)


def _order(x: jax.Array) -> jax.Array:
  """Unsigned integers that are ordered as these floats are."""
  bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # zeros of both signs are equal
  return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_with(order: jax.Array, weights: jax.Array, total: jax.Array) -> jax.Array:
  """The largest bound [B,1] for which entries of at least it have weights [B,V] of this total [B]; 0 if there is none.

  The sum of weights that are not negative cannot shrink as the bound sinks, rounding included.
  """

  def one_bit(i: jax.Array, bound: jax.Array) -> jax.Array:
    higher = bound | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
    enough = jnp.where(order >= higher, weights, 0).sum(axis=-1, keepdims=True) >= total[:, None]
    return jnp.where(enough, higher, bound)

  return jax.lax.fori_loop(0, 32, one_bit, jnp.zeros((len(order), 1), jnp.uint32))


def _top_logprobs(logprobs: jax.Array, state: SamplingState) -> tuple[jax.Array, jax.Array]:
  """The largest log-probabilities [B,L] and their tokens; zeros where no row asks for any, which is cheaper."""
  shape = (logprobs.shape[0], min(MAX_LOGPROBS, logprobs.shape[1]))
  return jax.lax.cond(
    jnp.any(state.num_logprobs > 0),
    lambda: tuple(jax.lax.top_k(logprobs, shape[1])),
    lambda: (jnp.zeros(shape, logprobs.dtype), jnp.zeros(shape, jnp.int32)),
  )


def _gumbel_sample(logits: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
  def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape[1:], logits.dtype)

  return _argmax(logits + jax.vmap(noise)(seeds, positions))


def _argmax(logits: jax.Array) -> jax.Array:
  """The index of the first maximum. Two plain reductions are twice as fast on a CPU as the pair that `argmax` uses."""
  vocab = logits.shape[-1]
  largest = logits == logits.max(axis=-1, keepdims=True)
  return jnp.min(jnp.where(largest, jnp.arange(vocab), vocab - 1), axis=-1)
