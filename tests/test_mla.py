"""Latent attention equals the reference implementations, whatever it keeps in its cache."""

import dataclasses
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext.layers.context import Context
from maxtext.layers.indexer import Indexer
from maxtext.layers.matmul import Matmul
from maxtext.layers.mla import MLA
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.rope import RotaryEmbedding, YarnScaling
from tests.support import program, tiny

B, S, E = 2, 16, 48
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}  # fmt: skip
ROPE = RotaryEmbedding(8, 10000.0, scaling=YarnScaling(40.0, 64), interleaved=True)
SCALE = 24**-0.5 * (0.1 * math.log(40.0) + 1) ** 2
SPEC = MLA(4, 16, 12, 16, 24, ROPE, SCALE, RMSNormSpec(1e-6))
SPARSE = dataclasses.replace(SPEC, indexer=Indexer(16, 16, 5, dataclasses.replace(ROPE, interleaved=False)))
SIZES = {"hidden_size": E, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
         "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "rope_parameters": YARN,
         "max_position_embeddings": 2560, "num_hidden_layers": 1}  # fmt: skip
INDEXER = {"index_topk": 5, "index_head_dim": 16, "index_n_heads": 16}  # so many that no key has a score of zero, a tie

NAMES = {
  "q_proj": "query", "q_a_proj": "query_down", "q_a_layernorm": "query_norm", "q_b_proj": "query", "o_proj": "out",
  "kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv", "indexer.wq_b": "indexer/query",
  "indexer.wk": "indexer/key", "indexer.k_norm": "indexer/key_norm", "indexer.weights_proj": "indexer/weights",
}  # fmt: skip

CASES = {
  "deepseek_v2": (dataclasses.replace(SPEC, q_lora_rank=None), {"q_lora_rank": None}),
  "deepseek_v3": (SPEC, {"rope_interleave": True}),
  "deepseek_v32": (SPARSE, INDEXER),
}


def layer_of(spec, **changes):
  execution = program(tiny()).model.execution.replace(**changes)
  layer = spec.build(ParamFactory(0, jnp.float32), E, execution)
  for i, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(layer))):
    variable.set_value(jnp.asarray(np.random.default_rng(i).standard_normal(variable[...].shape) * 0.5, jnp.float32))
  return layer


def context_of(spec, positions, segments=None):
  return Context.of(jnp.asarray(positions), segments, spec.ropes, jnp.float32)


ROW = np.broadcast_to(np.arange(S), (B, S))
INPUT = jnp.asarray(np.random.default_rng(1).standard_normal((B, S, E)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_its_reference(name):
  torch, transformers = (pytest.importorskip(n) for n in ("torch", "transformers"))
  spec, keys = CASES[name]
  code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
  short = name.replace("deepseek_v", "DeepseekV")
  config = getattr(transformers, f"{short}Config")(**SIZES | keys)
  config._attn_implementation = "eager"
  torch.manual_seed(0)
  reference = getattr(code, f"{short}Attention")(config, 0)
  for tensor in reference.state_dict().values():
    tensor.copy_(torch.randn_like(tensor) * 0.5)
  rotary = getattr(code, f"{short}RotaryEmbedding")(config)
  x = torch.tensor(np.asarray(INPUT))
  mask = torch.full((S, S), torch.finfo(torch.float32).min).triu(1)[None, None].expand(B, 1, S, S)
  with torch.no_grad():
    expected = reference(x, position_embeddings=rotary(x, torch.tensor(ROW)), attention_mask=mask)[0]

  layer = layer_of(spec)
  values = {}
  for path, tensor in reference.state_dict().items():
    module, leaf = path.rsplit(".", 1)
    value, plain = tensor.numpy(), "norm" in module
    values[f"{NAMES[module]}/{'scale' if plain and leaf == 'weight' else leaf}"] = value if plain else value.T
  for path, variable in nnx.to_flat_state(nnx.state(layer)):
    value = values.pop("/".join(map(str, path)))
    variable.set_value(jnp.asarray(value.reshape(variable[...].shape)))
  assert not values
  ours, _, _ = layer(INPUT, context_of(spec, ROW), None, jnp.zeros((), jnp.int32))
  scale = float(expected.abs().max())
  np.testing.assert_allclose(ours / scale, expected / scale, atol=1e-5, rtol=0)


@dataclasses.dataclass(frozen=True)
class Enlarged(Matmul):
  """Changes every matmul, which a latent cache must notice."""

  name: str = "enlarged"

  def __call__(self, call, own, next_, x, weight):
    return next_(call, x, weight * 1.5)


@pytest.mark.parametrize("matmul", [(), pytest.param((Enlarged(),), marks=pytest.mark.slow)], ids=["plain", "changed"])
@pytest.mark.parametrize("latent", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("spec", [pytest.param(SPEC, marks=pytest.mark.slow), SPARSE], ids=["all keys", "chosen keys"])
def test_prefill_and_decode_equal_the_forward_pass(spec, latent, matmul):
  spec = dataclasses.replace(spec, latent_cache=latent)
  layer, repeat = layer_of(spec, matmul=matmul), jnp.ones((), jnp.int32)
  expected, _, _ = layer(INPUT, context_of(spec, ROW), None, repeat)
  slots = layer.cache_specs(B, S + 3)
  per_token = sum(math.prod(s.shape[1:]) // (S + 3) for s in slots.values()) - (16 if spec.indexer else 0)
  assert per_token == (16 + 8 if latent else 4 * (24 + 12))
  cache = {n: jnp.zeros(s.stacked(2).shape, s.dtype) for n, s in slots.items()}
  step = jax.jit(lambda x, positions, cache: layer(x, context_of(spec, positions), cache, repeat))
  for start, end in ((0, 7), *((s, s + 1) for s in range(7, S))):
    y, _, cache = step(INPUT[:, start:end], ROW[:, start:end], cache)
    np.testing.assert_allclose(y, expected[:, start:end], atol=2e-5 * float(jnp.abs(expected).max()))
  assert not any(a[0].any() for a in cache.values()), "only this layer's part is written"


@pytest.mark.slow
def test_documents_do_not_see_each_other_through_the_indexer():
  """The best keys are those of the own document, of which each query sees as many as it may choose."""
  segments = jnp.asarray(np.where(ROW < 9, 1, 2))
  positions = np.where(ROW < 9, ROW, ROW - 9)
  layer, repeat = layer_of(SPARSE), jnp.zeros((), jnp.int32)
  y, _, _ = layer(INPUT, context_of(SPARSE, positions, segments), None, repeat)
  alone, _, _ = layer(INPUT[:, 9:], context_of(SPARSE, positions[:, 9:]), None, repeat)
  np.testing.assert_allclose(y[:, 9:], alone, atol=1e-4)
  full, _, _ = layer_of(SPEC)(INPUT, context_of(SPEC, positions, segments), None, repeat)
  assert float(jnp.abs(full[:, 8] - y[:, 8]).max()) > 1e-2, "four of nine keys are left out"
