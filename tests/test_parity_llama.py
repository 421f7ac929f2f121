"""The Llama family equals its Hugging Face reference."""

import jax
import numpy as np
import pytest

from maxtext.data.batch import Batch
from maxtext.models.llama import WEIGHTS
from maxtext.train.objectives.language_modeling import LanguageModeling
from maxtext.weights.hugging_face import from_tensors
from tests.support import program, random_batch, tiny

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def reference():
  return random_llama(tied=False)


def random_llama(tied):
  """A tiny Llama with every weight random, norms included: the usual initial values hide mistakes."""
  torch = pytest.importorskip("torch")
  from transformers import LlamaConfig, LlamaForCausalLM

  torch.manual_seed(0)
  model = LlamaForCausalLM(
    LlamaConfig(
      vocab_size=128,
      hidden_size=48,
      intermediate_size=80,
      num_hidden_layers=2,
      num_attention_heads=4,
      num_key_value_heads=2,
      max_position_embeddings=128,
      head_dim=8,
      rms_norm_eps=1e-5,
      tie_word_embeddings=tied,
      rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
      },
      attn_implementation="eager",
    )
  ).float()
  with torch.no_grad():
    for name, p in model.named_parameters():
      p.copy_(torch.randn_like(p) * 0.2 + (1.0 if "norm" in name else 0.0))
  return model


@pytest.mark.parametrize("kernel", ["dot_product", "chunked"])
@pytest.mark.parametrize("scan", [True, False])
def test_logits_and_gradients(reference, scan, kernel):
  import torch

  config = tiny(scan_layers=scan, attention=kernel, max_target_length=64)
  model = program(config).model
  batch = random_batch(config)
  params = from_tensors(model, WEIGHTS, {n: p.detach().numpy() for n, p in reference.named_parameters()})

  reference.zero_grad()
  expected = reference(torch.from_numpy(batch.inputs).long()).logits
  flat = torch.nn.functional.cross_entropy(
    expected.reshape(-1, 128), torch.from_numpy(batch.targets).long().reshape(-1), reduction="none"
  )
  (flat * torch.from_numpy(batch.weights).reshape(-1)).sum().backward()
  expected_grads = from_tensors(model, WEIGHTS, {n: p.grad.numpy() for n, p in reference.named_parameters()})

  @jax.jit
  def run(params, batch: Batch):
    decoder = model.bind(params)
    hidden, _, _ = decoder.hidden(batch.inputs, batch.positions)
    grads = jax.grad(lambda p: LanguageModeling()(model.bind(p), batch)[0])(params)
    return decoder.logits(hidden), grads

  logits, grads = run(params, batch)
  np.testing.assert_allclose(logits, expected.detach().numpy(), atol=1e-4, rtol=0)
  for name, grad in grads.items():
    difference = np.linalg.norm(grad - expected_grads[name]) / np.linalg.norm(expected_grads[name])
    assert difference < 1e-4, f"{name}: relative difference {difference:.1e}"


def test_tied_head():
  import torch

  tied = random_llama(tied=True)
  config = tiny(logits_via_embedding=True, normalize_embedding_logits=False)
  model, batch = program(config).model, random_batch(config)
  params = from_tensors(model, WEIGHTS, {n: p.detach().numpy() for n, p in tied.named_parameters()})
  decoder = model.bind(params)
  logits = decoder.logits(decoder.hidden(batch.inputs, batch.positions)[0])
  np.testing.assert_allclose(logits, tied(torch.from_numpy(batch.inputs).long()).logits.detach(), atol=1e-4, rtol=0)


def test_every_tensor_is_accounted_for(reference):
  model = program(tiny()).model
  tensors = {n: p.detach().numpy() for n, p in reference.named_parameters()}
  with pytest.raises(ValueError, match="no parameter takes: extra"):
    from_tensors(model, WEIGHTS, tensors | {"extra": np.zeros(1)})
  del tensors["model.layers.1.mlp.up_proj.weight"]
  with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
    from_tensors(model, WEIGHTS, tensors)
