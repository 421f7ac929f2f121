"""Every family writes as its reference does, token by token, with the probabilities of training.

Families are those of `test_parity`. The prompt comes in two pieces, the second filled up; the slot was used before; and
windows are shorter than what is written.
"""

import numpy as np
import pytest

from maxtext.inference.engine import Engine
from maxtext.inference.sampling import SamplingParams
from tests.cases import cases
from tests.support import program, tiny
from tests.test_parity import CASES, configure, loaded, references  # noqa: F401 (a fixture)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parity

QUICK = ("gemma2",)  # with windows
PROMPT, WRITTEN, SLOT = 20, 64, 1
SAMPLING = SamplingParams(temperature=0.0, logprobs=20)

every_case = pytest.mark.parametrize("case", cases(CASES, QUICK))


def put(engine, prompt, slot):
  engine.insert(engine.prefill(prompt), slot, prompt, SAMPLING)


def greedy(reference, prompt):
  """What the reference writes; one that is no model of transformers is asked token by token."""
  if hasattr(reference.model, "model"):
    reference.model.model.generation_config.eos_token_id = None
    mask = torch.ones(1, PROMPT)
    return reference.model.model.generate(prompt[None], attention_mask=mask, max_new_tokens=WRITTEN, do_sample=False)[0]
  for _ in range(WRITTEN):
    prompt = torch.cat([prompt, reference.model.logits(prompt[None])[:, -1].argmax(-1)])
  return prompt


def write(model, params, prompt):
  engine = Engine(model, params, slots=2, max_model_len=96, max_prompt_len=PROMPT, chunk_size=16)
  put(engine, prompt[:5].tolist(), SLOT)
  put(engine, prompt.tolist(), SLOT)
  return [engine.decode_step([slot == SLOT for slot in range(2)]) for _ in range(WRITTEN)]


@every_case
def test_written_as_by_the_reference(case, references):  # noqa: F811
  reference = references(case)
  prompt = reference.inputs[1, :PROMPT]
  steps = write(*loaded(configure(case), reference), prompt)
  expected = greedy(reference, prompt)
  assert [int(step.token_ids[SLOT]) for step in steps] == expected[PROMPT:].tolist()
  logits = reference.model.logits(expected[None, :-1])[0, PROMPT - 1 :].detach()
  log_probs = torch.log_softmax(logits, dim=-1).numpy()
  for step, exact in zip(steps, log_probs, strict=True):
    found = step.top_logprobs[SLOT]
    np.testing.assert_allclose(found, exact[step.top_token_ids[SLOT]], atol=1e-4, rtol=0)
    np.testing.assert_allclose(found, np.sort(exact)[::-1][:20], atol=1e-4, rtol=0)
    np.testing.assert_allclose(step.logprobs[SLOT], exact.max(), atol=1e-4, rtol=0)


def test_layers_that_devices_share_out_stay_in_their_stack():
  """Cut out of it, every device would hold all of them."""
  model = program(tiny(scan_layers=False, ici_pipeline_parallelism=2, per_device_batch_size=2), devices=2).model
  layers = [name for name in model.params if name.startswith("groups/")]
  assert {model.struct(name).sharding.spec[0] for name in layers} == {"stage"}
  assert model.unstack_layers(dict(model.params)).keys() == model.params.keys()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma2", "deepseek3"])
def test_layers_that_are_not_looped_over_have_arrays_of_their_own(case, references):  # noqa: F811
  reference = references(case)
  prompt = reference.inputs[1, :PROMPT]
  looped = write(*loaded(configure(case), reference), prompt)
  model, params = loaded(configure(case, scan_layers=False), reference)
  layers = {name: value.shape[0] for name, value in params.items() if name.startswith("groups/")}
  apart = model.unstack_layers(params)
  assert not params, "a stack that is still held would double what the engine needs"
  assert len(apart) == len(model.params) + len(model.buffers) - len(layers) + sum(layers.values())
  for one, other in zip(write(model, apart, prompt), looped, strict=True):
    assert one.token_ids[SLOT] == other.token_ids[SLOT]
    np.testing.assert_allclose(one.top_logprobs[SLOT], other.top_logprobs[SLOT], atol=1e-5, rtol=0)
