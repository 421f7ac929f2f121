"""Keys do what they say: each is changed alone, and what it should change is looked at."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext.optim.optimizer import make_optimizer
from maxtext.optim.schedules import learning_rate
from tests.support import program, random_batch, tiny


@pytest.fixture(scope="module")
def params():
  return program(tiny()).init().params


def logits(params, **changes):
  config = tiny(**changes)
  model = program(config).model
  batch = random_batch(config)
  decoder = model.bind({n: p for n, p in params.items() if n in model.params})
  return decoder.logits(decoder.hidden(batch.inputs, batch.positions)[0])


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
  assert (next(one.batches()).inputs != next(two.batches()).inputs).mean() > 0.3


def test_synthetic_data_is_a_function_of_seed_step_and_row():
  one, eight = program(tiny()), program(tiny(per_device_batch_size=1), devices=8)
  batches, split = one.batches(), eight.batches()
  for step in range(3):
    batch, other, resumed = next(batches), next(split), next(one.batches(first_step=step))
    for field in ("inputs", "targets", "positions", "weights"):
      np.testing.assert_array_equal(getattr(batch, field), getattr(other, field))
      np.testing.assert_array_equal(getattr(batch, field), getattr(resumed, field))
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < 128


def test_schedule_is_a_rise_and_half_a_cosine():
  config = tiny(steps=100, learning_rate=0.5, warmup_steps_fraction=0.2, learning_rate_final_fraction=0.1)
  rate = learning_rate(config)
  steps = np.arange(130)
  cosine = 0.05 + 0.45 * 0.5 * (1 + np.cos(np.pi * np.clip((steps - 20) / 80, 0, 1)))
  np.testing.assert_allclose([rate(s) for s in steps], np.where(steps < 20, 0.5 * steps / 20, cosine), rtol=1e-5)
  shorter = learning_rate(tiny(steps=100, learning_rate_schedule_steps=10, learning_rate=0.5))
  assert float(shorter(10)) == pytest.approx(0.05)


def test_adamw_by_hand():
  keys = {"adam_b1": 0.8, "adam_b2": 0.9, "adam_eps": 1e-3, "adam_eps_root": 1e-4, "adam_weight_decay": 0.2}
  optimizer = make_optimizer(tiny(steps=10, learning_rate=0.1, warmup_steps_fraction=0, **keys))
  rate = learning_rate(tiny(steps=10, learning_rate=0.1, warmup_steps_fraction=0))
  p, m, v = np.array([1.0, -2.0, 3.0]), 0.0, 0.0
  params, state = {"p": jnp.asarray(p)}, optimizer.init({"p": jnp.asarray(p)})
  for step in range(5):
    g = np.sin(np.arange(3) + step)
    updates, state = jax.jit(optimizer.update)({"p": jnp.asarray(g)}, state, params)
    params = optax.apply_updates(params, updates)
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
    m_hat, v_hat = m / (1 - 0.8 ** (step + 1)), v / (1 - 0.9 ** (step + 1))
    p = p - float(rate(step)) * (m_hat / (np.sqrt(v_hat + 1e-4) + 1e-3) + 0.2 * p)
  np.testing.assert_allclose(params["p"], p, rtol=1e-5)


def test_large_arrays_have_an_index():
  """A stack of experts has more than 2^32 elements; nothing is allocated here."""
  from maxtext.layers.make import Make

  shape = jax.eval_shape(lambda: Make(0, jnp.bfloat16)("w", (60, 384, 7168, 2048), (None,) * 4, std=1.0).get_value())
  assert shape.shape == (60, 384, 7168, 2048)
