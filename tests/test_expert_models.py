"""Decoders with experts: keys become specs, losses of layers are minimised, meshes change nothing, LoRA works."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxtext import ConfigError
from maxtext.kernels.grouped_matmul import GroupedMatmul, Tiles
from maxtext.kernels.ragged_all_to_all import RaggedAllToAll
from maxtext.layers.expert_dispatch import ExpertDispatch
from maxtext.layers.experts import MoE
from maxtext.layers.matmul import Matmul
from maxtext.layers.mlp import MLP
from maxtext.layers.param_factory import Buffer, ParamFactory
from maxtext.layers.router import ExpertGroups, Router
from maxtext.mesh.devices import make_mesh
from maxtext.models.build import build_model
from maxtext.models.execution.execution import execution_config
from maxtext.models.execution.expert_dispatch import dispatch
from maxtext.models.mixture import mixture
from maxtext.models.model import Model
from maxtext.optim.optimizer import make_optimizer
from maxtext.optim.options import optimizer_options
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.state import initial_state
from maxtext.training.step import gradients, make_train_step
from tests.support import program, random_batch, tiny

EXPERTS = {
  "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24, "norm_topk_prob": True, "shared_experts": 1,
  "routed_score_func": "sigmoid", "routed_bias": True, "routed_bias_update_rate": 0.01,
  "load_balance_loss_weight": 0.05,
}  # fmt: skip
MESH = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2, "per_device_batch_size": 1}


def model_of(config, devices=1, **changes):
  """The tiny Llama with the configuration's mixture in place of its feed-forward layer."""
  spec = program(tiny()).model.spec
  block = dataclasses.replace(spec.groups[0].cycle[0], feed_forward=mixture(config))
  group = dataclasses.replace(spec.groups[0], cycle=(block,))
  execution = execution_config(config, make_mesh(config, jax.devices()[:devices]))
  return Model.of(dataclasses.replace(spec, groups=(group,)), execution.replace(**changes))


def train(model, steps=6):
  optimizer = optax.adam(3e-3)
  step = jax.jit(make_train_step(model, LanguageModeling(), optimizer, lambda step: 3e-3))
  shardings = {n: a.sharding for n, a in model.params.items()}, {n: a.sharding for n, a in model.buffers.items()}
  state = jax.jit(lambda: initial_state(model, optimizer, 0))()
  params, buffers = (
    jax.device_put(tree, where) for tree, where in zip((state.params, state.buffers), shardings, strict=True)
  )
  state, found = dataclasses.replace(state, params=params, buffers=buffers), []
  batch = random_batch(tiny(), rows=8)
  for _ in range(steps):
    state, metrics = step(state, batch)
    found.append({name: float(value) for name, value in metrics.items()})
  return found, state


@pytest.fixture(scope="module")
def one_device():
  return train(model_of(tiny(**EXPERTS)))


@pytest.mark.slow
def test_a_mixture_learns_and_its_bias_moves(one_device):
  found, state = one_device
  assert found[-1]["loss"] < found[0]["loss"] - 0.3
  bias = state.buffers["groups/0/layers/0/feed_forward/router/selection_bias"]
  assert bias.shape == (2, 4)
  assert float(jnp.abs(bias).max()) > 0.01
  np.testing.assert_allclose(bias / 0.01, np.round(bias / 0.01), atol=1e-3)
  assert all(1 <= step["expert_load"] <= 4 for step in found)


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize(
  ("changes", "part"),
  [
    ({}, (2, 2, 24, 12)),
    pytest.param({"scan_layers": False}, (2, 2, 24, 12), marks=pytest.mark.nightly),
    pytest.param({"shard_exp_on_fsdp": True}, (2, 1, 48, 12), marks=pytest.mark.nightly),
  ],
  ids=["scanned", "unrolled", "whole experts"],
)
def test_a_mesh_trains_like_one_device(one_device, changes, part):
  model = model_of(tiny(**EXPERTS, **MESH, **changes), devices=8)
  gate = model.params["groups/0/layers/0/feed_forward/experts/gate/weight"]
  assert gate.shape == (2, 4, 48, 24)
  assert gate.sharding.shard_shape(gate.shape) == part, "by layer, expert, width and hidden width"
  found, state = train(model)
  expected, other = one_device
  for name in ("loss", "load_balance_loss", "expert_load", "grad_norm"):
    np.testing.assert_allclose([f[name] for f in found], [f[name] for f in expected], rtol=1e-4, err_msg=name)
  for name, buffer in state.buffers.items():
    np.testing.assert_allclose(buffer, other.buffers[name], atol=1e-6)


def test_experts_that_cannot_be_dealt_out_are_refused():
  config = tiny(**EXPERTS | {"shard_exp_on_fsdp": True, "ici_fsdp_parallelism": 8, "per_device_batch_size": 1})
  with pytest.raises(ConfigError, match="shard_exp_on_fsdp=true splits the experts over 8 devices, which does not"):
    execution_config(config, make_mesh(config, jax.devices()))


@pytest.mark.slow
def test_losses_of_layers_are_minimised():
  """The weighted mean over layers joins the loss, also through accumulation, and its gradient reaches the router."""
  batch = random_batch(tiny(), rows=4)
  found = {}
  for weight, accumulation in ((0.0, 1), (0.5, 1), (0.5, 2)):
    model = model_of(tiny(**EXPERTS | {"load_balance_loss_weight": weight, "routed_bias_update_rate": 0.0}))
    params, buffers = jax.jit(model.init)(0)
    found[weight, accumulation] = jax.jit(
      lambda p, b, m=model, a=accumulation: gradients(m, LanguageModeling(), p, b, batch, accumulation=a)
    )(params, buffers)
  plain, weighted, halves = found.values()
  assert "load_balance_loss" not in plain.metrics
  own = float(weighted.metrics["load_balance_loss"])
  assert own > 0.5
  assert float(weighted.loss - plain.loss) == pytest.approx(own, rel=1e-4)
  router = "groups/0/layers/0/feed_forward/router/logits/weight"
  assert float(jnp.abs(weighted.grads[router] - plain.grads[router]).max()) > 1e-4
  assert float(halves.metrics["load_balance_loss"]) == pytest.approx(own, rel=0.1)


@pytest.mark.slow
def test_experts_can_be_kept_for_the_backward_pass():
  """remat_policy=custom with the experts' names changes what is kept and nothing else."""
  batch = random_batch(tiny(), rows=4)

  def run(**changes):
    model = model_of(tiny(**EXPERTS, **changes))
    params, buffers = jax.jit(model.init)(0)
    lowered = jax.jit(lambda p, b: gradients(model, LanguageModeling(), p, b, batch).grads).lower(params, buffers)
    return lowered.as_text().count("dot_general"), lowered.compile()(params, buffers)

  names = dict.fromkeys(("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"), "device")
  (less, kept), (more, again) = run(remat_policy="custom", **names), run()
  assert less < more, "products that were kept are not computed again"
  for name, grad in kept.items():
    np.testing.assert_allclose(grad, again[name], atol=1e-6, err_msg=name)


def test_keys_become_a_mixture():
  keys = {
    "num_experts": 16, "num_experts_per_tok": 3, "base_moe_mlp_dim": 40, "norm_topk_prob": True, "shared_experts": 2,
    "routed_score_func": "sigmoid", "routed_bias": True, "routed_bias_update_rate": 0.25, "routed_scaling_factor": 2.5,
    "n_routing_groups": 4, "topk_routing_group": 2, "mlp_bias": True, "mlp_activations_limit": 7.0,
    "load_balance_loss_weight": 0.5,
  }  # fmt: skip
  router = Router(
    16,
    3,
    "sigmoid",
    True,
    2.5,
    ExpertGroups(4, 2, 2),
    selection_bias=True,
    selection_bias_rate=0.25,
    balance_weight=0.5,
  )
  assert mixture(tiny(**keys)) == MoE(router, 40, "silu", 7.0, bias=True, shared=MLP(80))
  assert mixture(tiny(num_experts=2)) == MoE(Router(2, 1, normalize=False), 80)
  grouped = tiny(num_experts=4, n_routing_groups=2, topk_routing_group=1)
  assert mixture(grouped).router.groups == ExpertGroups(2, 1, 1)


@pytest.mark.parametrize("keys", [{"quantization": "int8"}, {"lora_rank": 4}])
def test_merged_projections_are_plain_weights(keys):
  """An implementation of the matmul has to see each of the two."""
  rope = {"rope_type": "default", "original_max_position_embeddings": 4096, "rope_factor": 40}
  with pytest.raises(ConfigError, match="merge_gating_gmm=true multiplies plain weights: leave it out with"):
    program(tiny(decoder_block="mixtral", num_experts=4, merge_gating_gmm=True, **rope, **keys))


def test_keys_become_a_dispatch():
  mesh = program(tiny()).model.execution.sharding.mesh

  def of(**keys):
    return dispatch(tiny(num_experts=4, **keys), mesh)

  assert of().method == "dropless"
  assert of().buffer is None
  assert of(ragged_buffer_factor=1.5).buffer == 1.5
  assert of(sparse_matmul=False).method == "dense"
  dropping = of(sparse_matmul=False, capacity_factor=1.25)
  assert (dropping.method, dropping.capacity) == ("capacity", 1.25)
  assert of().wi.kernel == "tiled"
  assert of(megablox=False).wo.kernel == "ragged_dot"
  assert of(float32_weight_sum=False) == dataclasses.replace(of(), float32_sum=False)
  assert of(float32_gate_logits=True) == dataclasses.replace(of(), float32_logits=True)
  assert of(use_random_routing=True) == dataclasses.replace(of(), random=True)
  ring = {"ici_expert_parallelism": 2, "use_ring_of_experts": True}
  assert of(**ring) == dataclasses.replace(of(), carrier=None)
  assert of(merge_gating_gmm=True) == dataclasses.replace(of(), merge_gate_up=True)
  assert of().carrier == RaggedAllToAll("reference")
  assert of(use_custom_sort_vjp=False) == dataclasses.replace(of(), gather_gradients=False)
  sizes = dict(zip(("batch_seq", "embed_dim", "mlp_dim"), (128, 256, 384), strict=True))
  tiles = {f"{w}_tile_{p}_{d}": s for w in ("wi", "wo") for p in ("fwd", "dlhs", "drhs") for d, s in sizes.items()}
  into, out = Tiles(128, 256, 384), Tiles(128, 384, 256)
  tiled = of(**tiles)
  assert (tiled.wi.forward, tiled.wi.by_rows, tiled.wi.by_weights) == (into, out, into)
  assert (tiled.wo.forward, tiled.wo.by_rows, tiled.wo.by_weights) == (out, into, out)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"num_experts": 4}, "num_experts=4 has no effect on decoder_block=llama2, a family without experts"),
    ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_experts=4"),
    ({"num_experts": 4, "routed_score_func": "tanh"}, "routed_score_func=tanh must be softmax or sigmoid"),
    ({"num_experts": 4, "capacity_factor": 0}, "capacity_factor=0.0 must be above 0, or -1"),
    ({"num_experts": 4, "capacity_factor": 1}, "write sparse_matmul=false"),
    ({"num_experts": 4, "megablox": False, "sparse_matmul": False}, "write sparse_matmul=true"),
    ({"num_experts": 4, "megablox": False, "wi_tile_fwd_mlp_dim": 128}, "has no effect without megablox=true"),
    ({"num_experts": 6, "n_routing_groups": 4}, "n_routing_groups=4 must divide num_experts=6"),
    ({"num_experts": 8, "n_routing_groups": 4}, "topk_routing_group=-1 must be from 1 to n_routing_groups=4"),
    (
      {"num_experts": 8, "num_experts_per_tok": 3, "n_routing_groups": 4, "topk_routing_group": 1},
      "num_experts_per_tok=3 is more than the experts of topk_routing_group=1",
    ),
    ({"norm_topk_prob": True}, "norm_topk_prob=True has no effect without experts"),
    ({"num_experts": 4, "use_ring_of_experts": True}, "has no effect without expert parallelism"),
    ({"num_experts": 4, "topk_routing_group": 1}, "has no effect without n_routing_groups"),
    ({"num_experts": 4, "routed_bias_update_rate": 0.1}, "has no effect without routed_bias=true"),
  ],
)
def test_mistakes_are_named(keys, message):
  mesh = program(tiny()).model.execution.sharding.mesh
  with pytest.raises(ConfigError) as error:
    build_model(tiny(**keys, strict=True), mesh)
  assert message in str(error.value)


@dataclasses.dataclass(frozen=True)
class Lora(Matmul):
  """y = x W + x A B by the matmul that comes next; it counts its calls."""

  name: str = "lora"

  def variables(self, make, site, inputs, outputs):
    down = make("down", (*inputs.values(), 2), (*inputs, None), std=0.3)
    up = make("up", (2, *outputs.values()), (None, *outputs), std=0.3)
    calls = make("calls", (1,), (None,), kind=Buffer, dtype=jnp.int32, combine="equal")
    return {"down": down, "up": up, "calls": calls}

  def __call__(self, call, own, next_, x, weight):
    own["calls"].set_value(own["calls"][...] + 1)
    into, out_of = call.low_rank()
    return next_(call, x, weight) + next_(out_of, next_(into, x, own["down"][...]), own["up"][...])


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_implementations_of_the_matmul_reach_experts(devices):
  config = tiny(**(MESH if devices == 8 else {}))
  plain = program(config, devices).model.execution
  make, spec = ParamFactory(0, jnp.float32), MoE(Router(4, 2), 24)
  x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6, 48)), jnp.float32)
  for experts in (ExpertDispatch(), ExpertDispatch("dense"), ExpertDispatch(wi=GroupedMatmul("ragged_dot"))):
    execution = plain.replace(experts=experts)
    adapted = spec.build(make, 48, execution.replace(matmul=(Lora(),)))
    graph, state = nnx.split(adapted)

    @jax.jit
    def run(x, state, graph=graph):
      layer = nnx.merge(graph, state)
      return layer(x)[0], nnx.state(layer, Buffer)

    y, buffers = run(x, state)
    merged = spec.build(make, 48, execution)
    for name in ("gate", "up", "down"):
      own = getattr(adapted.experts, name)
      lora = own.matmul["lora"]
      assert lora["down"][...].shape == (4, own.weight[...].shape[1], 2), "each expert has its own"
      getattr(merged.experts, name).weight.set_value(own.weight[...] + lora["down"][...] @ lora["up"][...])
    merged.router.logits.weight.set_value(
      merged.router.logits.weight[...]
      + adapted.router.logits.matmul["lora"]["down"][...] @ adapted.router.logits.matmul["lora"]["up"][...]
    )
    np.testing.assert_allclose(y, jax.jit(lambda x, m=merged: m(x)[0])(x), atol=2e-4)
    assert all((calls == 1).all() for calls in jax.tree.leaves(buffers))
    assert len(jax.tree.leaves(buffers)) == 4


BIAS = "groups/0/layers/0/feed_forward/router/selection_bias"


def reshard(model, batch, accumulation=1, **keys):
  """The bias [R,X] after one update, in steps of its rate, and the figures."""
  optimizer = make_optimizer(optimizer_options(tiny(**keys)), model.matrices)
  step = make_train_step(model, LanguageModeling(), optimizer, lambda step: 0.0, accumulation=accumulation)
  state = jax.jit(lambda: initial_state(model, optimizer, 0))()
  after, metrics = jax.jit(step)(state, batch)
  assert after.buffers.keys() == state.buffers.keys(), "what is measured over an update is not kept"
  return np.asarray(after.buffers[BIAS]) / 0.01, metrics


def tokens_of(model, batch):
  """The tokens of each expert [R,X] at the first parameters."""

  @jax.jit
  def run():
    decoder = model.bind({n: a for part in model.init(0) for n, a in part.items()})
    decoder.hidden(batch.inputs, batch.positions, batch.segments)
    return model.buffers_of(decoder)[BIAS.replace("selection_bias", "tokens")]

  return np.asarray(run())


@pytest.mark.slow
def test_the_bias_moves_once_per_update():
  """By the rule written out, whatever number of micro-batches; and not in an update that is left out."""
  model, batch = model_of(tiny(**EXPERTS)), random_batch(tiny(), rows=8)
  tokens = tokens_of(model, batch)
  assert (tokens.sum(1) == 8 * 32 * 2).all()
  expected = np.sign(tokens.mean(1, keepdims=True) - tokens)
  assert expected.any()
  for accumulation in (1, 4):
    np.testing.assert_allclose(reshard(model, batch, accumulation)[0], expected, atol=1e-5)
  broken = dataclasses.replace(batch, weights=np.full_like(batch.weights, np.nan))
  left_out, metrics = reshard(model, broken, skip_step_on_spikes=True)
  assert int(metrics["skipped_steps"]) == 1
  assert not left_out.any()


@pytest.mark.slow
def test_padding_is_no_load():
  """Rows and ends of rows that hold padding alone change neither bias nor figures, whatever tokens they hold."""
  model, batch = model_of(tiny(**EXPERTS)), random_batch(tiny(), rows=4)
  segments = np.ones_like(batch.inputs)
  segments[2, 20:] = 0
  short = dataclasses.replace(batch, segments=segments, weights=batch.weights * (segments > 0))
  tokens = tokens_of(model, short)
  assert (tokens.sum(1) == (4 * 32 - 12) * 2).all()
  bias, metrics = reshard(model, short)
  np.testing.assert_allclose(bias, np.sign(tokens.mean(1, keepdims=True) - tokens), atol=1e-5)
  padding = dataclasses.replace(jax.tree.map(np.zeros_like, short), inputs=np.full_like(short.inputs, 7))
  longer = jax.tree.map(lambda a, b: np.concatenate([a, b]), short, padding)
  again, figures = reshard(model, longer)
  np.testing.assert_array_equal(again, bias)
  for name in ("loss", "load_balance_loss", "expert_load"):
    np.testing.assert_allclose(figures[name], metrics[name], rtol=1e-5, err_msg=name)
