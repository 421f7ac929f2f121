"""What enters a decoder beside tokens: embeddings, positions of several components, spans, features of towers."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import load_config
from maxtext.inference.engine import dropless
from maxtext.layers.embedding import feature_indices, merge_features
from maxtext.layers.pages import Pages
from maxtext.layers.rope import Rope, rotary_table
from maxtext.models.model import Model
from tests.support import program, random_batch, tiny


def test_embeddings_take_the_place_of_tokens():
  config = tiny()
  model, batch = program(config).model, random_batch(config)
  params, _ = jax.jit(model.init)(0)

  @jax.jit
  def run(params):
    decoder = model.bind(params)
    embeddings = decoder.embed(batch.inputs, batch.positions)
    by_tokens = decoder.hidden(batch.inputs, batch.positions)[0]
    by_embeddings = decoder.hidden(None, batch.positions, embeddings=embeddings)[0]
    return by_tokens, by_embeddings, decoder.hidden(batch.inputs, batch.positions, embeddings=2 * embeddings)[0]

  by_tokens, by_embeddings, doubled = run(params)
  np.testing.assert_array_equal(by_tokens, by_embeddings)
  assert np.abs(doubled - by_tokens).max() > 1e-3
  with pytest.raises(ValueError, match="both are None"):
    model.bind(params).hidden(None, batch.positions)


@pytest.mark.parametrize("add", [False, True])
def test_features_stand_where_their_placeholders_do(add):
  rng = np.random.default_rng(0)
  marked = np.array([[0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0], [0] * 6], bool)
  embeddings, features = rng.standard_normal((3, 6, 4), np.float32), rng.standard_normal((3, 3, 4), np.float32)
  wanted = embeddings.copy()
  for row in range(3):
    for number, place in enumerate(np.flatnonzero(marked[row])):
      wanted[row, place] = features[row, number] + (embeddings[row, place] if add else 0)
  indices = feature_indices(marked, marked.sum(1))
  merged = jax.jit(lambda e, f, i: merge_features(e, f, i, add))(embeddings, features, indices)
  np.testing.assert_array_equal(merged, wanted)
  order = rng.permutation(6)  # indices travel with their tokens
  reordered = merge_features(jnp.asarray(embeddings[:, order]), jnp.asarray(features), indices[:, order], add)
  np.testing.assert_array_equal(reordered, wanted[:, order])


def test_placeholders_and_features_are_counted():
  marked = np.array([[0, 1, 1], [1, 1, 1]], bool)
  with pytest.raises(ValueError, match="row 1 has 3 placeholder tokens for 2 features"):
    feature_indices(marked, 2)


def components(section, interleaved):
  """Of each frequency, by hand."""
  if not interleaved:
    return [axis for axis, count in enumerate(section) for _ in range(count)]
  return [axis if axis and j < 3 * section[axis] else 0 for j in range(sum(section)) for axis in [j % 3]]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("section", [(24, 20, 20), (2, 3, 3), (3, 3, 2)])
def test_each_frequency_turns_by_its_component(section, interleaved):
  head_dim = 2 * sum(section)
  rope = Rope(head_dim, 1e6, mrope_sections=section, mrope_interleaved=interleaved)
  positions = np.random.default_rng(0).integers(0, 50, (2, 9, 3), dtype=np.int32)
  cos, sin = rotary_table(rope, positions, jnp.float32)
  for j, axis in enumerate(components(section, interleaved)):
    angle = positions[..., axis] * 1e6 ** (-2 * j / head_dim)
    np.testing.assert_allclose(cos[:, :, 0, j], np.cos(angle), atol=1e-5)
    np.testing.assert_allclose(sin[:, :, 0, j], np.sin(angle), atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_three_components_turn_as_in_transformers(interleaved):
  torch = pytest.importorskip("torch")
  from transformers.models.qwen2_vl import modeling_qwen2_vl as contiguous
  from transformers.models.qwen3_vl import modeling_qwen3_vl as in_turn

  section, kind = ([24, 20, 20], "Qwen3VLText") if interleaved else ([16, 24, 24], "Qwen2VL")
  module = in_turn if interleaved else contiguous
  parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
  config_of = module.Qwen3VLTextConfig if interleaved else module.Qwen2VLTextConfig
  config = config_of(
    hidden_size=256, num_attention_heads=2, num_key_value_heads=2, head_dim=128, rope_parameters=parameters
  )
  positions = np.random.default_rng(0).integers(0, 50, (2, 9, 3), dtype=np.int32)
  table = getattr(module, f"{kind}RotaryEmbedding")(config)
  wanted = table(torch.zeros(1), torch.from_numpy(positions).permute(2, 0, 1))
  rope = Rope(128, 1e6, mrope_sections=tuple(section), mrope_interleaved=interleaved)
  for ours, theirs in zip(rotary_table(rope, positions, jnp.float32), wanted, strict=True):
    np.testing.assert_allclose(ours[:, :, 0], theirs[..., :64].numpy(), atol=1e-5)


def test_text_turns_alike_by_one_component_and_by_three():
  rope = Rope(16, mrope_sections=(2, 3, 3), mrope_interleaved=True)
  positions = np.arange(20, dtype=np.int32)[None]
  tables = [
    rotary_table(Rope(16), positions, jnp.float32),
    rotary_table(rope, positions, jnp.float32),
    rotary_table(rope, np.stack([positions] * 3, -1), jnp.float32),
  ]
  for table in tables[1:]:
    jax.tree.map(np.testing.assert_array_equal, table, tables[0])


def test_positions_order_tokens_and_rotary_positions_only_turn_them():
  config = tiny()
  plain, batch = program(config).model, random_batch(config)
  model = with_mrope(plain, (1, 2, 1))
  params, _ = jax.jit(model.init)(0)
  image = np.arange(config.max_target_length) // 4 % 2 == 1  # four tokens in a row share their time
  grid = np.stack([np.where(image, batch.positions // 4 * 4, batch.positions), batch.positions, batch.positions], -1)

  def hidden(params, rotary, tokens=batch.inputs):
    return jax.jit(lambda p, r, t: model.bind(p).hidden(t, batch.positions, rotary_positions=r)[0])(
      params, rotary, tokens
    )

  text = np.stack([batch.positions] * 3, -1)
  wanted = jax.jit(lambda p: plain.bind(p).hidden(batch.inputs, batch.positions)[0])(params)
  np.testing.assert_array_equal(hidden(params, text), wanted)
  np.testing.assert_array_equal(hidden(params, batch.positions), wanted)
  before = hidden(params, grid)
  assert np.abs(before - wanted).max() > 1e-4
  changed = batch.inputs.copy()
  changed[:, 6] = (changed[:, 6] + 1) % config.vocab_size  # its neighbours 4 and 5 share its time
  after = hidden(params, grid, changed)
  np.testing.assert_array_equal(after[:, :6], before[:, :6])
  assert np.abs(after - before)[:, 6:].max(-1).min() > 1e-7


def with_mrope(model, sections):
  """The same model with rotary positions of several components."""
  spec = model.spec
  (group,) = spec.groups
  (block,) = group.cycle
  rope = replace(block.mixer.rope, mrope_sections=sections, mrope_interleaved=True)
  block = replace(block, mixer=replace(block.mixer, rope=rope))
  return Model.of(replace(spec, groups=(replace(group, cycle=(block,)),)), model.how)


def test_sections_that_do_not_fit_are_named():
  with pytest.raises(ValueError, match=r"\[2, 3, 2\] have 7 frequencies together, and head_dim=16 has 8"):
    Rope(16, mrope_sections=(2, 3, 2))
  with pytest.raises(ValueError, match="positions have 3 components"):
    rotary_table(Rope(16), np.zeros((1, 2, 3), np.int32), jnp.float32)


FAMILIES = json.loads((Path(__file__).parent / "data" / "tiny_models.json").read_text())
SPANS = np.zeros((2, 40), np.int32)
SPANS[0, 3:14], SPANS[0, 20:24], SPANS[1, 9:16], SPANS[1, 17:24] = 1, 2, 1, 2


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("gemma2", {}),
    ("gemma2", {"cache_block": 8, "cache_ahead": 8}),
    ("gemma2", {"cache_pages": Pages(12, 8)}),
    ("deepseek3", {}),
  ],
)
def test_chunks_of_a_prompt_see_the_spans_they_hold(name, changes):
  """A first chunk, one behind it, and single tokens after all spans give the hidden states of training."""
  run = {"max_target_length": 40, "per_device_batch_size": 1, "dataset_type": "synthetic", "dtype": "float32"}
  model = dropless(program(load_config(**FAMILIES[name]["keys"] | run | {"jax_cache_dir": ""})).model)
  params, buffers = jax.jit(model.init)(0)
  rng = np.random.default_rng(0)
  params = {n: p + 0.1 * rng.standard_normal(p.shape, np.float32) for n, p in (params | buffers).items()}
  tokens = rng.integers(0, 96, (2, 40), dtype=np.int32)
  positions = np.broadcast_to(np.arange(40, dtype=np.int32), (2, 40))
  whole = jax.jit(lambda p: model.bind(p).hidden(tokens, positions, spans=SPANS)[0])(params)
  plain = jax.jit(lambda p: model.bind(p).hidden(tokens, positions)[0])(params)
  assert np.abs(whole - plain)[0, 3:].max(-1).min() > 1e-6
  np.testing.assert_array_equal(whole[0, :3], plain[0, :3])
  cached = Model.of(model.spec, replace(model.how, **changes))
  by_blocks = "cache_ahead" in changes  # new tokens displace none that they see
  paged = {"pages": np.arange(10, dtype=np.int32).reshape(2, 5)} if "cache_pages" in changes else {}

  def chunk(p, cache, start, end):
    part, fresh = slice(start, end), start == 0 and not paged
    inputs = {"cache": cache, "fresh": fresh, "end": jnp.int32(end) if by_blocks and not fresh else None, **paged}
    return cached.bind(p).hidden(tokens[:, part], positions[:, part], spans=SPANS[:, part], **inputs)[::2]

  cache = jax.jit(lambda p: cached.bind(p).empty_cache(2, 40))(params)
  for start, end in ((0, 16), (16, 24), (24, 25)):
    found, cache = jax.jit(chunk, static_argnums=(2, 3))(params, cache, start, end)
    np.testing.assert_allclose(found, whole[:, start:end], atol=2e-4 * float(jnp.abs(whole).max()))
