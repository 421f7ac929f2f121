"""Mixtures of experts equal the blocks of Hugging Face, with every weight random."""

import importlib
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext.layers.experts import MoE
from maxtext.layers.mlp import MLP
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.router import ExpertGroups, Router
from tests.support import program, tiny

torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
pytestmark = pytest.mark.parity

B, S, E, F, X, K = 2, 9, 48, 24, 8, 3
SOFTMAX, SIGMOID, GROUPS = Router(X, K), Router(X, K, "sigmoid"), ExpertGroups(4, 2, 2)
SIZES = {"hidden_size": E, "num_attention_heads": 4, "num_experts_per_tok": K, "moe_intermediate_size": F}
LOCAL = {"hidden_size": E, "num_experts_per_tok": K, "intermediate_size": F, "num_local_experts": X}
GROUPED = SIZES | {"n_routed_experts": X, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

# Name of the module and its block, of the configuration and what it is given, and our spec.
CASES = {
  "mixtral.MixtralSparseMoeBlock": ("MixtralConfig", LOCAL, MoE(SOFTMAX, F)),
  "qwen3_moe.Qwen3MoeSparseMoeBlock": (
    "Qwen3MoeConfig", SIZES | {"num_experts": X, "norm_topk_prob": False}, MoE(replace(SOFTMAX, normalize=False), F)
  ),
  "qwen3_next.Qwen3NextSparseMoeBlock": (
    "Qwen3NextConfig",
    SIZES | {"num_experts": X, "norm_topk_prob": True, "shared_expert_intermediate_size": 40},
    MoE(SOFTMAX, F, shared=MLP(40), shared_gate=True),
  ),
  "deepseek_v2.DeepseekV2Moe": (
    "DeepseekV2Config",
    GROUPED | {"topk_method": "group_limited_greedy", "n_shared_experts": 2, "norm_topk_prob": False},
    MoE(
      replace(SOFTMAX, normalize=False, scale=2.5, groups=replace(GROUPS, best=1), float32=True), F, shared=MLP(2 * F)
    ),
  ),
  "deepseek_v3.DeepseekV3MoE": (
    "DeepseekV3Config",
    GROUPED | {"n_shared_experts": 1, "norm_topk_prob": True},
    MoE(replace(SIGMOID, scale=2.5, groups=GROUPS, selection_bias=True, float32=True), F, shared=MLP(F)),
  ),
  "gpt_oss.GptOssMLP": (
    "GptOssConfig", LOCAL | {"swiglu_limit": 0.5}, MoE(replace(SOFTMAX, bias=True), F, limit=0.5, bias=True)
  ),
  "llama4.Llama4TextMoe": (
    "Llama4TextConfig",
    LOCAL | {"num_experts_per_tok": 1},
    MoE(replace(SIGMOID, per_token=1, normalize=False), F, weigh_inputs=True, shared=MLP(F)),
  ),
  "gemma4.Gemma4TextRouter": (
    "Gemma4TextConfig",
    {"hidden_size": E, "moe_intermediate_size": F, "num_experts": X, "top_k_experts": K, "enable_moe_block": True},
    MoE(replace(SOFTMAX, expert_scale=True, input_norm=1e-6), F, "gelu"),
  ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_block(name):
  module, kind = name.split(".")
  config_kind, keys, spec = CASES[name]
  torch.manual_seed(0)
  code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
  config = getattr(transformers, config_kind)(**keys)
  config._experts_implementation = "eager"
  block = getattr(code, kind)(config)
  if kind == "Gemma4TextRouter":  # the layer calls its experts itself
    block = Sequence(block, code.Gemma4TextExperts(config))
  for tensor in block.state_dict().values():
    tensor.copy_(torch.randn_like(tensor) * 0.5)
  x = torch.randn(B, S, E)
  with torch.no_grad():
    expected = block(x)
  expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(B, S, E)

  layer = spec.build(ParamFactory(0, jnp.float32), E, program(tiny()).model.execution)
  values = translated(block.state_dict(), input_major=kind in ("GptOssMLP", "Llama4TextMoe"))
  for path, variable in nnx.to_flat_state(nnx.state(layer)):
    value = values.pop("/".join(map(str, path)))
    assert value.shape == variable[...].shape
    variable.set_value(jnp.asarray(value))
  assert not values, "every tensor has its place"
  ours, _ = layer(jnp.asarray(x.numpy()))
  scale = float(expected.abs().max())
  np.testing.assert_allclose(ours / scale, expected / scale, atol=1e-5, rtol=0)


class Sequence(torch.nn.Module):
  def __init__(self, router, experts):
    super().__init__()
    self.router, self.experts = router, experts

  def forward(self, x):
    _, weights, experts = self.router(x.reshape(-1, E))
    return self.experts(x.reshape(-1, E), experts, weights)


ROUTER = {
  "bias": "bias",
  "e_score_correction_bias": "selection_bias",
  "scale": "input_scale",
  "per_expert_scale": "expert_scale",
}


def translated(tensors, input_major):
  """The block's tensors under the layer's paths."""
  found = {}
  interleaved = "experts.gate_up_proj_bias" in tensors
  for name, tensor in tensors.items():
    value, (owner, *_, last) = tensor.numpy(), name.split(".")
    leaf = "bias" if last.endswith("bias") else "weight"
    if owner == "experts":
      if leaf == "weight" and not input_major:
        value = value.swapaxes(1, 2)
      if "down" in last:
        found[f"experts/down/{leaf}"] = value
        continue
      gate, up = (value[..., ::2], value[..., 1::2]) if interleaved else np.split(value, 2, axis=-1)
      found |= {f"experts/gate/{leaf}": gate, f"experts/up/{leaf}": up}
    elif owner == "shared_expert_gate":
      found["shared_gate/weight"] = value.T
    elif owner.startswith("shared_expert"):
      found[f"shared/{name.split('.')[1].removesuffix('_proj')}/weight"] = value.T
    else:
      found["router/logits/weight" if last == "weight" else f"router/{ROUTER[last]}"] = (
        value.T if last == "weight" else value
      )
  return found
