"""What enters a decoder beside tokens: embeddings, positions of several components, spans, features of towers.

The toy family at the end has a small tower over patches. It is all that a family outside the package needs.
"""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import load_config
from maxtext.checkpoint.layout import Layout
from maxtext.configs.types import DecoderBlockType
from maxtext.inference.engine import dropless
from maxtext.kernels.cross_entropy import cross_entropy
from maxtext.layers.attention import GQA
from maxtext.layers.block import Block
from maxtext.layers.embedding import feature_indices, merge_features
from maxtext.layers.mlp import MLP
from maxtext.layers.norm import LayerNormSpec, RMSNormSpec
from maxtext.layers.paged_kv_cache import PagedKVCache
from maxtext.layers.patches import LinearProjector, PatchProjection
from maxtext.layers.rope import RotaryEmbedding, rotary_table
from maxtext.mesh.devices import make_mesh
from maxtext.models import standard
from maxtext.models.build import FAMILIES as FAMILIES_OF_MODELS
from maxtext.models.flops import tower_flops, train_flops_per_token
from maxtext.models.model import Model
from maxtext.models.placement import placements
from maxtext.models.spec import Group, ModelSpec, TowerSpec
from maxtext.models.weight_table import Weight
from maxtext.planner.cost_model import forward_costs
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.program import Program
from maxtext.weights.tensor_layout import from_tensors, to_tensors
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
  rope = RotaryEmbedding(head_dim, 1e6, mrope_sections=section, mrope_interleaved=interleaved)
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
  rope = RotaryEmbedding(128, 1e6, mrope_sections=tuple(section), mrope_interleaved=interleaved)
  for ours, theirs in zip(rotary_table(rope, positions, jnp.float32), wanted, strict=True):
    np.testing.assert_allclose(ours[:, :, 0], theirs[..., :64].numpy(), atol=1e-5)


def test_text_turns_alike_by_one_component_and_by_three():
  rope = RotaryEmbedding(16, mrope_sections=(2, 3, 3), mrope_interleaved=True)
  positions = np.arange(20, dtype=np.int32)[None]
  tables = [
    rotary_table(RotaryEmbedding(16), positions, jnp.float32),
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
  return Model.of(replace(spec, groups=(replace(group, cycle=(block,)),)), model.execution)


def test_sections_that_do_not_fit_are_named():
  with pytest.raises(ValueError, match=r"\[2, 3, 2\] have 7 frequencies together, and head_dim=16 has 8"):
    RotaryEmbedding(16, mrope_sections=(2, 3, 2))
  with pytest.raises(ValueError, match="positions have 3 components"):
    rotary_table(RotaryEmbedding(16), np.zeros((1, 2, 3), np.int32), jnp.float32)


def test_layers_that_choose_keys_take_no_spans():
  config = tiny(moba=True, moba_chunk_size=8, moba_topk=2)
  model, batch = program(config).model, random_batch(config)
  with pytest.raises(ValueError, match="spans are not supported by layers that choose"):
    model.shapes.hidden(batch.inputs, batch.positions, spans=np.ones_like(batch.inputs))


FAMILIES = json.loads((Path(__file__).parent / "data" / "tiny_models.json").read_text())
SPANS = np.zeros((2, 40), np.int32)
SPANS[0, 3:14], SPANS[0, 20:24], SPANS[1, 9:16], SPANS[1, 17:24] = 1, 2, 1, 2


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("gemma2", {}),
    ("gemma2", {"block": 8, "speculative_tokens": 8}),
    ("gemma2", {"pages": PagedKVCache(12, 8)}),
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
  cached = Model.of(model.spec, model.execution.replace(**changes))
  by_blocks = "speculative_tokens" in changes  # new tokens displace none that they see
  paged = {"pages": np.arange(10, dtype=np.int32).reshape(2, 5)} if "pages" in changes else {}

  def chunk(p, cache, start, end):
    part, fresh = slice(start, end), start == 0 and not paged
    inputs = {"cache": cache, "fresh": fresh, "end": jnp.int32(end) if by_blocks and not fresh else None, **paged}
    return cached.bind(p).hidden(tokens[:, part], positions[:, part], spans=SPANS[:, part], **inputs)[::2]

  cache = jax.jit(lambda p: cached.bind(p).init_cache(2, 40))(params)
  for start, end in ((0, 16), (16, 24), (24, 25)):
    found, cache = jax.jit(chunk, static_argnums=(2, 3))(params, cache, start, end)
    np.testing.assert_allclose(found, whole[:, start:end], atol=2e-4 * float(jnp.abs(whole).max()))


WIDTH, PATCHES, SIZE = 24, 6, 12  # of the tower, of an image, of a patch
NORM = LayerNormSpec()
BLOCK = Block(GQA(4, 2, 8, rope=None, bias=True, causal=False), MLP(40, "gelu", gated=False, bias=True), NORM)
TOWER = TowerSpec(
  "vision",
  WIDTH,
  PATCHES,
  PatchProjection((SIZE,)),
  (Group((BLOCK,), 2), Group((BLOCK,), 1)),
  LinearProjector(RMSNormSpec()),
  NORM,
  learned_positions=True,
  deepstack=(0,),
)
MODULES = ("mixer/query", "mixer/key", "mixer/value", "mixer/out", "feed_forward/up", "feed_forward/down",
           "mixer_norm", "feed_forward_norm")  # fmt: skip


class Toy:
  """A family: a decoder as the keys describe it, and a tower over patches."""

  WEIGHTS = standard.WEIGHTS | {
    "towers/vision/front_end/weight": Weight("vision.patch.weight", transposed=True),
    "towers/vision/front_end/bias": Weight("vision.patch.bias"),
    "towers/vision/positions/table": Weight("vision.positions.weight", table=True),
    **{
      f"towers/vision/groups/*/layers/*/{module}/{leaf}": Weight(
        f"vision.layers.{{layer}}.{module}.{leaf}", transposed=leaf == "weight"
      )
      for module in MODULES
      for leaf in ("weight", "bias", "scale")
    },
    "towers/vision/final_norm/scale": Weight("vision.norm.scale"),
    "towers/vision/final_norm/bias": Weight("vision.norm.bias"),
    "towers/vision/projector/norm/scale": Weight("projector.norm"),
    "towers/vision/projector/out/weight": Weight("projector.weight", transposed=True),
    "towers/vision/deepstack/*/norm/scale": Weight("deepstack.norm"),
    "towers/vision/deepstack/*/out/weight": Weight("deepstack.weight", transposed=True),
  }

  @staticmethod
  def spec(config):
    return ModelSpec.of(standard.dense(config), TOWER)


START, ROWS = 5, 8  # of the image in every row
PLACES = slice(START, START + PATCHES)


def toy_batch(config):
  """Tokens, and of each row the pixels of one image, which of its tokens take their features, and their span."""
  batch = random_batch(config, ROWS)
  pixels = np.random.default_rng(1).standard_normal((ROWS, PATCHES, SIZE), np.float32)
  placeholders = np.zeros(batch.inputs.shape, bool)
  placeholders[:, PLACES] = True
  return batch, pixels, feature_indices(placeholders, PATCHES), placeholders.astype(np.int32)


def toy_logits(model, params, batch, pixels, indices, spans=None):
  decoder = model.bind(params)
  features = decoder.towers["vision"](pixels)
  embeddings = merge_features(decoder.embed(batch.inputs, batch.positions), features, indices)
  return decoder.logits(decoder.hidden(None, batch.positions, embeddings=embeddings, spans=spans)[0])


def toy_loss(model, params, *inputs):
  return cross_entropy(toy_logits(model, params, *inputs), jnp.asarray(inputs[0].targets), 0.0).mean()


def run_with_towers(config, devices=1):
  """A run whose objective may feed towers, as one's own may."""
  return Program.of(config, make_mesh(config, jax.devices()[:devices]), LanguageModeling())


@pytest.fixture
def toy(monkeypatch):
  """The family in the place of another, and a model of it."""
  monkeypatch.setitem(FAMILIES_OF_MODELS, DecoderBlockType.LLAMA2, Toy)
  return run_with_towers(tiny()).model


@pytest.fixture
def toy_params(toy):
  return jax.jit(toy.init)(0)[0]


def test_features_of_a_tower_enter_a_decoder(toy, toy_params):
  inputs = toy_batch(tiny())
  logits = jax.jit(partial(toy_logits, toy))
  before = logits(toy_params, *inputs)
  changed = inputs[1].copy()
  changed[0, 3, 7] += 1.0
  difference = np.abs(logits(toy_params, inputs[0], changed, *inputs[2:]) - before).max(-1)
  np.testing.assert_array_equal(difference[0, :START], 0)
  np.testing.assert_array_equal(difference[1:], 0)
  assert difference[0, START:].min() > 1e-6


@pytest.mark.parametrize("spanned", [False, True])
def test_tokens_of_an_image_see_each_other_both_ways(toy, toy_params, spanned):
  batch, _, _, spans = toy_batch(tiny())

  @jax.jit
  def hidden(params, feature):
    decoder = toy.bind(params)
    embeddings = decoder.embed(batch.inputs, batch.positions).at[:, PLACES.stop - 1].add(feature)
    return decoder.hidden(None, batch.positions, embeddings=embeddings, spans=spans if spanned else None)[0]

  difference = np.abs(hidden(toy_params, 1.0) - hidden(toy_params, 0.0)).max((0, 2))
  first = START if spanned else PLACES.stop - 1
  np.testing.assert_array_equal(difference[:first], 0)
  assert difference[first:].min() > 1e-6


def test_text_alone_gives_the_logits_of_the_decoder(toy, toy_params):
  batch = random_batch(tiny())
  alone = Model.of(toy.spec.decoder, toy.execution)
  assert not any(name.startswith("towers/") for name in alone.params)
  assert {n: a for n, a in toy.params.items() if not n.startswith("towers/")} == alone.params

  def logits(model, params):
    decoder = model.bind(params)
    return decoder.logits(decoder.hidden(batch.inputs, batch.positions)[0])

  own = {name: toy_params[name] for name in alone.params}
  np.testing.assert_array_equal(jax.jit(partial(logits, toy))(toy_params), jax.jit(partial(logits, alone))(own))


def test_every_weight_of_a_tower_learns(toy, toy_params):
  inputs = toy_batch(tiny())
  grads = jax.jit(jax.grad(partial(toy_loss, toy)))(toy_params, *inputs)
  unused = {n for n in grads if "/deepstack/" in n}
  free = {n for n in grads if n.endswith("/key/bias")}  # a bias of all keys changes no softmax
  assert unused == {n for n, grad in grads.items() if n not in free and not np.abs(grad).max() > 0}


def test_features_of_early_layers_enter_early_layers(toy, toy_params):
  """Deepstack: those of the tower's first group join the residual before the decoder's second layer."""
  batch, pixels, indices, _ = toy_batch(tiny())

  @jax.jit
  def hidden(params, strength):
    decoder = toy.bind(params)
    _, early = decoder.towers["vision"].features(pixels)
    embeddings = decoder.embed(batch.inputs, batch.positions)
    nothing = jnp.zeros_like(embeddings)
    layer_inputs = [[jnp.stack([nothing, strength * merge_features(nothing, early, indices)])]]
    return decoder.hidden(None, batch.positions, layer_inputs=layer_inputs, embeddings=embeddings)[0]

  difference = np.abs(hidden(toy_params, 1.0) - hidden(toy_params, 0.0)).max((0, 2))
  np.testing.assert_array_equal(difference[:START], 0)
  assert difference[START:].min() > 1e-6


def test_layers_of_a_tower_may_be_unrolled(toy, toy_params):
  inputs, unrolled = toy_batch(tiny()), Model.of(toy.spec, toy.execution.replace(scan_layers=False))
  (loss, grads), (other, others) = (
    jax.jit(jax.value_and_grad(partial(toy_loss, m)))(toy_params, *inputs) for m in (toy, unrolled)
  )
  np.testing.assert_allclose(loss, other, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, others)


MESHES = {
  "fsdp and tensor": {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
  "context": {"ici_fsdp_parallelism": 4, "ici_context_parallelism": 2, "context_parallel_load_balance": False},
  "pipeline": {"ici_fsdp_parallelism": 4, "ici_pipeline_parallelism": 2},
}


@pytest.mark.parametrize("axes", [pytest.param(a, id=n, marks=[pytest.mark.nightly] * (n != "fsdp and tensor"))
                                  for n, a in MESHES.items()])  # fmt: skip
def test_a_mesh_gives_the_loss_of_one_device(toy, toy_params, axes):
  inputs = toy_batch(tiny())
  split = run_with_towers(tiny(per_device_batch_size=1, **axes), 8).model
  params = jax.jit(split.init, out_shardings=_shardings((split.params, split.buffers)))(0)[0]
  wanted, found = (
    jax.jit(jax.value_and_grad(partial(toy_loss, model)))(own, *inputs)
    for model, own in ((toy, toy_params), (split, params))
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, wanted)


def _shardings(tree):
  return jax.tree.map(lambda a: a.sharding, tree)


def test_whatever_reads_a_model_sees_its_towers(toy):
  width, hidden, size, out = WIDTH, 40, SIZE, toy.spec.width
  layer = width * 32 + 32 + 2 * (width * 16 + 16) + 32 * width + 2 * width * hidden + hidden + width + 4 * width
  own = size * width + width + PATCHES * width + 3 * layer + 2 * width + 2 * (width + width * out)
  alone = Model.of(toy.spec.decoder, toy.execution)
  assert toy.size == alone.size + own
  split = run_with_towers(tiny(per_device_batch_size=1, ici_fsdp_parallelism=4, ici_tensor_parallelism=2), 8)
  assert split.state.params.keys() == toy.params.keys()
  placed = {p.path: p for p in placements(split.model)}
  query = placed["towers/vision/groups/0/layers/0/mixer/query/weight"]
  assert (query.shape, query.shards) == ((2, width, 4, 8), 8)
  assert Model.of(split.model.spec, split.model.execution).params.keys() == toy.params.keys()
  assert forward_costs(split)[0]["context"].bytes > 0
  assert train_flops_per_token(toy, 32) == train_flops_per_token(alone, 32)
  weights = sum(a.size for n, a in toy.params.items() if n.startswith("towers/") and n.endswith("/weight"))
  assert tower_flops(toy, "vision") == PATCHES * (6 * weights + 3 * 12 * 32 * PATCHES)


def test_a_table_names_the_weights_of_towers(toy, toy_params):
  values = {name: np.asarray(value) for name, value in toy_params.items()}
  tensors = to_tensors(toy, Toy.WEIGHTS, values)
  found = from_tensors(toy, Toy.WEIGHTS, tensors)
  jax.tree.map(np.testing.assert_array_equal, found, values)
  last = values["towers/vision/groups/1/layers/0/mixer/query/weight"][0]
  np.testing.assert_array_equal(tensors["vision.layers.2.mixer/query.weight"], last.reshape(WIDTH, -1).T)


@pytest.mark.parametrize("stacked", [None, 1])
def test_layouts_of_checkpoints_know_the_layers_of_towers(toy, toy_params, stacked):
  layout, name = Layout(stacked), "towers/vision/groups/0/layers/0/mixer/query/weight"
  stored = layout.store(name, np.asarray(toy_params[name]))
  assert (f"{name.replace('layers/0', 'layers/0.1')}" in stored) == (stacked is None)
  assert stored.keys() == layout.stored(name, toy.params[name]).keys()
  loaded = layout.load(name, toy.params[name], {n: jnp.asarray(a) for n, a in stored.items()})
  np.testing.assert_array_equal(loaded, toy_params[name])


def test_a_run_trains_a_tower(toy):
  """An objective of one's own uses it; the step, its state and its placement are those of any run."""
  config = tiny(per_device_batch_size=1, ici_fsdp_parallelism=4, ici_tensor_parallelism=2)
  _, pixels, indices, _ = toy_batch(config)

  class WithImages(LanguageModeling):
    def __call__(self, models, batch, context):
      decoder = models.decoder
      embeddings = decoder.embed(batch.inputs, batch.positions)
      embeddings = merge_features(embeddings, decoder.towers["vision"](jnp.asarray(pixels)), indices)
      hidden, _, _ = decoder.hidden(None, batch.positions, batch.segments, embeddings=embeddings)
      return (cross_entropy(decoder.logits(hidden), batch.targets, 0.0) * batch.weights).sum(), {}

  p = Program.of(config, make_mesh(config, jax.devices()[:8]), WithImages())
  state = p.init()
  before = {name: np.asarray(value) for name, value in state.params.items()}
  batch = next(p.feed()).batch
  for _ in range(2):  # the first has a learning rate of 0
    state, _ = p.step(state, batch)
  name = "towers/vision/front_end/weight"
  assert np.abs(np.asarray(state.params[name]) - before[name]).max() > 0


def test_the_example_of_the_page_runs(capsys):
  page = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
  section = page.split("## Inputs: embeddings, positions, spans, towers")[1].split("\n## ")[0]
  exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], {})
  assert "20,832 of them in the tower\n(2, 32, 256)" in capsys.readouterr().out
