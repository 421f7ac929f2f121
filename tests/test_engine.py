"""The engine gives what training computes: logits of every family, and the greedy tokens of its reference.

Families are those of `test_parity`. Pieces of prompts are filled up, windows are shorter than the prompt, and slots are
used again.
"""

from functools import cache as once

import jax
import numpy as np
import pytest

from maxtext.inference.engine import Engine, advance
from maxtext.inference.sampling import Settings
from tests.test_parity import CASES, LENGTH, configure, loaded, references  # noqa: F401 (a fixture)

QUICK = ("gemma2", "qwen3_next")  # windows; a state
PROMPT, SLOT = 12, 2
GREEDY = Settings(temperature=0.0)

pytestmark = pytest.mark.parity
every_case = pytest.mark.parametrize(
  "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)


@pytest.fixture(scope="module")
def engines(references):  # noqa: F811
  """(reference, engine) of a family."""

  def make(case):
    reference = references(case)
    model, params = loaded(configure(case), reference)
    return reference, model, params, Engine(model, params, slots=3, length=96, longest_prompt=PROMPT, piece=8)

  return once(make)


def put(engine, prompt, slot, settings=GREEDY):
  row = None
  for piece in engine.pieces(prompt):
    row = engine.prefill(piece, row)
  engine.insert(row, slot, prompt, settings)


@every_case
def test_logits_are_those_of_training(case, engines):
  reference, model, params, engine = engines(case)
  engine.sizes = (8,)  # two pieces, the second filled up
  tokens = reference.batch.inputs[0]
  put(engine, tokens[:5], SLOT)  # what was in the slot before must not be seen
  put(engine, tokens[:PROMPT], SLOT)
  step = jax.jit(lambda *arguments: advance(model, *arguments))
  state, found = engine.state, []
  cache = state.cache
  for position in range(PROMPT - 1, LENGTH):
    fed, where = state.tokens.at[SLOT].set(tokens[position]), state.positions.at[SLOT].set(position)
    logits, cache = step(params, cache, fed, where)
    found.append(logits[SLOT])
  np.testing.assert_allclose(np.stack(found), reference.logits[0, PROMPT - 1 :], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "plain" not in CASES[case]["reference"]])
def test_greedy_tokens_are_those_of_the_reference(case, engines):
  import torch

  reference, _, _, engine = engines(case)
  prompt = reference.inputs[1, :PROMPT]
  expected = reference.model.model.generate(
    prompt[None], attention_mask=torch.ones(1, PROMPT), max_new_tokens=64, min_new_tokens=64, do_sample=False
  )[0, PROMPT:]
  put(engine, prompt.tolist(), SLOT)
  found = [engine.generate([slot == SLOT for slot in range(3)]).tokens[SLOT] for _ in range(64)]
  assert found == expected.tolist()
