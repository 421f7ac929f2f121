"""Keys that describe a model do what they say, where parity with a published model does not show it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs import values
from maxtext.layers import mlp
from maxtext.layers.attention import QueryTemperature
from maxtext.layers.rope import RotaryEmbedding, YarnScaling, _frequencies, rotary_table, rotate
from tests.support import program, random_batch, tiny

GEMMA4 = {"decoder_block": "gemma4", "rope_type": "default", "sliding_window_size": 8, "base_num_decoder_layers": 6}
PLAIN = {"rope_type": "default", "rope_factor": 40, "original_max_position_embeddings": 4096}
LAYER = "groups/0/layers/0"


def model_of(**changes):
  return program(tiny(**(PLAIN | changes))).model


def logits_of(model, params, batch):
  decoder = model.bind(params)
  return np.asarray(decoder.logits(decoder.hidden(batch.inputs, batch.positions)[0]))


@pytest.fixture(scope="module")
def plain():
  """A model without anything special, its weights, a batch and its logits."""
  model, batch = model_of(), random_batch(tiny())
  params, _ = jax.jit(model.init)(0)
  return params, batch, logits_of(model, params, batch)


def added(model, params, value):
  """Those weights, and `value` in each that the model has besides."""
  return {n: params.get(n, jnp.full(s.shape, value, s.dtype)) for n, s in (model.params | model.buffers).items()}


def test_every_activation_has_a_function():
  assert mlp.ACTIVATIONS.keys() - {"exact gelu"} == set(values.ACTIVATIONS)  # which only towers have


NEUTRAL = {
  "attention_bias": (0.0, [f"{LAYER}/mixer/{p}/bias" for p in ("query", "key", "value", "out")]),
  "mlp_bias": (0.0, [f"{LAYER}/feed_forward/{p}/bias" for p in ("gate", "up", "down")]),
  "attention_sink": (-1e9, [f"{LAYER}/mixer/sinks"]),
}


@pytest.mark.parametrize(
  "key", [key if key == "attention_bias" else pytest.param(key, marks=pytest.mark.slow) for key in NEUTRAL]
)
def test_what_is_added_changes_nothing_until_it_has_a_value(plain, key):
  params, batch, expected = plain
  (value, names), model = NEUTRAL[key], model_of(**{key: True})
  assert sorted(model.params.keys() - params.keys()) == sorted(names)
  np.testing.assert_allclose(logits_of(model, added(model, params, value), batch), expected, atol=1e-5)
  for name in names:
    moved = added(model, params, value)
    moved[name] = moved[name] * 0 + 0.5
    assert np.abs(logits_of(model, moved, batch) - expected).max() > 1e-3, name


@pytest.mark.parametrize(
  ("changes", "names"),
  [
    ({"use_post_attn_norm": True}, ["mixer_post_norm/scale"]),
    ({"use_post_ffw_norm": True}, ["feed_forward_post_norm/scale"]),
    ({"use_qk_norm": True}, ["mixer/query_norm/scale", "mixer/key_norm/scale"]),
    ({"use_qk_norm": True, "qk_norm_with_scale": False}, []),
  ],
)
def test_norms(plain, changes, names):
  params, batch, expected = plain
  model = model_of(**changes)
  assert sorted(model.params.keys() - params.keys()) == sorted(f"{LAYER}/{name}" for name in names)
  found = logits_of(model, added(model, params, 1.0), batch)
  assert np.abs(found - expected).max() > 1e-2


def test_clipped_activations(plain):
  params, batch, expected = plain
  np.testing.assert_allclose(logits_of(model_of(mlp_activations_limit=1e3), params, batch), expected, atol=1e-5)
  assert np.abs(logits_of(model_of(mlp_activations_limit=0.1), params, batch) - expected).max() > 1e-2


def test_chunks_end_where_they_end(plain):
  params, batch, _ = plain
  model = model_of(attention_type="chunk", chunk_attn_window_size=8)
  changed = dataclasses.replace(batch, inputs=(batch.inputs + (np.arange(32) == 5)) % 128)
  moved = np.abs(logits_of(model, params, changed) - logits_of(model, params, batch)).max((0, 2))
  assert (moved > 0).tolist() == [5 <= s < 8 for s in range(32)]


def test_fixed_positions_are_added(plain):
  params, batch, expected = plain
  found = logits_of(model_of(use_untrainable_positional_embedding=True), params, batch)
  assert np.abs(found - expected).max() > 1e-2
  angle = 7 * 1e4 ** (-np.arange(24) / 23)
  from maxtext.layers.embedding import sinusoids

  np.testing.assert_allclose(
    sinusoids(jnp.array([[7]]), 48, jnp.float32)[0, 0], [*np.sin(angle), *np.cos(angle)], atol=1e-5
  )


def test_embeddings_by_a_product(plain):
  params, batch, expected = plain
  np.testing.assert_allclose(logits_of(model_of(use_iota_embed=True), params, batch), expected, atol=1e-5)
  traced = jax.make_jaxpr(lambda t: model_of(use_iota_embed=True).bind(params).embedding(t))(batch.inputs)
  assert "gather" not in str(traced)


def test_rope_keys(plain):
  params, batch, expected = plain

  def shifted(factor, **changes):
    decoder = model_of(**changes).bind(params)
    return decoder.logits(decoder.hidden(batch.inputs, batch.positions * factor)[0])

  stretched = logits_of(model_of(rope_linear_scaling_factor=2.0), params, batch)
  np.testing.assert_allclose(shifted(2, rope_linear_scaling_factor=2.0), expected, atol=1e-4)
  assert np.abs(stretched - expected).max() > 1e-3
  unscaled = {"rope_type": "llama3.1", "rope_use_scale": False}
  np.testing.assert_allclose(logits_of(model_of(**unscaled), params, batch), expected, atol=1e-5)
  mixer = (
    model_of(rope_min_timescale=4, rope_max_timescale=10000, partial_rotary_factor=0.5).spec.groups[0].cycle[0].mixer
  )
  wavelengths = 1 / _frequencies(mixer.rope)
  np.testing.assert_allclose(wavelengths, [4, 4 * 2500**0.5])


def test_partial_and_proportional_rotation():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 1, 8)), jnp.float32)
  positions = jnp.arange(3)[None]
  partial = rotate(x, rotary_table(RotaryEmbedding(4), positions, jnp.float32))
  np.testing.assert_array_equal(partial[..., 4:], x[..., 4:])
  assert not np.allclose(partial[0, 1:, :, :4], x[0, 1:, :, :4])
  share = rotate(x, rotary_table(RotaryEmbedding(8, share=0.5), positions, jnp.float32))
  still = [2, 3, 6, 7]
  np.testing.assert_array_equal(share[..., still], x[..., still])
  neighbours = rotate(x, rotary_table(RotaryEmbedding(8, interleaved=True), positions, jnp.float32), interleaved=True)
  halves = rotate(x[..., [0, 2, 4, 6, 1, 3, 5, 7]], rotary_table(RotaryEmbedding(8), positions, jnp.float32))
  np.testing.assert_allclose(neighbours, halves[..., [0, 4, 1, 5, 2, 6, 3, 7]], atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32, 1), (4, 2), (1, 1)])
def test_yarn_equals_its_reference(fast, slow, truncate):
  pytest.importorskip("torch")
  from transformers import LlamaConfig
  from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

  parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": fast, "beta_slow": slow,
                "original_max_position_embeddings": 4096, "truncate": truncate}  # fmt: skip
  config = LlamaConfig(head_dim=64, max_position_embeddings=163840, rope_parameters=parameters)
  expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
  np.testing.assert_allclose(
    _frequencies(RotaryEmbedding(64, scaling=YarnScaling(40, 4096, fast, slow, truncate))), expected, rtol=1e-5
  )
  yarn = {"rope_type": "yarn", "rope_factor": 40, "rope_attention_scaling": True, "beta_fast": fast, "beta_slow": slow}
  scaling = model_of(**yarn, rope_truncate=truncate).spec.groups[0].cycle[0].mixer.rope.scaling
  assert scaling == YarnScaling(40, 4096, fast, slow, truncate, pytest.approx(factor))


@pytest.mark.slow
def test_local_and_global_layers():
  keys = GEMMA4 | {"global_head_dim": 16, "global_num_kv_heads": 1, "local_rope_max_timescale": 100}
  near, far = (model_of(**keys, global_rope_max_timescale=1000).spec.groups[0].cycle[i].mixer for i in (0, 5))
  assert (near.head_dim, near.kv_heads, near.window, near.rope.theta) == (8, 2, 8, 100)
  assert (far.head_dim, far.kv_heads, far.window, far.rope.theta) == (16, 1, None, 1000)
  shares = model_of(**keys, global_rope_proportion=0.5, local_rope_proportion=0.75).spec.groups[0].cycle
  assert (shares[0].mixer.rope.share, shares[5].mixer.rope.share) == (0.75, 0.5)
  assert not far.shared_values
  assert model_of(**keys, share_kv_projections=True).spec.groups[0].cycle[5].mixer.shared_values
  scaled, plain = (model_of(**keys, v_norm_with_scale=on).params for on in (True, False))
  assert {n.rsplit("/", 2)[1] for n in scaled.keys() - plain.keys()} == {"value_norm"}


def test_temperature_grows_with_position():
  np.testing.assert_allclose(
    QueryTemperature(4)(jnp.array([0, 2, 3, 7])), [1, 1, 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(3)], rtol=1e-6
  )
