"""DoRA: adapters with magnitudes of their own, as PEFT has them, wherever a model runs."""

import copy
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxtext
from maxtext import ConfigError, load_config
from maxtext.layers.dora import DoraMatmul, magnitude_path
from maxtext.layers.lora import adapted_module, is_adapter
from maxtext.layers.matmul import matmul
from maxtext.layers.matmul_call import MatmulCall, Site
from maxtext.weights.load import load_weights
from maxtext.weights.resolve import resolve_source
from tests.support import losses, program, random_batch, tiny
from tests.test_lora import EXPERTS, TRAINED, WAYS, checkpoint
from tests.test_matmul_seam import stepped, values
from tests.test_parity import CASES, RUN, references, torch

__all__ = ["references"]  # a fixture

DORA = TRAINED | {"use_dora": True}
MESH = {"devices": 4, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "per_device_batch_size": 2}
MARKS = {"unrolled": pytest.mark.slow, "mesh": pytest.mark.slow}


def test_one_layer_and_its_gradients_are_those_of_peft():
  """The norm is a constant to gradients."""
  peft = pytest.importorskip("peft")
  settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["0"], use_dora=True)
  theirs = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(5, 7, bias=False)), settings)
  layer = theirs.base_model.model[0]
  a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
  m = layer.lora_magnitude_vector["default"].weight
  torch.manual_seed(0)
  with torch.no_grad():
    b.copy_(torch.randn_like(b))
    m.mul_(1 + 0.1 * torch.randn_like(m))
  x, by_result = torch.randn(4, 5, requires_grad=True), torch.randn(4, 7)
  y = theirs(x)
  (y * by_result).sum().backward()

  weight = layer.base_layer.weight.detach().numpy().T
  difference = m.detach().numpy() - np.linalg.norm(weight, axis=0)
  own = {"a": a.detach().numpy().T, "b": b.detach().numpy().T, "magnitude": difference}
  call = MatmulCall(Site("layers/0", "linear"), "ab,bc->ac")

  def run(own, x):
    variables = {"lora": {name: nnx.Param(value) for name, value in own.items()}}
    return matmul([DoraMatmul(rank=3, scale=2.0)], variables, call, x, jnp.asarray(weight))

  found, gradients = jax.vjp(run, {n: jnp.asarray(v) for n, v in own.items()}, jnp.asarray(x.detach().numpy()))
  np.testing.assert_allclose(found, y.detach().numpy(), rtol=1e-5, atol=1e-6)
  by_own, by_x = gradients(jnp.asarray(by_result.numpy()))
  for name, value in {"a": a.grad.T, "b": b.grad.T, "magnitude": m.grad}.items():
    np.testing.assert_allclose(by_own[name], value.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
  np.testing.assert_allclose(by_x, x.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_it_starts_as_its_base_and_only_adapters_train():
  config = tiny(**DORA)
  p, plain = program(config), program(tiny())
  state, batch = p.init(), random_batch(config, rows=8)
  magnitudes = [name for name in state.params if name.endswith("/magnitude")]
  assert len(magnitudes) == len(state.params) // 3 == 7
  state, first = p.step(state, batch)
  _, unadapted = plain.step(plain.init(), batch)
  np.testing.assert_allclose(first["loss"], unadapted["loss"], rtol=1e-6)
  for _ in range(2):
    state, metrics = p.step(state, batch)
  assert float(metrics["loss"]) < float(first["loss"]) - 0.1
  assert all(float(jnp.abs(state.params[name]).max()) > 0 for name in magnitudes)
  for name, value in plain.init().params.items():
    np.testing.assert_array_equal(state.buffers[name], value, err_msg=name)


@cache
def one_device():
  return losses(tiny(**DORA), 1)


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, pytest.mark.nightly)) for way in WAYS])
def test_magnitudes_train_the_same_wherever_a_model_runs(way):
  keys = dict(MESH if way == "mesh" else WAYS[way])
  assert one_device()[0] - one_device()[-1] > 0.1
  np.testing.assert_allclose(
    losses(tiny(**DORA | {k: v for k, v in keys.items() if k != "devices"}), keys.get("devices", 1)),
    one_device(),
    rtol=2e-4,
  )


def test_experts_are_refused_by_name():
  with pytest.raises(
    ConfigError, match=r"use_dora=true, and groups/0/layers/0/feed_forward/experts/\w+ are weights of e"
  ):
    program(tiny(**EXPERTS | DORA))
  program(tiny(**EXPERTS | DORA, lora_targets=["mixer/"]))
  with pytest.raises(ConfigError, match="use_dora=True has no effect without lora_rank"):
    load_config(use_dora=True, strict=True)


@pytest.mark.slow
def test_merged_equals_unmerged_with_absorbed_matmuls():
  keys = CASES["deepseek3"]["keys"] | RUN | {"dtype": "float32", "mla_naive_kvcache": False}
  lora = {"lora_rank": 4, "lora_alpha": 8.0, "use_dora": True, "lora_targets": ["mixer/"]}
  model = program(load_config(**keys, **lora)).model
  params = {
    n: v + 0.1 * np.cos(np.arange(v.size).reshape(v.shape)) if is_adapter(n) else v for n, v in values(model).items()
  }
  plain = {name: np.asarray(value) for name, value in params.items() if not is_adapter(name)}
  dora = DoraMatmul(rank=4, scale=2.0)
  for module in {adapted_module(name) for name in params if is_adapter(name)}:
    weight, adapter = f"{module}/weight", (np.asarray(params[path]) for path in dora.paths(module))
    plain[weight] = dora.merge(plain[weight], model.contracted[weight][0], *adapter)
  expected = np.asarray(stepped(program(load_config(**keys)).model, plain))
  np.testing.assert_allclose(np.asarray(stepped(model, params)), expected, atol=1e-5 * np.abs(expected).max())
  still = {n: jnp.zeros_like(v) if n == magnitude_path(adapted_module(n)) else v for n, v in params.items()}
  assert np.abs(stepped(model, still) - expected).max() > 1e-3 * np.abs(expected).max(), "magnitudes must be felt"


@pytest.mark.parity
@pytest.mark.nightly
def test_magnitudes_of_a_part_of_a_fused_layer_go_out(references, tmp_path):
  """Four modules of a delta net are one for PEFT; those that are not adapted keep their magnitudes."""
  peft, reference = pytest.importorskip("peft"), references("qwen3_next")
  keys = RUN | {
    "dtype": "float32",
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "use_dora": True,
    "lora_targets": ["mixer/value$"],
  }
  config = resolve_source(str(reference.model.folder / "weights"), keys).config
  model = program(config).model
  params, _ = jax.jit(model.init)(0)
  shaken = {n: v + 0.1 * np.cos(np.arange(v.size).reshape(v.shape)) for n, v in params.items()}
  params = load_weights(config, model, model.params | model.buffers) | shaken

  @jax.jit
  def logits(params):
    decoder = model.bind(params)
    return decoder.logits(decoder.hidden(reference.batch.inputs, reference.batch.positions)[0])

  found = maxtext.convert(checkpoint(tmp_path / "run", config, params), tmp_path / "peft", to="peft")
  theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference.model.model), found).eval()
  with torch.no_grad():
    expected = theirs(reference.inputs).logits.numpy()
  assert np.abs(expected - reference.logits).max() > 1e-2 * np.abs(expected).max(), "they must be felt"
  np.testing.assert_allclose(logits(params), expected, atol=1e-5 * np.abs(expected).max())
