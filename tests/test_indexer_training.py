"""Training of the indexer: its loss by hand, what it reaches, and that it learns to look where attention looks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext import ConfigError
from maxtext.kernels.attention import AttentionKernel
from maxtext.layers.context import Context
from maxtext.layers.indexer import Indexer
from maxtext.layers.mla import MLA
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.rope import RotaryEmbedding
from maxtext.models.build import model_spec
from maxtext.training.objectives.auxiliary import collect_auxiliary
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.step import gradients
from maxtext.weights.config_json import compare_specs
from tests.support import program, random_batch, tiny

pytestmark = pytest.mark.filterwarnings("ignore:first_num_dense_layers")  # it chooses dense layers here

B, S, E, WEIGHT = 2, 300, 24, 0.7
ROPE = RotaryEmbedding(8, 10000.0, interleaved=True)
INDEXER = Indexer(2, 16, 40, dataclasses.replace(ROPE, interleaved=False), WEIGHT)
STAGES = {"warm-up": False, "sparse": True}
MODEL = {
  "decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
  "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_num_dense_layers": 2, "head_dim": 128,
  "use_indexer": True, "indexer_topk": 8, "indexer_head_dim": 16, "indexer_n_heads": 4, "rope_type": "default",
  "original_max_position_embeddings": 4096, "rope_factor": 40, "indexer_loss_scaling_factor": WEIGHT,
}  # fmt: skip


def layer_of(sparse):
  spec = MLA(4, 16, 12, 16, 24, ROPE, indexer=dataclasses.replace(INDEXER, sparse_training=sparse))
  execution = program(tiny()).model.execution.replace(attention=AttentionKernel("chunked"))
  layer = spec.build(ParamFactory(0, jnp.float32), E, execution)
  rng = np.random.default_rng(0)
  for _, variable in nnx.to_flat_state(nnx.state(layer)):
    variable.set_value(jnp.asarray(rng.standard_normal(variable[...].shape) * 0.4, jnp.float32))
  return layer


def packed_row():
  """Two documents and padding: positions and segments."""
  positions = np.concatenate([np.arange(170), np.arange(100), np.arange(30)])
  segments = np.repeat([1, 2, 0], [170, 100, 30])
  return (np.broadcast_to(a, (B, S)) for a in (positions, segments))


def rotated(x, positions, interleaved):
  """The first eight dimensions of x [S,H,D] by RoPE."""
  angle = positions[:, None, None] * 10000.0 ** (-np.arange(4) / 4)
  pairs = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
  a, b = (x[..., pair] for pair in pairs)
  y = x.copy()
  y[..., pairs[0]], y[..., pairs[1]] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
  return y


def rms(x):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def loss_by_hand(layer, inputs, positions, segments, sparse):
  """The divergence of each token that is not padding, in float64."""
  w = {"/".join(map(str, path)): np.asarray(v[...], np.float64) for path, v in nnx.to_flat_state(nnx.state(layer))}
  found = []
  for x, at, document in zip(np.asarray(inputs, np.float64), positions, segments, strict=True):
    narrow = rms(x @ w["query_down/weight"]) * w["query_norm/scale"]
    q = np.einsum("sl,lhd->shd", narrow, w["query/weight"])
    latent, shared = np.split(x @ w["kv_down/weight"], [16], axis=-1)
    nope = np.einsum("sl,lhd->shd", rms(latent) * w["kv_norm/scale"], w["kv/weight"][..., :16])
    logits = np.einsum("shd,thd->hst", q[..., :16], nope)
    logits += np.einsum("shd,td->hst", rotated(q[..., 16:], at, True), rotated(shared[:, None], at, True)[:, 0])
    key = x @ w["indexer/key/weight"]
    key = (key - key.mean(-1, keepdims=True)) / np.sqrt(key.var(-1, keepdims=True) + 1e-6)
    key = rotated((key * w["indexer/key_norm/scale"] + w["indexer/key_norm/bias"])[:, None], at, False)[:, 0]
    query = rotated(np.einsum("sl,lhd->shd", narrow, w["indexer/query/weight"]), at, False)
    products = np.maximum(np.einsum("shd,td->sht", query, key) / 4, 0)
    scores = np.einsum("sh,sht->st", x @ w["indexer/weights/weight"] / np.sqrt(2), products)
    for s in range(S):
      if document[s] == 0:
        continue
      keys = [t for t in range(s + 1) if document[t] == document[s]]
      if sparse:
        keys = sorted(keys, key=lambda t: -scores[s, t])[: INDEXER.count]
      heads = np.exp(logits[:, s, keys] / np.sqrt(24))
      p = (heads / heads.sum(-1, keepdims=True)).sum(0) / 4
      own = scores[s, keys] - np.log(np.exp(scores[s, keys]).sum())
      found.append((p * (np.log(p) - own)).sum())
  return np.array(found)


INPUT = jnp.asarray(np.random.default_rng(1).standard_normal((B, S, E)), jnp.float32)


@pytest.mark.parametrize("sparse", STAGES.values(), ids=STAGES.keys())
def test_the_loss_is_the_divergence_by_hand(sparse):
  layer, (positions, segments) = layer_of(sparse), packed_row()
  context = Context.of(jnp.asarray(positions), jnp.asarray(segments), layer.spec.ropes, jnp.float32)
  _, aux, _ = jax.jit(lambda x: layer(x, context, None, jnp.zeros((), jnp.int32)))(INPUT)
  expected = loss_by_hand(layer, INPUT, positions, segments, sparse)
  assert len(expected) == B * 270
  assert float(aux["indexer_loss"]) == pytest.approx(WEIGHT * expected.mean(), rel=1e-4)


@pytest.mark.parametrize("sparse", STAGES.values(), ids=STAGES.keys())
def test_no_array_holds_the_weights_of_all_heads(sparse):
  """Neither in the forward pass nor in the backward pass; the largest has the queries of a chunk."""
  layer = layer_of(sparse)
  context = Context.of(jnp.broadcast_to(jnp.arange(S), (B, S)), None, layer.spec.ropes, jnp.float32)
  graph, state = nnx.split(layer)

  def loss(state, x):
    y, aux, _ = nnx.merge(graph, state)(x, context, None, jnp.zeros((), jnp.int32))
    return y.sum() + aux["indexer_loss"]

  jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(state, INPUT)
  sizes = [v.aval.size for e in equations(jaxpr.jaxpr) for v in e.outvars if hasattr(v.aval, "size")]
  assert B * S * S <= max(sizes) < B * 4 * S * S


def test_queries_are_scored_in_chunks():
  """They select the same keys, and no array holds the scores of all queries and heads."""
  layer, (positions, segments) = layer_of(True), packed_row()
  context = Context.of(jnp.asarray(positions), jnp.asarray(segments), layer.spec.ropes, jnp.float32)
  latent, keys = layer.query_norm(layer.query_down(INPUT)), layer.indexer.keys(INPUT, context)

  def select(rows):
    return jax.jit(lambda: layer.indexer(INPUT, latent, context, keys, context.positions, rows=rows))

  whole, chunks = select(S), select(100)
  np.testing.assert_array_equal(chunks(), whole())
  most = [
    max(v.aval.size for e in equations(jax.make_jaxpr(one)().jaxpr) for v in e.outvars if v.aval.dtype == jnp.float32)
    for one in (whole, chunks)
  ]
  assert most == [B * S * INDEXER.heads * S, B * 100 * INDEXER.heads * S]


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      if (own := getattr(inner, "jaxpr", inner)) is not None and hasattr(own, "eqns"):
        yield from equations(own)


def found_on(config, params, objective=None):
  model, batch = program(config).model, random_batch(config, rows=4)
  return jax.jit(lambda p: gradients(model, objective or LanguageModeling(), p, {}, batch))(params)


@pytest.fixture(scope="module")
def params():
  """Larger than initial ones, so that attention looks somewhere."""
  found = program(tiny(**MODEL)).init().params
  return {n: p * 3 if n.split("/")[-2] in ("query", "kv_down", "key", "weights") else p for n, p in found.items()}


def is_indexer(name):
  return "/indexer/" in name


@pytest.mark.parametrize("sparse", STAGES.values(), ids=STAGES.keys())
def test_the_loss_trains_the_indexer_and_nothing_else(params, sparse):
  config = tiny(**MODEL, indexer_sparse_training=sparse)
  found = found_on(config, params)
  assert float(found.metrics["indexer_loss"]) > 1e-3
  # The same attention without this loss: the keys are selected, or there is no indexer.
  other = {"indexer_loss_scaling_factor": 0.0} if sparse else {"use_indexer": False, "indexer_loss_scaling_factor": 0.0}
  without = tiny(**MODEL | other)
  plain = found_on(without, {n: p for n, p in params.items() if sparse or not is_indexer(n)})
  assert float(found.loss - plain.loss) == pytest.approx(float(found.metrics["indexer_loss"]), rel=1e-4)

  def only(p):
    batch = random_batch(config, rows=4)
    _, auxiliary, _ = program(config).model.bind(p).hidden(batch.inputs, batch.positions)
    return collect_auxiliary(auxiliary)[0]

  alone = jax.jit(jax.grad(only))(params)
  for name, grad in found.grads.items():
    scale = float(jnp.abs(grad).max())
    assert scale > 0, name
    if is_indexer(name):
      np.testing.assert_allclose(alone[name], grad, atol=1e-5 * scale, err_msg=name)
      assert not sparse or not plain.grads[name].any(), name
    else:
      assert not alone[name].any(), name
      np.testing.assert_allclose(plain.grads[name], grad, atol=1e-5 * scale, err_msg=name)


def test_the_warm_up_moves_the_indexer_towards_attention(params):
  config = tiny(**MODEL, trainable_parameters_mask=["indexer/"], learning_rate=3e-3, warmup_steps_fraction=0.0)
  p = program(config)
  state, batch = p.init(), next(p.feed()).batch
  assert all(map(is_indexer, state.params))
  state = dataclasses.replace(
    state, params={n: params[n] for n in state.params}, buffers={n: params[n] for n in state.buffers}
  )
  before, found = {n: np.asarray(b) for n, b in state.buffers.items()}, []
  for _ in range(8):
    state, metrics = p.step(state, batch)
    found.append((float(metrics["indexer_loss"]), float(metrics["loss"])))
  losses, totals = np.array(found).T
  assert losses[-1] < 0.8 * losses[0]
  np.testing.assert_allclose(totals - losses, totals[0] - losses[0], atol=1e-5)
  for name, value in state.buffers.items():
    np.testing.assert_array_equal(value, before[name], err_msg=name)


MESHES = {
  "fsdp 2 x tensor 2 x context 2": {
    "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_context_parallelism": 2,
    "context_parallel_load_balance": False,
  },
  "pipeline 2 x fsdp 4": {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 4},
}  # fmt: skip


def curve(devices, **keys):
  p = program(tiny(**MODEL, learning_rate=1e-2, per_device_batch_size=8 / devices, **keys), devices)
  state, found = p.init(), []
  for _, fed in zip(range(3), p.feed(), strict=False):
    state, metrics = p.step(state, fed.batch)
    found.append((float(metrics["loss"]), float(metrics["indexer_loss"])))
  return np.array(found)


@pytest.fixture(scope="module")
def one_device():
  return {sparse: curve(1, indexer_sparse_training=sparse) for sparse in (False, True)}


@pytest.mark.mesh
@pytest.mark.parametrize(
  ("axes", "sparse"),
  [
    pytest.param(axes, sparse, id=f"{name}, {stage}", marks=[] if "context" in name and sparse else pytest.mark.slow)
    for name, axes in MESHES.items()
    for stage, sparse in STAGES.items()
  ],
)
def test_a_mesh_trains_like_one_device(one_device, axes, sparse):
  found = curve(8, indexer_sparse_training=sparse, **axes)
  np.testing.assert_allclose(found, one_device[sparse], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"indexer_topk": 32}, "indexer_topk=32 must be below max_target_length=32"),
    ({"indexer_loss_scaling_factor": -1.0}, "indexer_loss_scaling_factor=-1.0 must be 0 or more"),
  ],
)
def test_what_cannot_be_is_an_error(keys, message):
  with pytest.raises(ConfigError, match=message):
    tiny(**MODEL | keys)


def test_a_trained_model_is_converted_like_another():
  plain = tiny(**MODEL | {"indexer_loss_scaling_factor": 0.0})
  assert compare_specs(model_spec(tiny(**MODEL)), model_spec(plain)) == {}
