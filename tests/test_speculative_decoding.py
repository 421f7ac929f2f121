"""Speculative decoding changes how many steps a text takes, and nothing else."""

import operator

import jax
import numpy as np
import pytest

from maxtext import ConfigError
from maxtext.inference import inference_model
from maxtext.inference.draft_model import DraftModel
from maxtext.inference.ngram_proposer import propose
from maxtext.inference.sampling import SamplingParams
from maxtext.inference.scheduler import Request, Scheduler
from tests.support import program, tiny
from tests.test_features import ENGRAM
from tests.test_scheduler import KEYS, collect, make_engine, requests

NUM_DRAFT = 3
REPEATED = [5, 9, 70, 3] * 6


def write(engine, asked):
  """Events by request, and the steps that it took."""
  scheduler, found, steps = Scheduler(engine), {}, 0
  for request in asked:
    scheduler.submit(request)
  while scheduler.busy:
    collect(scheduler.step(), found)
    steps += 1
  return found, steps


@pytest.mark.parametrize("keys", [KEYS, pytest.param({"quantize_kvcache": True}, marks=pytest.mark.slow)])
def test_the_text_is_the_same(keys):
  """Greedy and drawn, with penalties and stops; in a window that is shorter than the text, and in a rounded cache."""
  asked = [
    *requests(10),
    *(Request(REPEATED, SamplingParams(temperature=0.0, repetition_penalty=0.7)) for _ in range(4)),
  ]
  model = program(tiny(**keys)).model
  plain, steps = write(make_engine(model), asked)
  speculative, fewer = write(make_engine(model, num_speculative_tokens=NUM_DRAFT), asked)
  for request in asked:
    for field in ("token", "finish_reason"):
      found, expected = ([getattr(event, field) for event in events[request]] for events in (speculative, plain))
      assert found == expected, request
    log_probs = [[event.logprob for event in events[request]] for events in (speculative, plain)]
    np.testing.assert_allclose(*log_probs, atol=1e-4, rtol=0)
  assert fewer < 0.8 * steps


def test_a_draft_that_is_the_model_is_always_right():
  """Drawn tokens too, since both draw alike; and one that knows nothing changes no token."""
  model = program(tiny(**KEYS)).model
  twin, stranger = (DraftModel(model, operator.or_(*jax.jit(model.init)(seed))) for seed in (0, 1))
  asked = requests(8)
  plain, steps = write(make_engine(model), asked)
  for draft, most in ((twin, 0.5), (stranger, 1.0)):
    found, fewer = write(make_engine(model, num_speculative_tokens=NUM_DRAFT, draft_model=draft), asked)
    for request in asked:
      assert [e.token for e in found[request]] == [e.token for e in plain[request]]
    assert fewer <= most * steps
  config = tiny(**KEYS).model_copy(update={"max_prefill_predict_length": 8})
  other = program(tiny(vocab_size=96)).model
  with pytest.raises(ConfigError, match="--draft-model: its vocabulary has 96 tokens, the model's 128"):
    inference_model.make_engine(config, model, twin.params, NUM_DRAFT, DraftModel(other, {}))


def test_draft_tokens_are_what_followed_the_longest_and_latest_match():
  proposer = jax.jit(propose, static_argnums=2)

  def draft(*text):
    row = np.full((1, 12), text[-1])  # what stands behind the text is not looked at
    row[0, : len(text)] = text
    return proposer(row, np.array([len(text) - 1]), 4)[0].tolist()

  assert draft(1, 2, 3, 4, 5, 6, 7, 1, 2, 3) == [4, 5, 6, 7]
  assert draft(1, 2, 7, 8, 9, 2, 5, 6, 1, 2)[:3] == [7, 8, 9], "two words are alike, of the later place one"
  assert draft(1, 7, 2, 1, 8, 3, 1)[:2] == [8, 3], "the latest of the same likeness"
  assert draft(1, 2, 1, 2, 1) == [2, 1, 2, 1], "on and on"
  assert draft(4, 4) == [4, 4, 4, 4]


def test_recurrent_layers_are_not_supported():
  model = program(config := tiny(**ENGRAM)).model
  params, buffers = jax.jit(model.init)(0)
  config = config.model_copy(update={"max_prefill_predict_length": 8})
  with pytest.raises(ConfigError, match="--num-speculative-tokens 2: this model has recurrent layers"):
    inference_model.make_engine(config, model, params | buffers, num_speculative_tokens=2)
