"""The gated delta net equals its reference; its small cache is all that a next token needs."""

import dataclasses
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext.layers.context import Context
from maxtext.layers.delta_net import DeltaNet
from maxtext.layers.norm import RMSNormSpec
from maxtext.layers.param_factory import ParamFactory
from tests.support import program, tiny

B, S, E = 2, 70, 48
SPEC = DeltaNet(2, 4, 8, 6, span=4, chunk=16, norm=RMSNormSpec(1e-6, scale_in_float32=False))
ROW = np.broadcast_to(np.arange(S), (B, S))
INPUT = jnp.asarray(np.random.default_rng(1).standard_normal((B, S, E)), jnp.float32)
FIRST = jnp.zeros((), jnp.int32)


@pytest.fixture(scope="module")
def layer():
  layer = SPEC.build(ParamFactory(0, jnp.float32), E, program(tiny()).model.execution)
  for i, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(layer))):
    variable.set_value(jnp.asarray(np.random.default_rng(i).standard_normal(variable[...].shape) * 0.5, jnp.float32))
  return layer


def context(positions, segments=None):
  return Context(jnp.asarray(positions), segments, {})


def per_key_head(value, *widths):
  """The file's rows stand per key head, one part after another: [heads, sum(widths), in] to the parts, turned."""
  parts = np.split(value.reshape(2, sum(widths), E), np.cumsum(widths)[:-1], axis=1)
  return [part.reshape(-1, E).T for part in parts]


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_equals_its_reference(family):
  torch, transformers = (pytest.importorskip(n) for n in ("torch", "transformers"))
  code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
  prefix = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5"}[family]
  config_kind = {"qwen3_next": "Qwen3NextConfig", "qwen3_5": "Qwen3_5TextConfig"}[family]
  sizes = {"hidden_size": E, "num_hidden_layers": 4, "num_attention_heads": 4, "linear_num_key_heads": 2,
           "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
           "linear_conv_kernel_dim": 4}  # fmt: skip
  torch.manual_seed(0)
  reference = getattr(code, f"{prefix}GatedDeltaNet")(getattr(transformers, config_kind)(**sizes), 0)
  for tensor in reference.state_dict().values():
    tensor.copy_(torch.randn_like(tensor) * 0.5)
  with torch.no_grad():
    expected = reference(torch.tensor(np.asarray(INPUT)))

  t = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
  if family == "qwen3_next":
    q, k, v, z = per_key_head(t.pop("in_proj_qkvz.weight"), 8, 8, 12, 12)
    b, a = per_key_head(t.pop("in_proj_ba.weight"), 2, 2)
  else:
    q, k, v = np.split(t.pop("in_proj_qkv.weight").T, [16, 32], axis=1)
    z, b, a = (t.pop(f"in_proj_{n}.weight").T for n in "zba")
  convolutions = np.split(t.pop("conv1d.weight")[:, 0].T, [16, 32], axis=1)
  values = dict(zip(("query", "key", "value", "gate", "strength", "decay"), (q, k, v, z, b, a), strict=True))
  values |= dict(zip(("query_conv", "key_conv", "value_conv"), convolutions, strict=True))
  values = {f"{name}/weight": value for name, value in values.items()}
  values |= {"log_rate": t.pop("A_log"), "decay_bias": t.pop("dt_bias"), "norm/scale": t.pop("norm.weight")}
  values["out/weight"] = t.pop("out_proj.weight").T
  assert not t
  layer = SPEC.build(ParamFactory(0, jnp.float32), E, program(tiny()).model.execution)
  for path, variable in nnx.to_flat_state(nnx.state(layer)):
    variable.set_value(jnp.asarray(values.pop("/".join(map(str, path))).reshape(variable[...].shape)))
  assert not values
  ours, _, _ = layer(INPUT, context(ROW), None, FIRST)
  scale = float(expected.abs().max())
  np.testing.assert_allclose(ours / scale, expected / scale, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_prefill_and_decode_equal_the_forward_pass(layer):
  """In pieces of any length, and in rows of a cache that still hold what another request left."""
  expected, _, _ = layer(INPUT, context(ROW), None, FIRST)
  slots = layer.cache_specs(B, 1000)
  assert slots == layer.cache_specs(B, 1), "it does not grow"
  rng = np.random.default_rng(0)
  cache = {n: jnp.asarray(rng.standard_normal(s.stacked(2).shape), s.dtype) for n, s in slots.items()}
  other = {n: np.asarray(a[0]) for n, a in cache.items()}
  step = jax.jit(lambda x, positions, cache: layer(x, context(positions), cache, jnp.ones((), jnp.int32)))
  cuts = [0, 2, 35, 36, 37, 55, *range(56, 60)]
  for start, end in itertools.pairwise(cuts):
    y, _, cache = step(INPUT[:, start:end], ROW[:, start:end], cache)
    np.testing.assert_allclose(y, expected[:, start:end], atol=1e-4)
  for name, before in other.items():
    np.testing.assert_array_equal(cache[name][0], before, err_msg="another layer's")


@pytest.mark.slow
def test_documents_are_apart(layer):
  cut = 21
  later = np.arange(S) >= cut
  positions = np.where(later, ROW - cut, ROW)
  segments = jnp.asarray(np.where(later, 2, np.ones_like(ROW)))
  alone, _, _ = layer(INPUT[:, cut:], context(ROW[:, : S - cut]), None, FIRST)
  both, _, _ = layer(INPUT, context(positions, segments), None, FIRST)
  np.testing.assert_allclose(both[:, cut:], alone, atol=1e-4)
  by_segment, _, _ = layer(INPUT, context(ROW, segments), None, FIRST)
  np.testing.assert_allclose(by_segment, both, atol=1e-6, err_msg="a new segment is enough")
  joined, _, _ = layer(INPUT, context(ROW), None, FIRST)
  assert float(jnp.abs(joined[:, cut] - both[:, cut]).max()) > 1e-2


@pytest.mark.slow
def test_keys_of_unit_length_are_a_choice(layer):
  plain = dataclasses.replace(SPEC, unit_keys=False).build(ParamFactory(0, jnp.float32), E, layer.execution)
  nnx.update(plain, nnx.state(layer))
  short = INPUT[:, :4]
  y, _, _ = plain(short, context(ROW[:, :4]), None, FIRST)
  unit, _, _ = layer(short, context(ROW[:, :4]), None, FIRST)
  assert float(jnp.abs(y - unit).max()) > 1e-2


@pytest.mark.slow
@pytest.mark.mesh
def test_a_mesh_is_one_device(layer):
  on_mesh = program(tiny(ici_fsdp_parallelism=2, ici_tensor_parallelism=2, per_device_batch_size=1), devices=4)
  other = SPEC.build(ParamFactory(0, jnp.float32), E, on_mesh.model.execution)
  nnx.update(other, nnx.state(layer))

  def run(module):
    graph, state = nnx.split(module)
    return jax.jit(jax.grad(lambda s, x: jnp.square(nnx.merge(graph, s)(x, context(ROW), None, FIRST)[0]).sum()))(
      state, INPUT
    )

  for a, b in zip(jax.tree.leaves(run(other)), jax.tree.leaves(run(layer)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()), rtol=0)
