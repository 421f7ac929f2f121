"""Mixtures of experts: every dispatch is the same function, on any mesh, and the function is that of the references."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext.kernels.grouped_matmul import GroupedMatmul, Tiles
from maxtext.kernels.ragged_all_to_all import RaggedAllToAll
from maxtext.layers import expert_dispatch
from maxtext.layers.expert_dispatch import ExpertDispatch
from maxtext.layers.experts import MoE
from maxtext.layers.mlp import MLP
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.router import ExpertGroups, Router
from tests.support import program, tiny

B, S, E, F, X = 8, 6, 32, 24, 8
INPUT, PROBE = (jnp.asarray(np.random.default_rng(i).standard_normal((B, S, E)), jnp.float32) for i in (1, 2))
PLAIN = Router(X, 3)
SPECS = {
  "plain": MoE(PLAIN, F),
  "biased, clamped": MoE(Router(X, 3, bias=True), F, limit=0.5, bias=True),
  "weighted inputs, shared": MoE(Router(X, 1, "sigmoid", normalize=False), F, weigh_inputs=True, shared=MLP(F)),
  "grouped, chosen by bias": MoE(
    Router(X, 3, "sigmoid", scale=2.5, groups=ExpertGroups(4, 2, 2), selection_bias=True),
    F,
    shared=MLP(F),
    shared_gate=True,
  ),
}
PALLAS = GroupedMatmul("megablox", forward=Tiles(128), by_rows=Tiles(128), by_weights=Tiles(128), interpret=True)
WAYS = {
  "dropless": ExpertDispatch(),
  "dropless, scattering gradients": ExpertDispatch(gather_gradients=False),
  "dropless, ragged_dot": ExpertDispatch(wi=GroupedMatmul("ragged_dot"), wo=GroupedMatmul("ragged_dot")),
  "dropless, megablox": ExpertDispatch(wi=PALLAS, wo=PALLAS),
  "dropless, buffer": ExpertDispatch(buffer=float(X)),
  "dropless, gate and up merged": ExpertDispatch(merge_gate_up=True),
  "capacity": ExpertDispatch("capacity", capacity=float(X)),
}
ON_MESHES = {
  "dense": ExpertDispatch("dense"),
  "sent": ExpertDispatch(carrier=RaggedAllToAll()),
  "sent, gate and up merged": ExpertDispatch(carrier=RaggedAllToAll(), merge_gate_up=True),
  "sent, scattering gradients": ExpertDispatch(carrier=RaggedAllToAll(), gather_gradients=False),
  "sent, megablox, buffer": ExpertDispatch(carrier=RaggedAllToAll(), wi=PALLAS, wo=PALLAS, buffer=2.0),
}
QUICK = (
  ("biased, clamped", "dropless"), ("grouped, chosen by bias", "capacity"), ("biased, clamped", "sent"),
  ("biased, clamped", "sent, gate and up merged"),
  ("weighted inputs, shared", "sent"),
)  # fmt: skip
MESH = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2, "per_device_batch_size": 1}


def draw(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module")
def execution():
  return program(tiny()).model.execution


@pytest.fixture(scope="module")
def execution_on_mesh():
  return program(tiny(**MESH), devices=8).model.execution


def randomised(layer, seed=0):
  """All variables random, and routers sure of themselves, so that rounding does not change a choice."""
  for i, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(layer))):
    wide = 3.0 if "router" in path else 0.3
    variable.set_value(wide * draw(1000 * seed + i, *variable[...].shape))
  return layer


def run(spec, execution, x, probe, change=lambda layer: None):
  """Output, report, and gradients of the input and of all parameters."""
  layer = randomised(spec.build(ParamFactory(0, jnp.float32), E, execution))
  change(layer)
  graph, params, buffers = nnx.split(layer, nnx.Param, ...)

  @jax.jit
  @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
  def value(x, params):
    y, report = nnx.merge(graph, params, buffers, copy=True)(x)
    return (y * probe).sum(), (y, report)

  (_, (y, report)), grads = value(x, params)
  return (y, *jax.tree.leaves(grads)), report


@pytest.fixture(scope="module")
def dense(execution):
  plain = execution.replace(experts=ExpertDispatch("dense"))
  return {name: run(spec, plain, INPUT, PROBE) for name, spec in SPECS.items()}


def check(found, expected):
  for ours, plain in zip(found, expected, strict=True):
    np.testing.assert_allclose(ours, plain, atol=2e-5 * max(1, float(jnp.abs(plain).max())), rtol=0)


@pytest.mark.parametrize(
  ("name", "way"),
  [
    pytest.param(name, way, marks=[pytest.mark.slow] * (name != "biased, clamped"))
    for name in SPECS
    for way in WAYS
    if name == "biased, clamped" or way in ("dropless", "capacity")
  ],
)
def test_dispatches_agree(execution, dense, name, way):
  found, report = run(SPECS[name], execution.replace(experts=WAYS[way]), INPUT, PROBE)
  check(found, dense[name][0])
  assert report.get("dropped_tokens", 0) == 0


@pytest.mark.parametrize("method", ["dropless", "capacity"])
def test_outputs_are_not_computed_again_for_the_gradient_of_their_weights(execution, dense, method):
  """Under rematerialization; the gradients are those of the usual way."""
  spec, flops, gradients = SPECS["biased, clamped"], [], []
  for hidden in (False, True):
    experts = ExpertDispatch(method, capacity=float(X), hidden_gradient=hidden)
    gradients.append(run(spec, execution.replace(experts=experts), INPUT, PROBE)[0])
    layer = randomised(spec.build(ParamFactory(0, jnp.float32), E, execution.replace(experts=experts)))
    graph, state = nnx.split(layer)

    def loss(x, state, graph=graph):
      once = jax.checkpoint(lambda x: nnx.merge(graph, state, copy=True)(x)[0])
      return jnp.square(once(jnp.sin(x))).sum()

    flops.append(_flops(jax.make_jaxpr(jax.grad(loss))(INPUT, state).jaxpr))
  check(gradients[1], gradients[0])
  rows = X * B * S if method == "capacity" else 0  # a loop over tiles has no FLOPs of its own to count
  assert flops[0] - flops[1] >= 2 * rows * F * E
  assert flops[1] < flops[0]


def _flops(jaxpr):
  """Of the matmuls of a trace, each counted once."""
  own = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      own += 2 * eqn.outvars[0].aval.size * np.prod([eqn.invars[0].aval.shape[d] for d in contracted])
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        own += _flops(inner) if hasattr(inner, "eqns") else 0
  return own


@pytest.mark.mesh
@pytest.mark.parametrize(
  ("name", "way"),
  [
    pytest.param(name, way, marks=() if (name, way) in QUICK else pytest.mark.slow)
    for name in SPECS
    for way in ("dropless", "capacity", "dropless, megablox", "dropless, buffer", *ON_MESHES)
    if "merged" not in way or name == "biased, clamped"
  ],
)
def test_a_mesh_is_one_device(execution_on_mesh, dense, name, way):
  found, report = run(SPECS[name], execution_on_mesh.replace(experts=(WAYS | ON_MESHES)[way]), INPUT, PROBE)
  check(found, dense[name][0])
  assert report.get("dropped_tokens", 0) == 0


@pytest.mark.mesh
def test_experts_are_split_and_work_is_not_repeated(execution_on_mesh):
  """A device multiplies its half of the experts, and of each its half of the hidden width."""
  layer = SPECS["plain"].build(
    ParamFactory(0, jnp.float32), E, execution_on_mesh.replace(experts=ExpertDispatch("dense"))
  )
  graph, state = nnx.split(layer)
  text = jax.jit(lambda x, state: nnx.merge(graph, state)(x)[0]).lower(INPUT, state).as_text()
  products = [line for line in text.splitlines() if "dot_general" in line and "batching_dims" in line]
  assert len(products) == 3
  rows = B * S // 2  # of the two devices that hold other experts
  assert f"tensor<{X // 2}x{rows}x{F // 2}xf32>" in products[0]


@pytest.mark.mesh
def test_gradients_of_experts_are_summed_in_the_runs_number_format(execution_on_mesh):
  """Twice the bytes would go over the links otherwise."""
  half = execution_on_mesh.replace(dtype=jnp.bfloat16)
  graph, params, buffers = nnx.split(SPECS["plain"].build(ParamFactory(0, jnp.float32), E, half), nnx.Param, ...)

  def loss(params):
    return nnx.merge(graph, params, buffers, copy=True)(INPUT.astype(jnp.bfloat16))[0].sum()

  text = jax.jit(jax.grad(loss)).lower(params).as_text()
  sums = re.findall(r"all_reduce.*?-> tensor<(\d+x\d+x\d+x\w+)>", text, re.DOTALL)
  weights = [s for s in sums if s.startswith((f"{X // 2}x{E}x", f"{X // 2}x{F // 2}x"))]
  assert len(weights) == 3, sums
  assert all(s.endswith("bf16") for s in weights), weights


def by_hand(routing, factor):
  """Which (token, choice) pairs find room, one sequence and one token after another."""
  experts = np.asarray(routing.experts)
  room = int(np.ceil(S * experts.shape[2] / X * factor))
  kept = np.zeros(experts.shape, bool)
  for b in range(B):
    taken = np.zeros(X, int)
    for s in range(S):
      for k, expert in enumerate(experts[b, s]):
        kept[b, s, k] = taken[expert] < room
        taken[expert] += 1
  return kept


@pytest.mark.mesh
def test_dropped_tokens_are_counted_and_add_nothing(execution, execution_on_mesh):
  for where in (execution, execution_on_mesh):
    layer = randomised(SPECS["plain"].build(ParamFactory(0, jnp.float32), E, where))
    routing, _ = layer.router(INPUT)
    kept = by_hand(routing, 0.75)
    assert 0.1 < 1 - kept.mean() < 0.9
    experts = dataclasses.replace(execution.kernels.experts, method="dense")
    expected, _ = experts(layer.experts, INPUT, routing._replace(weights=routing.weights * kept), 0, X, X, False)
    layer.execution = where.replace(experts=ExpertDispatch("capacity", capacity=0.75))
    y, report = jax.jit(lambda x, layer=layer: layer(x))(INPUT)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert report["dropped_tokens"] == pytest.approx(1 - kept.mean())


@pytest.mark.parametrize("carrier", [None, RaggedAllToAll()], ids=["gathered", "sent"])
def test_a_bounded_buffer_drops_what_does_not_fit(execution_on_mesh, carrier):
  layer = randomised(SPECS["plain"].build(ParamFactory(0, jnp.float32), E, execution_on_mesh))
  layer.execution = execution_on_mesh.replace(experts=ExpertDispatch(buffer=0.5, carrier=carrier))
  y, report = jax.jit(lambda x: layer(x))(INPUT)
  assert report["dropped_tokens"] == pytest.approx(0.5), "both shards have room for half of an even share"
  assert jnp.isfinite(y).all()


@pytest.mark.mesh
def test_nothing_is_dropped_that_arrives_in_further_rounds(monkeypatch, execution, execution_on_mesh):
  """All tokens want the experts of one device, which has room for a quarter of them in a round."""
  spec = MoE(Router(X, 2, bias=True), F, bias=True)
  monkeypatch.setattr(expert_dispatch, "_ROOM", 0.5)
  monkeypatch.setattr(expert_dispatch, "_LEAST_ROOM", 0)

  def one_sided(layer):
    layer.router.bias.set_value(jnp.zeros(X).at[:2].set(100.0))

  sent, dense = ExpertDispatch(carrier=RaggedAllToAll()), ExpertDispatch("dense")
  found, _ = run(spec, execution_on_mesh.replace(experts=sent), INPUT, PROBE, one_sided)
  expected, report = run(spec, execution.replace(experts=dense), INPUT, PROBE, one_sided)
  assert report["expert_load"] == X / 2, "two experts have all"
  check(found, expected)


@pytest.mark.slow
def test_load_balance_loss(execution):
  torch = pytest.importorskip("torch")
  from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

  layer = randomised(
    MoE(dataclasses.replace(PLAIN, balance_weight=0.01), F).build(ParamFactory(0, jnp.float32), E, execution)
  )
  _, report = layer(INPUT)
  logits = torch.tensor(np.asarray(INPUT @ layer.router.logits.weight[...]).reshape(-1, X))
  expected = 0.01 * load_balancing_loss_func((logits,), X, PLAIN.per_token)
  assert report["load_balance_loss"] == pytest.approx(float(expected), rel=1e-5)
  load = np.bincount(np.asarray(layer.router(INPUT)[0].experts).ravel(), minlength=X)
  assert report["expert_load"] == pytest.approx(load.max() / load.mean())


def test_the_selection_bias_evens_the_load(execution):
  """It moves against the load by its rate, weights are those of the scores alone, and no gradient touches it."""
  router = Router(X, 2, "sigmoid", selection_bias=True, selection_bias_rate=0.05)
  layer = randomised(router.build(ParamFactory(0, jnp.float32), E, execution))
  layer.selection_bias.set_value(jnp.linspace(0, 2, X))
  scores = jax.nn.sigmoid(INPUT @ layer.logits.weight[...])

  def update():
    layer.tokens.set_value(jnp.zeros_like(layer.tokens[...]))
    found = layer(INPUT)
    layer.end_update()
    return found

  first, before = update()
  np.testing.assert_array_equal(
    np.sort(first.experts), np.sort(jax.lax.top_k(scores + jnp.linspace(0, 2, X), 2)[1]), "chosen with the bias"
  )
  chosen = jnp.take_along_axis(scores, first.experts, -1)
  np.testing.assert_allclose(first.weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)
  load = np.bincount(np.asarray(first.experts).ravel(), minlength=X)
  moved = layer.selection_bias[...] - jnp.linspace(0, 2, X)
  np.testing.assert_allclose(moved, 0.05 * np.sign(load.mean() - load), atol=1e-6)
  for _ in range(60):
    _, after = update()
  assert after["expert_load"] < 0.7 * before["expert_load"]


def test_random_routing_ignores_the_router(execution):
  layer = randomised(Router(X, 2).build(ParamFactory(0, jnp.float32), E, execution))
  layer.execution = execution.replace(experts=ExpertDispatch(random=True))
  x = jnp.broadcast_to(INPUT[:1, :1], (8, 64, E))  # all tokens alike
  routing, report = layer(x)
  assert report["expert_load"] < 1.5
  assert len(np.unique(routing.experts)) == X


def test_the_run_says_where_float32_is(execution):
  half = execution.replace(dtype=jnp.bfloat16)
  x = INPUT.astype(jnp.bfloat16)
  exact = Router(X, 2).build(ParamFactory(0, jnp.float32), E, execution).logits(x)
  for spec, experts, same in (
    (Router(X, 2), ExpertDispatch(), False),
    (Router(X, 2), ExpertDispatch(float32_logits=True), True),
    (Router(X, 2, float32=True), ExpertDispatch(), True),
  ):
    layer = spec.build(ParamFactory(0, jnp.float32), E, half.replace(experts=experts))
    assert bool((layer._logits(x) == exact).all()) is same
  layer = SPECS["plain"].build(ParamFactory(0, jnp.float32), E, half)
  routing, _ = layer.router(x)
  sums = [ExpertDispatch(float32_sum=f)(layer.experts, x, routing, 0, X, X, False)[0].dtype for f in (True, False)]
  assert sums == [jnp.float32, jnp.bfloat16]
