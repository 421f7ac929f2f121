"""The choice of the next token beside a plain reference in numpy, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import ConfigError
from maxtext.inference import sampling
from maxtext.inference.sampling import (
  SamplingParams,
  SamplingState,
  TokenHistory,
  apply_logit_bias,
  apply_penalties,
  apply_top_k_top_p,
)
from tests.support import tiny

V = 32
ROWS = [
  SamplingParams(temperature=0.0),
  SamplingParams(temperature=0.7, seed=3),
  SamplingParams(temperature=1.0, top_k=5, seed=3),
  SamplingParams(temperature=1.3, top_p=0.6, seed=4),
  SamplingParams(temperature=0.9, top_k=7, top_p=0.5, seed=5),
  SamplingParams(temperature=1.0, repetition_penalty=1.7, seed=6),
  SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25, seed=7),
  SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(3, 9), logprobs=2),
  SamplingParams(temperature=1.0, top_p=1e-9, seed=8),
  SamplingParams(temperature=0.0, logit_bias={0: 100.0, V - 1: -3.5, 7: 0.25}),
  SamplingParams(temperature=1.2, min_p=0.2, seed=9),
  SamplingParams(temperature=0.8, min_p=0.1, top_k=6, top_p=0.7, logit_bias={4: 2.0}, seed=10),
]
PROMPT = [1, 2, 2, 5]
GENERATED = [5, 7, 7]
sample = jax.jit(sampling.sample)
POSITION = len(PROMPT) + len(GENERATED)


@pytest.fixture(scope="module")
def logits():
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 2, (len(ROWS), V)).astype(np.float32)
  logits[7, 3] = 9.0  # a stop token that would be taken
  return logits


@pytest.fixture(scope="module")
def state():
  return jax.tree.map(lambda *rows: jnp.stack(rows), *(SamplingState.of(s, len(PROMPT), V) for s in ROWS))


@pytest.fixture(scope="module")
def history():
  prompt, generated = np.zeros((len(ROWS), V), bool), np.zeros((len(ROWS), V), np.int32)
  prompt[:, PROMPT] = True
  for token in GENERATED:
    generated[:, token] += 1
  return TokenHistory(jnp.asarray(prompt), jnp.asarray(generated))


def plain_logits(logits, s):
  """What is drawn from, by the words of `SamplingParams`."""
  logits = logits.astype(np.float64)
  for token in set(PROMPT + GENERATED):
    logits[token] = logits[token] / s.repetition_penalty if logits[token] > 0 else logits[token] * s.repetition_penalty
  for token in set(GENERATED):
    logits[token] -= s.presence_penalty + s.frequency_penalty * GENERATED.count(token)
  if len(GENERATED) < s.min_tokens:
    logits[list(s.stop_token_ids)] = -np.inf
  for token, bias in s.logit_bias:
    logits[token] += bias
  return logits


def plain_probabilities(logits, s):
  logits = plain_logits(logits, s) / s.temperature
  logits[np.exp(logits - logits.max()) < s.min_p] = -np.inf
  order = np.argsort(-logits)
  if s.top_k:
    logits[order[s.top_k :]] = -np.inf
  p = np.exp(logits - logits.max())
  p /= p.sum()
  total = 0.0
  for token in order:
    if total >= s.top_p:
      p[token] = 0.0
    total += p[token]
  return p / p.sum()


def test_every_setting_against_the_reference(logits, state, history):
  positions = jnp.full(len(ROWS), POSITION)
  adjusted = apply_logit_bias(apply_penalties(logits, state, history, positions), state)
  probabilities = jax.nn.softmax(apply_top_k_top_p(adjusted, state), axis=-1)
  output = sample(logits, state, history, positions)
  for row, params in enumerate(ROWS):
    np.testing.assert_allclose(adjusted[row], plain_logits(logits[row], params), rtol=1e-5)
    if params.temperature == 0:
      assert output.token_ids[row] == np.argmax(plain_logits(logits[row], params))
    else:
      np.testing.assert_allclose(probabilities[row], plain_probabilities(logits[row], params), atol=1e-6)
    plain = logits[row] - np.log(np.exp(logits[row].astype(np.float64)).sum())
    np.testing.assert_allclose(output.logprobs[row], plain[output.token_ids[row]], atol=1e-5)
    np.testing.assert_array_equal(output.top_token_ids[row], np.argsort(-logits[row])[:20])
    np.testing.assert_allclose(output.top_logprobs[row], np.sort(plain)[::-1][:20], atol=1e-5)


def test_draws_follow_the_probabilities(logits, state, history):
  """Over many positions of one request."""
  row, draws = 3, 4000
  many = jax.tree.map(lambda a: jnp.broadcast_to(a[row], (draws, *a.shape[1:])), (state, history))
  positions = jnp.arange(POSITION, POSITION + draws)
  found = sample(jnp.broadcast_to(logits[row], (draws, V)), *many, positions).token_ids
  expected = plain_probabilities(logits[row], ROWS[row])
  frequency = np.bincount(found, minlength=V) / draws
  assert not frequency[expected == 0].any()
  np.testing.assert_allclose(frequency, expected, atol=4 * np.sqrt(0.25 / draws))


def test_a_row_does_not_depend_on_the_others(logits, state, history):
  positions = jnp.arange(POSITION, POSITION + len(ROWS))
  together = sample(logits, state, history, positions)
  for row in range(len(ROWS)):
    one = slice(row, row + 1)
    alone = sample(logits[one], *jax.tree.map(lambda a, one=one: a[one], (state, history)), positions[one])
    assert alone.token_ids[0] == together.token_ids[row]
    assert alone.logprobs[0] == together.logprobs[row]


@pytest.mark.parametrize(("top_k", "kept"), [(0, 6), (1, 2), (2, 2), (3, 5), (5, 5), (99, 6)])
def test_equal_logits_are_kept_or_cut_together(top_k, kept):
  """Zeros of both signs are equal; a token that a grammar forbids stays forbidden."""
  logits = jnp.array([[2.0, 0.0, -0.0, 2.0, 0.0, -1e30, -jnp.inf]])
  state = jax.tree.map(lambda x: jnp.asarray(x)[None], SamplingState.of(SamplingParams(top_k=top_k), 0, 7))
  assert int((apply_top_k_top_p(logits, state) > -jnp.inf).sum()) == kept


@pytest.mark.parametrize("top_p", [1e-50, 1e-40, 1e-30])
def test_a_limit_below_what_floats_have_keeps_the_most_likely_token(top_p):
  state = jax.tree.map(lambda x: jnp.asarray(x)[None], SamplingState.of(SamplingParams(top_p=top_p), 0, 3))
  assert jnp.isfinite(apply_top_k_top_p(jnp.array([[1.0, 3.0, 2.0]]), state)).tolist() == [[False, True, False]]


def test_limits_of_a_whole_vocabulary_are_those_of_a_sort():
  """Where bounds are close to each other."""
  logits = jnp.asarray(np.random.default_rng(1).normal(0, 1, (4, 20_000)), jnp.float32)
  params = [SamplingParams(top_k=50), SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(0.5, 700, 0.3, 0.01)]
  state = jax.tree.map(lambda *rows: jnp.stack(rows), *(SamplingState.of(one, 0, 20_000) for one in params))
  found = jax.nn.softmax(jax.jit(apply_top_k_top_p)(logits, state), axis=-1)
  for row, one in enumerate(params):
    scaled = np.asarray(logits[row], np.float64) / one.temperature
    ranked = np.sort(scaled)[::-1]
    ranked = ranked[ranked >= ranked[0] + np.log(one.min_p or 1e-300)][: one.top_k or None]
    share = np.exp(ranked - ranked[0]) / np.exp(ranked - ranked[0]).sum()
    count = int((np.cumsum(share) - share < one.top_p).sum())
    assert abs(int((found[row] > 0).sum()) - count) <= (0 if one.top_p == 1 else 1)


@pytest.mark.parametrize(
  ("keys", "params"),
  [
    ({}, SamplingParams(temperature=0.0)),
    ({"decode_sampling_strategy": "weighted", "decode_sampling_temperature": 0.5}, SamplingParams(temperature=0.5)),
    ({"decode_sampling_strategy": "nucleus", "decode_sampling_nucleus_p": 0.9}, SamplingParams(top_p=0.9)),
    ({"decode_sampling_strategy": "topk", "decode_sampling_top_k": 4}, SamplingParams(top_k=4)),
    (
      {"decode_sampling_strategy": "composite", "decode_sampling_top_k": 4, "decode_sampling_nucleus_p": 0.9},
      SamplingParams(top_k=4, top_p=0.9),
    ),
  ],
)
def test_the_keys_say_what_requests_leave_out(keys, params):
  assert SamplingParams.of(tiny(**keys)) == params


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"decode_sampling_strategy": "nucleus"}, "decode_sampling_nucleus_p=-1.0 must be above 0"),
    ({"decode_sampling_strategy": "topk"}, "decode_sampling_top_k=0 must be 1 or more"),
    (
      {"decode_sampling_strategy": "weighted", "decode_sampling_temperature": 0.0},
      "decode_sampling_temperature=0.0 must be above 0",
    ),
    ({"decode_sampling_top_k": 4}, "decode_sampling_top_k=4 has no effect"),
  ],
)
def test_keys_that_say_too_little_or_too_much(keys, message):
  with pytest.raises(ConfigError, match=message):
    tiny(**keys, strict=True)
