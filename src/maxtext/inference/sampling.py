"""How the next token is chosen: for each row of a batch by its own `SamplingParams`, whatever else is in the batch.

The order is: penalties, tokens that may not come (stop tokens too early, what a grammar forbids), temperature, the most
likely `top_k`, the most likely tokens that together have the probability `top_p`, and a draw that is a function of the
request's seed and the position alone.

Shapes: B rows, V vocabulary, W words of 32 bits for it, K stop tokens, A alternatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.configs import ConfigError, MaxTextConfig
from maxtext.configs.types import SamplingStrategy

STOPS = 8  # most stop tokens of a request
ALTERNATIVES = 20  # most alternatives that are reported with a token


@dataclass(frozen=True)
class SamplingParams:
  """How one request is answered. The names are vLLM's.

  Attributes:
    temperature: divides logits; 0 always takes the most likely token.
    top_k: most likely tokens that are drawn from; 0 is all.
    top_p: probability that the tokens drawn from have together, at least.
    seed: of what is drawn. A draw is a function of the seed and the position, so the same prompt with the same seed
      gets the same answer: several answers to one prompt need seeds of their own.
    repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that were there already.
    presence_penalty: subtracted from logits of tokens that were generated already; `frequency_penalty`: for each time.
    min_tokens: before which no stop token comes.
    max_tokens: after which the answer ends; None is all that has room.
    stop_token_ids: end the answer, and are no part of its text; `stop`: the same for texts. One text may be given as it
      is; both are tuples afterwards.
    logprobs: most likely tokens that are reported with each token; None reports no log-probabilities in a
      `RequestOutput`, 0 those of the tokens alone.

  Raises:
    ConfigError: (a ValueError) a value is outside of its range.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  min_tokens: int = 0
  max_tokens: int | None = None
  stop_token_ids: Sequence[int] = ()
  stop: Sequence[str] = ()
  logprobs: int | None = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
    object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
    for name, allowed, range_in_words in (
      ("temperature", self.temperature >= 0, "at least 0"),
      ("top_k", self.top_k >= 0, "at least 0, which is all tokens"),
      ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
      ("repetition_penalty", self.repetition_penalty > 0, "more than 0"),
      ("min_tokens", self.min_tokens >= 0, "at least 0"),
      ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
      ("logprobs", self.logprobs is None or 0 <= self.logprobs <= ALTERNATIVES, f"0 to {ALTERNATIVES}, or None"),
    ):
      if not allowed:
        raise ConfigError(f"{name}={getattr(self, name)}: it must be {range_in_words}.")
    if "" in self.stop:
      raise ConfigError("stop: an empty text would end every answer.")

  @staticmethod
  def of(config: MaxTextConfig) -> "SamplingParams":
    """What the keys say, for requests that say nothing."""
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


class Controls(NamedTuple):
  """The sampling parameters of every row, as arrays [B]; stops are [B,K], and a vocabulary's size stands for none."""

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  seed: jax.Array
  repetition: jax.Array
  presence: jax.Array
  frequency: jax.Array
  stops: jax.Array
  stops_from: jax.Array  # the position from which on they may come
  alternatives: jax.Array

  @staticmethod
  def of(params: SamplingParams, prompt_length: int, vocab: int) -> "Controls":
    """Of one row."""
    s = params
    stops = np.full(STOPS, vocab, np.int32)
    stops[: len(s.stop_token_ids)] = s.stop_token_ids
    return Controls(
      jnp.float32(s.temperature),
      jnp.int32(s.top_k),
      jnp.float32(s.top_p),
      jnp.uint32(s.seed & 0xFFFFFFFF),
      jnp.float32(s.repetition_penalty),
      jnp.float32(s.presence_penalty),
      jnp.float32(s.frequency_penalty),
      jnp.asarray(stops),
      jnp.int32(prompt_length + s.min_tokens),
      jnp.int32(s.logprobs or 0),
    )

  @staticmethod
  def empty(rows: int, vocab: int) -> "Controls":
    """Of rows that have no request."""
    return Controls(*(jnp.broadcast_to(x, (rows, *x.shape)) for x in Controls.of(SamplingParams(), 0, vocab)))


class History(NamedTuple):
  """What was there: whether each token is in the prompt, and how often it was generated, both [B,V]."""

  prompt: jax.Array
  generated: jax.Array


class Chosen(NamedTuple):
  """The next tokens [B] and their log-probabilities, as the model has them; with alternatives, [B,A]."""

  tokens: jax.Array
  log_probs: jax.Array
  others: jax.Array
  others_log_probs: jax.Array


def choose(
  logits: jax.Array, controls: Controls, history: History, positions: jax.Array, allowed: jax.Array | None = None
) -> Chosen:
  """Logits [B,V] to the tokens at `positions` [B], of those whose bits are set in `allowed` [B,W], if it is given."""
  adjusted = penalised(logits, controls, history, positions)
  if allowed is not None:
    adjusted = permitted(adjusted, allowed)
  greedy = _likeliest(adjusted)
  drawn = controls.temperature > 0
  tokens = jax.lax.cond(
    jnp.any(drawn),
    lambda: jnp.where(drawn, _draw(narrowed(adjusted, controls), controls.seed, positions), greedy),
    lambda: greedy,
  ).astype(jnp.int32)
  log_probs = jax.nn.log_softmax(logits, axis=-1)
  shape = (logits.shape[0], min(ALTERNATIVES, logits.shape[1]))
  others = jax.lax.cond(
    jnp.any(controls.alternatives > 0),
    lambda: tuple(jax.lax.top_k(log_probs, shape[1])),
    lambda: (jnp.zeros(shape, log_probs.dtype), jnp.zeros(shape, jnp.int32)),
  )
  return Chosen(tokens, jnp.take_along_axis(log_probs, tokens[:, None], axis=1)[:, 0], others[1], others[0])


def penalised(logits: jax.Array, controls: Controls, history: History, positions: jax.Array) -> jax.Array:
  """Logits after penalties, without stop tokens that may not come yet."""
  times, repetition = history.generated, controls.repetition[:, None]
  weakened = jnp.where(logits > 0, logits / repetition, logits * repetition)
  logits = jnp.where(history.prompt | (times > 0), weakened, logits)
  logits = logits - controls.presence[:, None] * (times > 0) - controls.frequency[:, None] * times
  rows = jnp.arange(logits.shape[0])[:, None]
  early = jnp.where((positions < controls.stops_from)[:, None], controls.stops, logits.shape[1])
  return logits.at[rows, early].set(-jnp.inf, mode="drop")


def anything(rows: int, vocab: int) -> np.ndarray:
  """The bits of all tokens, [B,W]."""
  return np.full((rows, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)


def permitted(logits: jax.Array, allowed: jax.Array) -> jax.Array:
  """Logits of the tokens whose bits are set, the first token's being the lowest of the first word."""
  bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
  return jnp.where(bits.reshape(len(bits), -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def narrowed(logits: jax.Array, controls: Controls) -> jax.Array:
  """Logits over temperature, of the tokens that are drawn from; equal ones stay or go together."""
  scaled = logits / jnp.maximum(controls.temperature, 1e-6)[:, None]
  ranked = jnp.sort(scaled, axis=-1, descending=True)
  vocab = logits.shape[1]
  count = jnp.where(controls.top_k > 0, jnp.minimum(controls.top_k, vocab), vocab)[:, None]
  ranked = jnp.where(jnp.arange(vocab) < count, ranked, -jnp.inf)
  before = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1) - jax.nn.softmax(ranked, axis=-1)
  inside = (before < controls.top_p[:, None]) & (ranked > -jnp.inf)
  least = jnp.min(jnp.where(inside, ranked, jnp.inf), axis=-1, keepdims=True)
  return jnp.where(scaled >= least, scaled, -jnp.inf)


def _draw(logits: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
  def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape[1:], logits.dtype)

  return _likeliest(logits + jax.vmap(noise)(seeds, positions))


def _likeliest(logits: jax.Array) -> jax.Array:
  """The first of the largest; two plain reductions are faster than the pair that `argmax` reduces, on a CPU twice."""
  vocab = logits.shape[-1]
  largest = logits == logits.max(axis=-1, keepdims=True)
  return jnp.min(jnp.where(largest, jnp.arange(vocab), vocab - 1), axis=-1)
