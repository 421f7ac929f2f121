"""What must not change the result: rematerialisation, the layer loop, accumulation, vocabulary tiling, kernels."""

import jax
import numpy as np
import pytest

from maxtext.configs.types import RematPolicy
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.step import gradients
from tests.support import program, random_batch, tiny

QUICK, SLOW = (
  ("minimal", "full"),
  pytest.mark.slow,
)  # policies of the quick run, scanned; the full run has all, both ways

CUSTOM = {
  "remat_policy": "custom",
  "decoder_layer_input": "offload",
  "query_proj": "device",
  "context": "offload",
  "mlpwi_0": "device",
  "mlpwo": "offload",
}

VARIANTS = (
  {
    policy.value: pytest.param({"remat_policy": policy.value}, marks=() if policy.value in QUICK else SLOW)
    for policy in RematPolicy
  }
  | {
    f"{policy.value}, unscanned": pytest.param({"remat_policy": policy.value, "scan_layers": False}, marks=SLOW)
    for policy in RematPolicy
  }
  | {
    "custom by tensor": CUSTOM,
    "custom by tensor, unscanned": pytest.param(CUSTOM | {"scan_layers": False}, marks=SLOW),
    "policies in turn": {"remat_policy": "full,minimal"},
    "policies in turn, unscanned": {"remat_policy": "full,minimal", "scan_layers": False},
    "accumulation": {"gradient_accumulation_steps": 4, "per_device_batch_size": 2},
    "accumulation and tiling": {"gradient_accumulation_steps": 4, "per_device_batch_size": 2, "num_vocab_tiling": 4},
    "tiling": {"num_vocab_tiling": 4},
  }
)


@pytest.fixture(scope="module")
def params():
  """Shared by all variants: initial weights depend on none of them."""
  return program(tiny(base_num_decoder_layers=4)).init().params


def loss_and_gradients(params, changes):
  config = tiny(base_num_decoder_layers=4, **changes)
  model, batch = program(config).model, random_batch(config, rows=8)
  objective = LanguageModeling(z_loss=1e-3, tiles=config.num_vocab_tiling)

  @jax.jit
  def run(params, batch):
    return gradients(model, objective, params, {}, batch, accumulation=config.gradient_accumulation_steps)

  found = run(params, batch)
  return found.loss, found.grads


@pytest.fixture(scope="module")
def plain(params):
  return loss_and_gradients(params, {"attention": "dot_product"})


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_same_loss_and_gradients(params, plain, changes):
  loss, grads = loss_and_gradients(params, changes)
  assert abs(loss - plain[0]) < 1e-5
  assert grads.keys() == plain[1].keys() == params.keys()
  for name, grad in grads.items():
    scale = float(np.abs(plain[1][name]).max())
    np.testing.assert_allclose(grad, plain[1][name], atol=1e-5 * scale, rtol=0, err_msg=name)


def test_remat_policies_save_what_they_say():
  """Bytes kept for the backward pass grow with what a policy saves, so policies are not one and the same."""

  def residuals(policy):
    config = tiny(remat_policy=policy, base_num_decoder_layers=4, scan_layers=False)
    p = program(config)
    batch = random_batch(config, rows=8)

    def loss(params):
      return p.model.bind(params).hidden(batch.inputs, batch.positions)[0].sum()

    _, backward = jax.eval_shape(lambda params: jax.vjp(loss, params), p.model.params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))

  full, qkv, dots, minimal = map(residuals, ("full", "save_qkv_proj", "save_dot_except_mlp", "minimal"))
  mixed = residuals("full,minimal")
  assert full < qkv < dots < minimal
  assert mixed == (full + minimal) // 2


def test_compile_time_does_not_grow_with_depth():
  lines = [program(tiny(base_num_decoder_layers=n)).lower().as_text().count("\n") for n in (2, 32)]
  assert lines[0] == lines[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_close_and_stored_as_asked(params, plain, dtype):
  config = tiny(base_num_decoder_layers=4, dtype=dtype, weight_dtype=dtype, grad_dtype=dtype, mu_dtype=dtype)
  p = program(config)
  assert {a.dtype.name for a in p.state.params.values()} == {dtype}
  low = {name: value.astype(dtype) for name, value in params.items()}
  loss, _, grads, _ = jax.jit(
    lambda low, batch: gradients(p.model, LanguageModeling(z_loss=1e-3), low, {}, batch, grad_dtype=dtype)
  )(low, random_batch(config, rows=8))
  assert {g.dtype.name for g in grads.values()} == {dtype}
  assert abs(float(loss) - float(plain[0])) < 0.02
  for name, grad in grads.items():
    exact = np.asarray(plain[1][name])
    assert np.linalg.norm(np.asarray(grad, np.float32) - exact) < 0.06 * np.linalg.norm(exact), name


@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
@pytest.mark.parametrize("grad", ["float32", "bfloat16"])
@pytest.mark.parametrize("moment", ["", "bfloat16"])
def test_a_step_returns_the_state_it_took(weight, grad, moment):
  """Same shapes and number formats: otherwise the second step would compile again and a checkpoint would not fit."""
  p = program(tiny(weight_dtype=weight, grad_dtype=grad, mu_dtype=moment))
  after, _ = jax.eval_shape(p.step, p.state, p.batch)
  before = jax.tree.map(lambda a: (a.shape, a.dtype), p.state)
  assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == before


@pytest.mark.slow
def test_clipping_bounds_the_update_and_not_the_figure():
  figures = {}
  for clip in (0, 0.01):
    p = program(tiny(gradient_clipping_threshold=clip, warmup_steps_fraction=0, adam_eps=1.0, adam_weight_decay=0))
    state = p.init()
    before = {n: np.asarray(x) for n, x in state.params.items()}
    state, metrics = p.step(state, random_batch(tiny(), rows=8))
    moved = np.sqrt(sum(np.square(np.asarray(state.params[n]) - before[n]).sum() for n in before))
    figures[clip] = float(metrics["grad_norm"]), moved
  assert figures[0][0] == pytest.approx(figures[0.01][0])
  assert figures[0][0] > 0.1
  assert figures[0.01][1] < 0.1 * figures[0][1]
