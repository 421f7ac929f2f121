"""Keys do what they say: each is changed alone, and what it should change is looked at."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import maxtext
from maxtext import ConfigError
from maxtext.configs.errors import RunError
from maxtext.models.flops import train_flops_per_token
from maxtext.optim.optimizer import make_optimizer
from maxtext.optim.options import optimizer_options, schedule_options
from maxtext.optim.schedules import learning_rate
from tests.support import History, losses, program, random_batch, tiny


@pytest.fixture(scope="module")
def params():
  return program(tiny()).init().params


def logits(params, **changes):
  config = tiny(**changes)
  model = program(config).model
  batch = random_batch(config)
  decoder = model.bind({n: p for n, p in params.items() if n in model.params})
  return decoder.logits(decoder.hidden(batch.inputs, batch.positions)[0])


@pytest.mark.slow
def test_final_logits_soft_cap(params):
  plain = logits(params)
  np.testing.assert_allclose(logits(params, final_logits_soft_cap=0.5), 0.5 * np.tanh(plain / 0.5), atol=1e-5)


def test_normalize_embedding_logits(params):
  tied = {"logits_via_embedding": True}
  plain = logits(params, **tied, normalize_embedding_logits=False)
  np.testing.assert_allclose(logits(params, **tied), plain / 48**0.5, rtol=1e-5)


def test_logits_in_float32(params):
  low = {"dtype": "bfloat16"}
  assert logits(params, **low).dtype == jnp.float32
  assert logits(params, **low, cast_logits_to_fp32=False).dtype == jnp.bfloat16
  rounded = logits(params, **low)
  np.testing.assert_array_equal(rounded, rounded.astype(jnp.bfloat16).astype(jnp.float32))
  exact = logits(params, **low, logits_dot_in_fp32=True)
  assert (exact != exact.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_activations_in_float32(params):
  assert (logits(params, dtype="bfloat16") != logits(params, dtype="bfloat16", activations_in_float32=True)).any()


@pytest.mark.parametrize("activations", [["gelu", "linear"], ["relu"], ["silu"]])
def test_mlp_activations(params, activations):
  model = program(tiny(mlp_activations=activations)).model
  gate = "groups/0/layers/0/feed_forward/gate/weight"
  assert (gate in model.params) == (len(activations) == 2)
  assert float(jnp.abs(logits(params) - logits(params, mlp_activations=activations)).max()) > 1e-3


def test_matmul_precision_reaches_every_product():
  for scanned in (True, False):
    text = program(tiny(matmul_precision="highest", scan_layers=scanned)).lower().as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and "precision" in line]
    assert products
    assert all("HIGHEST" in line for line in products)


@pytest.mark.parametrize("scale", [0.0, 4.0])
def test_dense_init_scale(params, scale):
  scaled = program(tiny(dense_init_scale=scale)).init().params
  name = "groups/0/layers/0/mixer/query/weight"
  np.testing.assert_allclose(scaled[name], params[name] * scale**0.5, rtol=1e-6)
  assert float(params[name].std()) == pytest.approx(48**-0.5, rel=0.03)


def test_seeds():
  one, two = (program(tiny(init_weights_seed=s, data_shuffle_seed=s)) for s in (1, 2))
  assert (one.init().params["head/weight"] != two.init().params["head/weight"]).mean() > 0.99
  assert (next(one.feed()).batch.inputs != next(two.feed()).batch.inputs).mean() > 0.3


def test_synthetic_data_is_a_function_of_seed_step_and_row():
  one, eight = program(tiny()), program(tiny(per_device_batch_size=1), devices=8)
  feed, split, position = one.feed(), eight.feed(), dict
  for _ in range(3):
    resumed = next(one.feed(position() or None)).batch
    (batch, position), (other, _) = next(feed), next(split)
    for field in ("inputs", "targets", "positions", "weights"):
      np.testing.assert_array_equal(getattr(batch, field), getattr(other, field))
      np.testing.assert_array_equal(getattr(batch, field), getattr(resumed, field))
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < 128


def test_schedule_is_a_rise_and_half_a_cosine():
  config = tiny(steps=100, learning_rate=0.5, warmup_steps_fraction=0.2, learning_rate_final_fraction=0.1)
  rate = learning_rate(schedule_options(config))
  steps = np.arange(130)
  cosine = 0.05 + 0.45 * 0.5 * (1 + np.cos(np.pi * np.clip((steps - 20) / 80, 0, 1)))
  np.testing.assert_allclose([rate(s) for s in steps], np.where(steps < 20, 0.5 * steps / 20, cosine), rtol=1e-5)
  shorter = learning_rate(schedule_options(tiny(steps=100, learning_rate_schedule_steps=10, learning_rate=0.5)))
  assert float(shorter(10)) == pytest.approx(0.05)


def test_wsd_is_a_rise_a_plateau_and_a_fall():
  keys = {"steps": 100, "learning_rate": 0.5, "warmup_steps_fraction": 0.1, "lr_schedule_type": "wsd"}
  steps = np.arange(120)
  fallen = np.clip((steps - 80) / 20, 0, 1)
  for style, fall in (("linear", 1 - 0.9 * fallen), ("cosine", 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * fallen)))):
    rate = learning_rate(schedule_options(tiny(**keys, wsd_decay_steps_fraction=0.2, wsd_decay_style=style)))
    expected = 0.5 * np.where(steps < 10, steps / 10, fall)
    np.testing.assert_allclose([rate(s) for s in steps], expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "adam_pax", "sgd"])
def test_optimizers_by_hand(kind):
  """Fifty steps against the formula, in float64."""
  adam = {"adam_b1": 0.8, "adam_b2": 0.9, "adam_eps": 1e-3, "adam_eps_root": 1e-4, "adam_weight_decay": 0.2}
  keys = {"steps": 60, "learning_rate": 0.05, "warmup_steps_fraction": 0, "opt_type": kind}
  config = tiny(**keys, **({} if kind == "sgd" else adam | {"adamw_mask": ["bias$"]}))
  optimizer, rate = make_optimizer(optimizer_options(config), {}), learning_rate(schedule_options(config))
  start = np.array([1.0, -2.0, 3.0])
  expected = {"weight": start, "bias": start + 1}
  params = {n: jnp.asarray(p) for n, p in expected.items()}
  m, v, state = dict.fromkeys(expected, 0.0), dict.fromkeys(expected, 0.0), optimizer.init(params)
  for step in range(50):
    grads = {"weight": np.sin(np.arange(3) + step), "bias": np.cos(np.arange(3) * step)}
    updates, state = jax.jit(optimizer.update)({n: jnp.asarray(g) for n, g in grads.items()}, state, params)
    params = optax.apply_updates(params, updates)
    for name, g in grads.items():
      m[name], v[name] = 0.8 * m[name] + 0.2 * g, 0.9 * v[name] + 0.1 * g**2
      m_hat, v_hat = m[name] / (1 - 0.8 ** (step + 1)), v[name] / (1 - 0.9 ** (step + 1))
      decay = 0.2 * expected[name] if name == "weight" else 0.0
      change = g if kind == "sgd" else m_hat / (np.sqrt(v_hat + 1e-4) + 1e-3) + decay
      expected[name] = expected[name] - float(rate(step)) * change
  for name, value in expected.items():
    np.testing.assert_allclose(params[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_muon_orthogonalises_each_layer_on_its_own():
  """Against Optax on one layer's plain matrix; what is no layer's matrix gets AdamW with Nesterov momentum."""
  from optax.contrib import muon

  keys = {"muon_beta": 0.9, "muon_weight_decay": 0.1, "learning_rate": 0.02, "steps": 10, "warmup_steps_fraction": 0}
  config = tiny(opt_type="muon", gradient_clipping_threshold=0, **keys)
  p = program(config)
  state, name = p.init(), "groups/0/layers/0/mixer/query/weight"
  assert p.model.matrices[name] == ((1,), (2, 3))
  assert p.model.matrices["groups/0/layers/0/mixer/out/weight"] == ((1, 2), (3,))
  assert "head/weight" not in p.model.matrices
  optimizer, plain = (
    make_optimizer(optimizer_options(config), p.model.matrices),
    muon(learning_rate(schedule_options(config)), beta=0.9, weight_decay=0.1),
  )
  grads = {n: jnp.sin(7 * x + 1) for n, x in state.params.items()}
  updates, _ = optimizer.update(grads, state.opt_state, state.params)
  for layer in range(2):
    flat = [{"w": tree[name][layer].reshape(48, 32)} for tree in (state.params, grads)]
    expected, _ = plain.update(flat[1], plain.init(flat[0]), flat[0])
    np.testing.assert_allclose(updates[name][layer].reshape(48, 32), expected["w"], atol=1e-6)
  adamw = optax.adamw(learning_rate(schedule_options(config)), 0.9, 0.95, weight_decay=0.1, nesterov=True)
  exact, _ = adamw.update(grads, adamw.init(state.params), state.params)
  np.testing.assert_allclose(updates["head/weight"], exact["head/weight"], rtol=1e-4)
  curve = losses(tiny(opt_type="muon", learning_rate=0.01, steps=12))
  assert curve[-1] < curve[0] - 0.3


@pytest.mark.slow
def test_trainable_parameters_mask():
  p = program(tiny(trainable_parameters_mask=["mixer/", "^head"]))
  assert "head/weight" in p.model.params
  assert "embedding/table" in p.model.buffers
  assert not [n for n in p.model.params if "feed_forward" in n]
  before = p.init()
  frozen = {n: np.asarray(x) for n, x in before.buffers.items()}
  head = np.asarray(before.params["head/weight"])
  after, _ = p.step(p.step(before, random_batch(tiny(), rows=8))[0], random_batch(tiny(), rows=8))
  for name, value in frozen.items():
    np.testing.assert_array_equal(after.buffers[name], value)
  assert (after.params["head/weight"] != head).any()
  with pytest.raises(ConfigError, match="leaves nothing to train"):
    program(tiny(trainable_parameters_mask=["nothing"]))


@pytest.mark.slow
def test_gradients_that_are_no_number_end_the_run(tmp_path):
  file = tmp_path / "metrics.jsonl"
  keys = {"learning_rate": 1e30, "warmup_steps_fraction": 0, "gradient_clipping_threshold": 0, "steps": 9}
  keys |= {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1}
  with pytest.raises(RunError, match=r"the gradient norm is not a number at step (\d)") as error:
    maxtext.train(tiny(**keys, metrics_file=str(file)))
  records = [json.loads(line) for line in file.read_text().splitlines()]
  assert records[-1]["grad_norm"] is None
  assert f"at step {records[-1]['step']};" in str(error.value)
  assert len(records) < 9
  history = History()
  maxtext.train(tiny(**keys, abort_on_nan_loss=False), callbacks=[history])
  assert len(history.losses) == 9


def test_flops_by_hand():
  model = program(tiny()).model
  layer = 48 * 32 + 2 * 48 * 16 + 32 * 48 + 3 * 48 * 80
  weights = 2 * layer + 48 * 128
  assert train_flops_per_token(model, length=32) == 6 * weights + 2 * 12 * 32 * 16
  window = program(tiny(attention_type="local_sliding", sliding_window_size=5)).model
  assert train_flops_per_token(window, length=32) == 6 * weights + 2 * 12 * 32 * 5
  tied = program(tiny(logits_via_embedding=True)).model
  assert train_flops_per_token(tied, length=32) == train_flops_per_token(model, length=32)
  experts = {"decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 80}
  mixture = program(tiny(**experts)).model
  more = 2 * (48 * 8 + 3 * 48 * 80)  # a router, and two experts instead of one layer
  assert train_flops_per_token(mixture, length=32) == 6 * (weights + more) + 2 * 12 * 32 * 16
  adapted = program(tiny(lora_rank=3, lora_targets=["query$"])).model
  assert train_flops_per_token(adapted, length=32) == 4 * weights + 6 * 2 * 3 * (48 + 32) + 2 * 12 * 32 * 16


def test_large_arrays_have_an_index():
  """A stack of experts has more than 2^32 elements; nothing is allocated here."""
  from maxtext.layers.param_factory import ParamFactory

  shape = jax.eval_shape(
    lambda: ParamFactory(0, jnp.bfloat16)("w", (60, 384, 7168, 2048), (None,) * 4, std=1.0).get_value()
  )
  assert shape.shape == (60, 384, 7168, 2048)
