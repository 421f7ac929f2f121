"""What keys add to any family equals a plain decoder written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext import ConfigError
from maxtext.data.batch import Batch
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model
from maxtext.models.qk_clip import apply_qk_clip
from maxtext.training.objectives.base import Models, StepContext
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.state import initial_state
from maxtext.training.step import make_train_step
from tests import plain_decoder
from tests.support import losses, program, random_batch, tiny

MOBA = {"moba": True, "moba_chunk_size": 4, "moba_topk": 3}
MHC = {"mhc_expansion_rate": 3, "sinkhorn_iterations": 4}
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
CLIP = {"use_qk_clip": True, "qk_clip_threshold": 0.5}
ENGRAM = {
  "engram_layers": [1], "engram_num_heads": 2, "engram_head_dim": 4, "engram_vocab_bases": [30, 40],
  "engram_max_ngram_size": 3, "engram_kernel_size": 3, "engram_seed": 7,
}  # fmt: skip
MEMORY = {"engram": {"bases": (30, 40), "heads": 2, "dim": 4, "span": 3, "seed": 7}}
PACKED = np.where(np.arange(32) < 13, 1, 2)
MESH = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "per_device_batch_size": 2}


def random_model(**keys):
  """A model with every parameter random, and the same parameters in float64."""
  model = build_model(tiny(**keys), make_mesh(tiny(), jax.devices()[:1]))
  params, buffers = jax.jit(model.init)(0)
  rng = np.random.default_rng(0)
  params = {n: jnp.asarray(p + 0.3 * rng.standard_normal(p.shape), jnp.float32) for n, p in params.items()}
  return model, params, buffers, {n: np.asarray(p, np.float64) for n, p in params.items()}


def batch_of(documents):
  batch = random_batch(tiny(), segments=np.broadcast_to(documents, (2, 32)))
  start = np.array([np.flatnonzero(documents == d)[0] for d in documents])
  return Batch(
    batch.inputs, batch.targets, np.broadcast_to(np.arange(32) - start, (2, 32)), batch.segments, batch.weights
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "documents",
  [pytest.param(np.ones(32, int), marks=pytest.mark.slow), PACKED],
  ids=["one document", "two documents"],
)
@pytest.mark.parametrize(
  ("keys", "plain"),
  [
    ({}, {}),
    (MOBA, {"moba": (4, 3)}),
    (MHC, {"streams": (3, 4)}),
    (ENGRAM, MEMORY),
    (ENGRAM | MHC, MEMORY | {"streams": (3, 4)}),
  ],
  ids=["plain", "moba", "hyper-connections", "engram", "engram and hyper-connections"],
)
def test_hidden_states(keys, plain, documents):
  model, params, _, exact = random_model(**keys)
  batch = batch_of(documents)
  hidden = jax.jit(lambda p: model.bind(p).hidden(batch.inputs, batch.positions, batch.segments)[0])(params)
  for row in range(2):
    expected = plain_decoder.forward(exact, batch.inputs[row], batch.positions[row], documents, **plain)
    np.testing.assert_allclose(hidden[row], expected, atol=1e-4)
  if documents is not PACKED:  # a row that is one document may come without segments, and then in pieces
    alone = jax.jit(lambda p: model.bind(p).hidden(batch.inputs, batch.positions)[0])(params)
    np.testing.assert_allclose(alone, hidden, atol=1e-5)
    cache = model.bind(params).init_cache(2, 40)
    step = jax.jit(lambda p, t, s, c: model.bind(p).hidden(t, s, cache=c)[::2])
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 32)):
      piece, cache = step(params, batch.inputs[:, start:end], batch.positions[:, start:end], cache)
      np.testing.assert_allclose(piece, hidden[:, start:end], atol=1e-4)


@pytest.mark.parametrize(
  "documents",
  [pytest.param(np.ones(32, int), marks=pytest.mark.slow), PACKED],
  ids=["one document", "two documents"],
)
def test_tokens_after_the_next_are_predicted(documents):
  model, params, buffers, exact = random_model(**MTP)
  batch = batch_of(documents)
  loss, metrics = jax.jit(
    lambda p: LanguageModeling(mtp_weight=0.3)(Models(model.bind(p | buffers)), batch, StepContext())
  )(params)
  without, _ = jax.jit(
    lambda p: LanguageModeling(mtp_weight=0.0)(Models(model.bind(p | buffers)), batch, StepContext())
  )(params)
  found = [[], []]
  for row in range(2):
    tokens, positions = batch.inputs[row], batch.positions[row]
    hidden = plain_decoder.forward(exact, tokens, positions, documents)
    for depth in (1, 2):
      upcoming = np.roll(batch.targets[row], 1 - depth)
      hidden = plain_decoder.mtp(exact, depth - 1, hidden, upcoming, positions, documents)
      logits = hidden @ exact["head/weight"]
      for s in range(32 - depth):
        if documents[s] == documents[s + depth]:
          gold = logits[s, batch.targets[row, s + depth]]
          own = np.log(np.exp(logits[s] - logits[s].max()).sum()) + logits[s].max() - gold
          found[depth - 1].append((own, batch.weights[row, s + depth]))
  means = [np.average([own for own, _ in depth], weights=[weight for _, weight in depth]) for depth in found]
  total = batch.weights.sum()
  assert float(metrics["mtp_loss"] / total) == pytest.approx(0.3 * np.mean(means), rel=1e-4)
  assert float((loss - without) / total) == pytest.approx(0.3 * np.mean(means), rel=1e-3)


@pytest.mark.parametrize(("layer", "tiles"), [(1, 4), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_the_acceptance_rate_is_the_share_of_targets_that_are_most_likely(layer, tiles):
  """Of targets with a weight, within a row and a document. Four tokens are likely, so that some are hit."""
  model, params, buffers, _ = random_model(**MTP)
  params["head/weight"] = params["head/weight"].at[:, 4:].set(0)
  exact = {n: np.asarray(p, np.float64) for n, p in params.items()}
  batch = batch_of(PACKED)
  batch = Batch(
    batch.inputs % 4, batch.targets % 4, batch.positions, batch.segments, batch.weights * (batch.weights > 1)
  )
  objective = LanguageModeling(tiles=tiles, next_token_only=True, mtp_eval_layer=layer)
  loss, metrics = jax.jit(lambda p: objective(Models(model.bind(p | buffers)), batch, StepContext()))(params)
  hits = []
  for row in range(2):
    hidden = plain_decoder.forward(exact, batch.inputs[row], batch.positions[row], PACKED)
    for depth in range(layer):
      upcoming = np.roll(batch.targets[row], -depth)
      hidden = plain_decoder.mtp(exact, depth, hidden, upcoming, batch.positions[row], PACKED)
    best = (hidden @ exact["head/weight"]).argmax(-1)
    places = [s for s in range(32 - layer) if PACKED[s] == PACKED[s + layer] and batch.weights[row, s + layer] > 0]
    hits += [best[s] == batch.targets[row, s + layer] for s in places]
  assert 0 < sum(hits) < len(hits) < 60
  assert metrics == {"mtp_acceptance_rate": sum(hits), "mtp_acceptance_rate_weight": len(hits)}
  plain = LanguageModeling(next_token_only=True)
  expected, none = jax.jit(lambda p: plain(Models(model.bind(p | buffers)), batch, StepContext()))(params)
  assert float(loss) == pytest.approx(float(expected), rel=1e-5)
  assert none == {}


def test_an_evaluation_reports_the_acceptance_rate():
  keys = MTP | {"eval_interval": 2, "eval_steps": 2, "base_num_decoder_layers": 1}
  p = program(tiny(**keys, mtp_eval_target_module=2))
  state = p.init()
  found, decoder = p.evaluate(state), p.model.bind(state.params)
  hits, total = 0, 0
  for _, fed in zip(range(2), p.data.feed(split="eval"), strict=False):
    batch = fed.batch
    hidden, _, _ = decoder.hidden(batch.inputs, batch.positions)
    states, _ = decoder.mtp_hidden(hidden, batch.targets, batch.positions)
    best = np.asarray(decoder.logits(states[1])).argmax(-1)
    hits += (best[:, :-2] == np.asarray(batch.targets)[:, 2:]).sum()
    total += best[:, :-2].size
  assert hits
  assert found["mtp_acceptance_rate"] == pytest.approx(hits / total)
  assert found.keys() == {"loss", "tokens", "mtp_acceptance_rate"}
  assert "mtp_acceptance_rate" not in program(tiny(**keys)).evaluate(state)


def test_an_acceptance_rate_needs_its_layer():
  with pytest.raises(ConfigError, match="mtp_eval_target_module=3 is more than mtp_num_layers=2"):
    tiny(**MTP, mtp_eval_target_module=3)


@pytest.mark.slow
def test_multi_token_prediction_trains():
  found = losses(tiny(**MTP, steps=4, learning_rate=1e-2, warmup_steps_fraction=0.0))
  assert found[-1] < found[0]


def largest(model, params, batch):
  """Per layer and head, from the definition."""
  found = []
  exact = {n: np.asarray(p, np.float64) for n, p in params.items()}
  plain_attention = plain_decoder.attention

  def spy(own, x, positions, documents, moba):
    q, k = (np.einsum("se,ehd->shd", x, own[f"mixer/{n}/weight"]) for n in ("query", "key"))
    q, k = (plain_decoder.rotated(a, positions) for a in (q, k))
    logits = np.einsum("shd,thd->hst", q, np.repeat(k, 2, axis=1)) * 8**-0.5
    seen = np.tril(documents[:, None] == documents[None])
    found.append(np.where(seen, logits, -np.inf).max((1, 2)))
    return plain_attention(own, x, positions, documents, moba)

  plain_decoder.attention = spy
  try:
    for row in range(2):
      plain_decoder.forward(exact, batch.inputs[row], batch.positions[row], np.asarray(batch.segments[row]))
  finally:
    plain_decoder.attention = plain_attention
  return np.maximum(np.stack(found[:2]), np.stack(found[2:]))


def test_queries_and_keys_are_shrunk_where_logits_are_large():
  """After an update each head's logits are multiplied by threshold over their largest, if that is above it."""
  model, params, buffers, _ = random_model(**CLIP)
  batch = batch_of(PACKED)
  name = "groups/0/layers/0/mixer/largest_logit"
  decoder = model.bind(params | buffers)
  decoder.hidden(batch.inputs, batch.positions, batch.segments)
  seen = model.buffers_of(decoder)
  expected = largest(model, params, batch)
  np.testing.assert_allclose(seen[name], expected, rtol=1e-4)
  threshold = float(np.median(expected))
  clipped, _ = apply_qk_clip(model, threshold, params, seen)
  first = largest(model, clipped, batch)[0]  # a later layer's inputs have changed
  np.testing.assert_allclose(first, np.minimum(expected[0], threshold), rtol=1e-4)
  for path, value in clipped.items():
    if "mixer/query" not in path and "mixer/key" not in path:
      np.testing.assert_array_equal(value, params[path])


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_step_shrinks_what_the_whole_batch_saw(accumulation):
  config = tiny(**CLIP)
  model, optimizer = program(config).model, optax.sgd(0.0)
  step = make_train_step(
    model, LanguageModeling(), optimizer, lambda s: 0.0, accumulation=accumulation,
    post_update=lambda p, b: apply_qk_clip(model, 0.5, p, b),
  )  # fmt: skip
  batch = batch_of(PACKED)
  state = jax.jit(lambda: initial_state(model, optimizer, 0))()
  expected = largest(model, state.params, batch)
  after, _ = jax.jit(step)(state, batch)
  shrunk = largest(model, after.params, batch)[0]
  assert expected[0].max() > 0.6
  np.testing.assert_allclose(shrunk, np.minimum(expected[0], 0.5), rtol=1e-3)


@pytest.mark.slow
def test_a_run_clips():
  config = tiny(**CLIP, steps=3, learning_rate=1e-2, warmup_steps_fraction=0.0)
  p = program(config)
  state, feed = p.init(), p.feed()
  for _ in range(3):
    state, _ = p.step(state, next(feed).batch)
  free = program(tiny(steps=3, learning_rate=1e-2, warmup_steps_fraction=0.0))
  other, feed = free.init(), free.feed()
  for _ in range(3):
    other, _ = free.step(other, next(feed).batch)
  query = "groups/0/layers/0/mixer/query/weight"
  assert float(jnp.abs(state.params[query]).sum()) < 0.95 * float(jnp.abs(other.params[query]).sum())


@pytest.mark.mesh
@pytest.mark.slow
@pytest.mark.parametrize(
  "keys",
  [MOBA, pytest.param(MHC, marks=pytest.mark.nightly), MTP, CLIP, pytest.param(ENGRAM, marks=pytest.mark.nightly)],
  ids=["moba", "hyper-connections", "multi-token", "clip", "engram"],
)
def test_a_mesh_trains_like_one_device(keys):
  run = {"steps": 4, "learning_rate": 1e-2, "warmup_steps_fraction": 0.0}
  np.testing.assert_allclose(losses(tiny(**keys, **run, **MESH), devices=4), losses(tiny(**keys, **run)), atol=1e-4)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"moba_topk": 2}, "moba_topk=2 has no effect without moba=true"),
    ({"sinkhorn_iterations": 3}, "has no effect without mhc_expansion_rate"),
    ({"mtp_loss_scaling_factor": 0.5}, "has no effect without mtp_num_layers"),
    ({"qk_clip_threshold": 5.0}, "has no effect without use_qk_clip=true"),
    ({"engram_seed": 3}, "engram_seed=3 has no effect without engram_layers"),
    (ENGRAM | {"engram_layers": [2]}, "engram_layers=[2] must be from 0 to 1, the model's last layer"),
    (ENGRAM | {"engram_vocab_bases": [5]}, "must have a size for each n-gram length from 2 to engram_max_ngram_size=3"),
    ({"moba": True, "moba_chunk_size": 0}, "moba_chunk_size=0 must be from 1"),
    (
      {"use_qk_clip": True, "decoder_block": "qwen3", "use_qk_norm": True},
      "use_qk_clip=true does not go with decoder_block=qwen3, whose queries and keys are normed",
    ),
  ],
)
def test_mistakes_are_named(keys, message):
  with pytest.raises(ConfigError) as error:
    build_model(tiny(**keys, strict=True), make_mesh(tiny(), jax.devices()[:1]))
  assert message in str(error.value)
