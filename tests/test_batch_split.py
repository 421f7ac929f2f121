"""Layers that run on parts of the batch are the layers that run on all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import ConfigError
from maxtext.training.objectives.base import StepContext
from maxtext.training.objectives.configured import training_objective
from maxtext.training.step import gradients
from tests.support import program, random_batch, tiny

EXPERTS = {
  "decoder_block": "deepseek", "attention_type": "mla", "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
  "qk_rope_head_dim": 8, "v_head_dim": 12, "base_num_kv_heads": 4, "base_moe_mlp_dim": 24, "num_experts": 8,
  "num_experts_per_tok": 2, "shared_experts": 1, "base_num_decoder_layers": 2,
  "routed_score_func": "sigmoid", "routed_bias": True, "routed_bias_update_rate": 0.1, "rope_type": "default",
  "original_max_position_embeddings": 4096, "rope_factor": 40, "head_dim": 128, "per_device_batch_size": 2,
}  # fmt: skip
SPLIT = {"use_batch_split_schedule": True, "batch_split_factor": 2}
ROWS = 16


def found(devices=1, **keys):
  """Loss, metrics, gradients and buffers of a batch with segments."""
  p = program(tiny(**EXPERTS | keys | {"per_device_batch_size": ROWS / devices}), devices)
  segments = np.repeat([[1, 2, 2, 0]], 8, axis=1).repeat(ROWS, 0)
  batch = jax.device_put(random_batch(p.config, ROWS, segments=np.sort(segments)[:, ::-1]), p.batch.inputs.sharding)
  state, objective = p.init(), training_objective(p.config)

  @jax.jit
  def run(params, buffers, batch):
    return gradients(p.model, objective, params, buffers, batch, context=lambda i: StepContext(0, 0, i))

  lowered = run.lower(state.params, state.buffers, batch)
  return lowered.compile()(state.params, state.buffers, batch), lowered.as_text().count("top_k")


@pytest.fixture(scope="module")
def plain():
  return found()


MESHES = {
  "one device": {},
  "expert 2 x fsdp 2 x tensor 2": {"expert": 2, "fsdp": 2, "tensor": 2},
  "expert 2 x fsdp 2 x context 2": {"expert": 2, "fsdp": 2, "context": 2, "use_ring_of_experts": True},
}


@pytest.mark.mesh
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES.keys())
def test_parts_are_the_whole(plain, axes):
  keys = {name if "_" in name else f"ici_{name}_parallelism": size for name, size in axes.items()}
  (ours, routers), (expected, once) = found(8 if axes else 1, **SPLIT, **keys), plain
  assert routers > once, "every part has a router of its own"
  for name, grad in expected.grads.items():
    np.testing.assert_allclose(ours.grads[name], grad, atol=1e-5 * float(jnp.abs(grad).max()), rtol=0, err_msg=name)
  assert ours.loss == pytest.approx(float(expected.loss), rel=1e-5)
  for name, value in expected.buffers.items():
    np.testing.assert_allclose(ours.buffers[name], value, err_msg=name)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"batch_split_factor": 1}, "batch_split_factor=1 splits nothing"),
    ({"batch_split_factor": 3}, "make per_device_batch_size a multiple of 3"),
    ({"ici_pipeline_parallelism": 2}, "micro-batches of a pipeline split the batch"),
  ],
)
def test_what_cannot_be_split_is_refused(keys, message):
  with pytest.raises(ConfigError, match=message):
    program(tiny(**SPLIT | keys), 2 if "ici_pipeline_parallelism" in keys else 1)
