"""The matmul seam: it sees every matmul of every family once, and what stands on it works wherever a model runs."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext import load_config
from maxtext.kernels.attention import AttentionKernel
from maxtext.layers.attention import GQA
from maxtext.layers.context import Context
from maxtext.layers.convolution import CausalConvolution
from maxtext.layers.delta_net import DeltaNet
from maxtext.layers.matmul import Matmul, each_pass
from maxtext.layers.mla import MLA
from maxtext.layers.param_factory import Buffer, ParamFactory, UpdateStatistic
from maxtext.layers.weight_format import StoredWeight
from maxtext.models.model import Model
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.step import gradients
from tests.support import program, random_batch, tiny

CASES = json.loads((Path(__file__).parent / "data" / "tiny_models.json").read_text())
RUN = {"max_target_length": 24, "per_device_batch_size": 1, "dataset_type": "synthetic", "jax_cache_dir": ""}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}


def model_of(case, **changes):
  return program(load_config(**(CASES[case]["keys"] | RUN | {"dtype": "float32"} | changes))).model


def changed(model, **changes):
  return Model.of(model.spec, model.execution.replace(**changes))


def forward(model, params, length=24, **kwargs):
  tokens = jnp.zeros((1, length), jnp.int32)
  decoder = model.bind(params)
  hidden, _, cache = decoder.hidden(tokens, jnp.arange(length)[None], **kwargs)
  return decoder.logits(hidden), cache


def abstract(model):
  return {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in (model.params | model.buffers).items()}


def values(model, seed=0):
  return {n: a for part in jax.jit(model.init)(seed) for n, a in part.items()}


@dataclass(frozen=True)
class Everything(Matmul):
  """Wants attention's matmuls too, notes every call and computes nothing."""

  name: str = "everything"
  calls: list = field(default_factory=list, compare=False)

  def wants(self, site):
    return True

  def __call__(self, call, own, next_, x, weight):
    self.calls.append((call.site.path, call.site.role))
    out = jax.eval_shape(next_, call, x, weight)
    return jnp.zeros(out.shape, out.dtype)


def expected_sites(model):
  """From the names of weights and the kinds of mixers."""
  found = []
  for name in (*model.params, *model.buffers):
    if not name.endswith("/weight"):
      continue
    path, role = name.removesuffix("/weight"), "linear"
    if "expert" in model.logical_axes[name]:
      role = "experts"
    elif path.endswith("/router/logits"):
      role = "router"
    elif path.endswith("_conv"):
      role = "convolution"
    elif path == "head":
      role = "head"
    found.append((path, role))
  if model.spec.tied:
    found.append(("head", "head"))
  for g, group in enumerate(model.spec.groups):
    for i, block in enumerate(group.cycle):
      path = f"groups/{g}/layers/{i}/mixer"
      if isinstance(block.mixer, GQA | MLA):
        found += [(path, "attention_scores"), (path, "attention_values")]
      if isinstance(block.mixer, MLA) and block.mixer.indexer is not None:
        found.append((f"{path}/indexer", "indexer_scores"))
  return found


# Contractions that are no matmul of the seam: how often each stands in the forward pass of a layer of that kind.
ELSEWHERE = {
  "delta rule, in chunks": 6,
  "sum over the indexer's heads": 1,
  "embedding by one-hot rows": 1,
}


def outside_the_seam(model):
  blocks = [block for group in model.spec.groups for block in group.cycle]
  delta = sum(isinstance(block.mixer, DeltaNet) for block in blocks)
  indexed = sum(isinstance(block.mixer, MLA) and block.mixer.indexer is not None for block in blocks)
  times = {
    "delta rule, in chunks": delta,
    "sum over the indexer's heads": indexed,
    "embedding by one-hot rows": int(model.execution.kernels.one_hot_embedding),
  }
  return sum(times[name] * count for name, count in ELSEWHERE.items())


def contractions(jaxpr):
  """Equations that multiply and sum, in it and in all that it calls."""
  names = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
  count = 0
  for equation in jaxpr.eqns:
    count += equation.primitive.name in names
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
      inner = getattr(inner, "jaxpr", inner)
      count += contractions(inner) if hasattr(inner, "eqns") else 0
  return count


@pytest.mark.parametrize("case", CASES)
def test_every_matmul_of_a_family_is_a_site_once(case):
  seam = Everything()
  model = changed(model_of(case), matmul=(seam,))
  traced = jax.make_jaxpr(lambda params: forward(model, params)[0])(abstract(model))
  assert Counter(seam.calls) == Counter(expected_sites(model))
  assert contractions(traced.jaxpr) == outside_the_seam(model), "a matmul does not pass through the seam"


def test_the_count_of_contractions_sees_them():
  model = model_of("deepseek3")
  traced = jax.make_jaxpr(lambda params: forward(model, params)[0])(abstract(model))
  dense = sum(role not in ("experts", "convolution") for _, role in expected_sites(model))
  assert contractions(traced.jaxpr) >= dense


@pytest.mark.parametrize("case", ["llama", "deepseek3", "qwen3_next"])
def test_steps_over_a_cache_pass_through_the_seam(case):
  seam = Everything()
  model = changed(model_of(case, **({"mla_naive_kvcache": False} if case == "deepseek3" else {})), matmul=(seam,))
  params = abstract(model)
  cache = jax.eval_shape(lambda p: model.bind(p).init_cache(1, 32), params)
  traced = jax.make_jaxpr(lambda p, c: forward(model, p, 1, cache=c, end=jnp.asarray(3))[0])(params, cache)
  expected = Counter(expected_sites(model))
  for path, role in [s for s in expected if s[0].endswith("mixer/kv")]:  # absorbed into queries and outputs
    expected -= Counter([(path, role)])
    expected += Counter([(path, "mla_absorb_key"), (path, "mla_absorb_value")])
  assert Counter(seam.calls) == expected
  recurrent = sum(isinstance(b.mixer, DeltaNet) for group in model.spec.groups for b in group.cycle) * 2
  assert contractions(traced.jaxpr) == recurrent


KERNELS = {
  "dot_product": {"attention": "dot_product"},
  "chunked": {"attention": "chunked"},
  "gathered": {"ici_context_parallelism": 4, "ici_fsdp_parallelism": 2, "context_parallel_strategy": "all_gather"},
  "ring": {"ici_context_parallelism": 4, "ici_fsdp_parallelism": 2, "context_parallel_strategy": "ring"},
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_of_attention_call_the_seam(kernel):
  keys = KERNELS[kernel]
  seam, parallel = Everything(), "ici_fsdp_parallelism" in keys
  config = tiny(per_device_batch_size=1, **keys)
  model = changed(program(config, 8 if parallel else 1).model, matmul=(seam,))
  batch = random_batch(config, rows=8)
  traced = jax.make_jaxpr(lambda p: model.bind(p).hidden(batch.inputs, batch.positions)[0])(model.params)
  sites = [s for s in expected_sites(model) if s[1] != "head"]
  assert Counter(seam.calls) == Counter(sites)
  assert contractions(traced.jaxpr) == 0


def test_a_step_that_reads_blocks_of_the_cache_calls_the_seam():
  seam = Everything()
  model = changed(program(tiny()).model, matmul=(seam,), block=8)
  params = abstract(model)
  cache = jax.eval_shape(lambda p: model.bind(p).init_cache(1, 32), params)
  traced = jax.make_jaxpr(lambda p, c: forward(model, p, 1, cache=c, end=jnp.asarray(3))[0])(params, cache)
  assert Counter(seam.calls) == Counter(expected_sites(model))
  assert contractions(traced.jaxpr) == 0


@pytest.mark.parametrize(
  "changes",
  [
    {"attention": AttentionKernel("splash")},
    {"attention": AttentionKernel("cudnn")},
    {"decode_attention": True},
  ],
  ids=str,
)
def test_a_fused_kernel_is_refused_to_who_wants_its_matmuls(changes):
  model = program(tiny()).model
  with pytest.raises(ValueError, match="'everything' wants the matmuls of attention at 'groups/0/layers/0/mixer'"):
    changed(model, matmul=(Everything(),), **changes)
  changed(model, matmul=(Matmul(),), **changes)


@pytest.mark.parametrize("case", ["llama", "deepseek3"])
def test_the_plain_implementation_changes_nothing(case):
  @dataclass(frozen=True)
  class Plain(Matmul):
    def wants(self, site):
      return True

  model = model_of(case)
  # With any implementation the router's gradient is of the experts' outputs; here it is without one, too.
  model = changed(model, experts=replace(model.execution.kernels.experts, hidden_gradient=False))
  lowered = [
    jax.jit(lambda params, m=m: forward(m, params)[0]).lower(abstract(m)).as_text()
    for m in (model, changed(model, matmul=(Plain(),)))
  ]
  assert lowered[0] == lowered[1]


@dataclass(frozen=True)
class Lora(Matmul):
  """x W + x A B; where a weight is used in another way, W + A B is."""

  name: str = "lora"
  rank: int = 2

  def wants(self, site):
    return site.role in ("linear", "experts", "mla_absorb_key", "mla_absorb_value")

  def variables(self, make, site, inputs, outputs):
    down = make("down", (*inputs.values(), self.rank), (*inputs, None), std=0.3)
    return {"down": down, "up": make("up", (self.rank, *outputs.values()), (None, *outputs), std=0.3)}

  def __call__(self, call, own, next_, x, weight):
    down, up = own["down"][...], own["up"][...]
    if call.part is not None:
      return next_(call, x, weight + jnp.tensordot(down, up, 1))
    into, out_of = call.low_rank()
    return next_(call, x, weight) + next_(out_of, next_(into, x, down), up)


def stepped(model, params):
  """Logits of a prefix and of one token after the other."""
  cache = jax.jit(lambda p: model.bind(p).init_cache(1, 32))(params)
  tokens, positions = jnp.arange(8)[None] * 5, jnp.arange(8)[None]

  @jax.jit
  def run(params, tokens, positions, cache):
    decoder = model.bind(params)
    hidden, _, cache = decoder.hidden(tokens, positions, cache=cache)
    return decoder.logits(hidden), cache

  found = []
  for start, end in ((0, 6), (6, 7), (7, 8)):
    logits, cache = run(params, tokens[:, start:end], positions[:, start:end], cache)
    found.append(logits)
  return jnp.concatenate(found, axis=1)


@pytest.mark.slow
def test_absorbed_matmuls_have_what_stands_beside_their_weight():
  model = changed(model_of("deepseek3", mla_naive_kvcache=False), matmul=(Lora(),))
  params = values(model)

  @jax.jit
  def logits(params):
    decoder = model.bind(params)
    return decoder.logits(decoder.hidden(jnp.arange(8)[None] * 5, jnp.arange(8)[None])[0])

  whole = logits(params)
  np.testing.assert_allclose(stepped(model, params), whole, atol=2e-5 * float(jnp.abs(whole).max()))
  without = {n: jnp.zeros_like(a) if "/kv/matmul/" in n else a for n, a in params.items()}
  assert float(jnp.abs(stepped(model, without) - whole).max()) > 1e-3, "the adapter of kv must be felt"


@dataclass(frozen=True)
class Passes(Matmul):
  """Notes every pass; scales the gradients of weights, to be felt."""

  name: str = "passes"
  factor: float = 1.0
  calls: list = field(default_factory=list, compare=False)

  def __call__(self, call, own, next_, x, weight):
    return each_pass(self._operation, call, next_, x, weight)

  def _operation(self, call, next_, first, second):
    self.calls.append((call.site.path, call.site.role, call.site.pass_))
    out = next_(call, first, second)
    return out * self.factor if call.site.pass_ == "weight_gradient" else out


def loss_gradients(model, config, **kwargs):
  params, buffers = jax.jit(model.init)(0)
  batch = random_batch(config)

  @jax.jit
  def run(params, buffers, batch):
    return gradients(model, LanguageModeling(), params, buffers, batch, **kwargs)

  return run(params, buffers, batch)


def test_a_convolution_has_three_passes():
  passes, rng = Passes(factor=2.0), np.random.default_rng(0)
  execution = program(tiny()).model.execution
  x, seen = (jnp.asarray(rng.standard_normal((2, 9, 2, 4)), jnp.float32) for _ in range(2))
  positions = jnp.broadcast_to(jnp.concatenate([jnp.arange(5), jnp.arange(4)]), (2, 9))
  context = Context.of(positions, jnp.broadcast_to(jnp.repeat(jnp.arange(2), jnp.array([5, 4])), (2, 9)), (), "float32")

  def grads(execution):
    graph, state = nnx.split(
      CausalConvolution(ParamFactory(0, jnp.float32).scope("conv"), 3, {"heads": 2, "head_dim": 4}, execution, step=2)
    )
    return jax.grad(lambda x, s: (nnx.merge(graph, s)(x, context, None)[0] * seen).sum(), (0, 1))(x, state)

  (by_x, by_weight), (x_found, weight_found) = grads(execution), grads(execution.replace(matmul=(passes,)))
  np.testing.assert_allclose(x_found, by_x, atol=1e-6)
  np.testing.assert_allclose(weight_found["weight"][...], 2 * by_weight["weight"][...], atol=1e-6)
  assert [c[1:] for c in passes.calls] == [
    ("convolution", pass_) for pass_ in ("forward", "input_gradient", "weight_gradient")
  ]


def test_own_gradients_are_refused_where_shardings_are_types():
  config = tiny(shard_mode="explicit", ici_fsdp_parallelism=4, ici_tensor_parallelism=2, per_device_batch_size=1)
  p = program(config, 8)
  run = LanguageModeling()
  for one in (Lora(), Everything()):
    model = changed(p.model, matmul=(one,))
    jax.eval_shape(partial(gradients, model, run), model.params, model.buffers, p.batch)
  model = changed(p.model, matmul=(Passes(),))
  with pytest.raises(ValueError, match="needs shard_mode=auto"):
    jax.eval_shape(partial(gradients, model, run), model.params, model.buffers, p.batch)


@pytest.mark.slow
def test_an_implementation_does_all_three_passes():
  case = "mixtral"
  config = load_config(**(CASES[case]["keys"] | RUN | {"dtype": "float32", "max_target_length": 8}))
  plain = program(config).model
  passes = Passes(factor=2.0)
  model = changed(plain, matmul=(passes,))
  expected, found = loss_gradients(plain, config).grads, loss_gradients(model, config).grads
  sites = {s for s in expected_sites(plain) if not s[1].startswith("attention")}
  assert {(p, r, w) for p, r, w in passes.calls} == {
    (*site, pass_) for site in sites for pass_ in ("forward", "input_gradient", "weight_gradient")
  }
  weights = {path + "/weight" for path, _ in sites}
  for name, grad in found.items():
    factor = 2.0 if name in weights else 1.0
    scale = float(jnp.abs(expected[name]).max()) + 1e-8
    np.testing.assert_allclose(grad / scale, factor * expected[name] / scale, atol=1e-4, err_msg=name)


@dataclass(frozen=True)
class Amax(Matmul):
  """The largest input of every matmul over an update, and those of the last updates."""

  name: str = "amax"

  def variables(self, make, site, inputs, outputs):
    now = make("now", (), (), kind=UpdateStatistic, dtype=jnp.float32, combine="max")
    calls = make("calls", (), (), kind=UpdateStatistic, dtype=jnp.float32, combine="sum")
    history = make("history", (3,), (None,), kind=Buffer, dtype=jnp.float32)
    return {"now": now, "calls": calls, "history": history}

  def __call__(self, call, own, next_, x, weight):
    size = jnp.abs(jax.lax.stop_gradient(x)).astype(jnp.float32)
    if call.group_sizes is not None:  # of each expert's own rows
      expert = jnp.searchsorted(jnp.cumsum(call.group_sizes), jnp.arange(x.shape[0]), side="right")
      largest = jnp.zeros(call.group_sizes.shape).at[expert].max(size.max(-1), mode="drop")
      rows = call.group_sizes.astype(jnp.float32)
    else:
      largest, rows = size.max(), float(np.prod(x.shape[:-1]))
    own["now"].set_value(jnp.maximum(own["now"][...], largest))
    if call.site.role in ("experts", "router"):
      own["calls"].set_value(own["calls"][...] + rows)
    return next_(call, x, weight)

  def end_update(self, site, own, weight):
    past = own["history"][...]
    found = jnp.stack([own["now"][...], own["calls"][...]], axis=-1)
    own["history"].set_value(jnp.concatenate([found, past[..., :-2]], axis=-1))


def histories(devices=1, accumulation=1, **keys):
  config = tiny(**EXPERTS | keys)
  model = changed(program(config, devices).model, matmul=(Amax(),))
  shardings = jax.tree.map(lambda a: a.sharding, (model.params, model.buffers))
  params, buffers = jax.jit(model.init, out_shardings=shardings)(0)

  @jax.jit
  def update(params, buffers, batch):
    found = gradients(model, LanguageModeling(), params, buffers, batch, accumulation=accumulation)
    return model.end_update(params, found.buffers)

  after = update(params, buffers, random_batch(config, rows=8))
  return {n: np.asarray(a) for n, a in after.items() if n.endswith("history")}


@pytest.fixture(scope="module")
def one_device():
  return histories()


WAYS = {
  "unrolled": {"scan_layers": False},
  "less remat": {"remat_policy": "minimal"},
  "accumulation": {"accumulation": 4},
  "mesh": {
    "devices": 8, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2,
    "per_device_batch_size": 1,
  },
  "pipeline": {
    "devices": 4, "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "per_device_batch_size": 2,
    "num_pipeline_microbatches": 4,
  },
}  # fmt: skip


@pytest.mark.parametrize("way", [pytest.param(w, marks=() if w == "accumulation" else pytest.mark.slow) for w in WAYS])
def test_buffers_are_the_same_wherever_a_model_runs(way, one_device):
  found = histories(**WAYS[way])
  assert found.keys() == one_device.keys()
  assert len(found) == 9, "attention, router, experts and head"
  for name, history in found.items():
    assert (history[..., 0] > 0).all(), name
    np.testing.assert_allclose(history, one_device[name], rtol=1e-4, err_msg=name)
  rows = one_device["groups/0/layers/0/feed_forward/experts/up/matmul/amax/history"][..., 1]
  np.testing.assert_array_equal(rows.sum(-1), 8 * 32 * 2, err_msg="each row counts once for each of two experts")


@dataclass(frozen=True)
class Undeclared(Matmul):
  """Assigns to a buffer that does not say how it is combined."""

  def variables(self, make, site, inputs, outputs):
    return {"calls": make("calls", (), (), kind=Buffer, dtype=jnp.int32)}

  def __call__(self, call, own, next_, x, weight):
    if call.site.role == "experts":
      own["calls"].set_value(own["calls"][...] + 1)
    return next_(call, x, weight)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_buffer_that_is_assigned_to_says_how_it_is_combined(devices):
  keys = WAYS["mesh"] if devices == 8 else {}
  config = tiny(**EXPERTS | {key: value for key, value in keys.items() if key != "devices"})
  model = changed(program(config, devices).model, matmul=(Undeclared(),))
  with pytest.raises(ValueError, match="calls is assigned to in the forward pass, but does not say how"):
    jax.eval_shape(lambda params: forward(model, params, 32)[0], model.params | model.buffers)


@dataclass(frozen=True)
class Int8:
  """Eight bits and a scale per output channel, but for routers and the head."""

  per_item = 1

  def variables(self, make, site, inputs, outputs, std):
    if site.role in ("router", "head"):
      shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
      return {"weight": make("weight", shape, axes, std=std, contracted=len(inputs))}
    shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
    whole = make("weight", shape, axes, std=40, dtype=jnp.int8, contracted=len(inputs))
    scale = make("weight_scale", tuple(outputs.values()), tuple(outputs), fill=std / 40, dtype=jnp.float32)
    return {"weight": whole, "weight_scale": scale}

  def load(self, site, arrays):
    return StoredWeight(self, arrays) if "weight_scale" in arrays else arrays["weight"]

  def dequantize(self, arrays, dtype):
    """Of one layer of one expert; the inputs come first."""
    whole, scale = arrays["weight"], arrays["weight_scale"]
    return whole.astype(dtype) * scale.astype(dtype)

  def matmul(self, call, next_, x, arrays):
    """Scales the outputs, or the inputs where the weight's outputs are summed over."""
    scale = arrays["weight_scale"].astype(call.dtype)
    if call.part is not None:
      scale = scale[..., slice(*call.part)]
    _, weight, result = call.terms
    if call.group_sizes is not None:
      rows = jnp.searchsorted(jnp.cumsum(call.group_sizes)[:-1], jnp.arange(x.shape[0]), side="right")
      return next_(call, x, arrays["weight"]) * scale[rows]
    if call.site.role == "experts":
      return next_(call, x, arrays["weight"]) * scale[:, None]
    if weight[-1] in result:
      return next_(call, x, arrays["weight"]) * scale
    return next_(call, x * scale, arrays["weight"])


def dequantized(model, params):
  """The same values as plain weights."""
  found = {}
  for name, array in params.items():
    if f"{name}_scale" in params:
      one = partial(model.execution.weight_format.dequantize, dtype=jnp.float32)
      for _ in range(model.contracted[name][0]):  # layers, experts
        one = jax.vmap(one)
      array = one({"weight": array, "weight_scale": params[f"{name}_scale"]})
    if not name.endswith("/weight_scale"):
      found[name] = array
  return found


@pytest.mark.parametrize("case", [pytest.param("mixtral", marks=pytest.mark.slow), "deepseek3"])
def test_a_model_runs_from_weights_in_eight_bits(case):
  plain = model_of(case, **({"mla_naive_kvcache": False} if case == "deepseek3" else {}))
  model = changed(plain, weight_format=Int8())
  params = values(model)
  weights = [n for n in plain.params if n.endswith("/weight") and "router" not in n and n != "head/weight"]
  for name in weights:
    whole, scale = model.params[name], model.params[f"{name}_scale"]
    assert (whole.dtype, scale.dtype) == (jnp.int8, jnp.float32)
    assert whole.shape == plain.params[name].shape
    assert whole.sharding == plain.params[name].sharding
    assert params[name].std() > 30, "initial values fill the range"
  assert model.params.keys() - plain.params.keys() == {f"{n}_scale" for n in weights}
  expected = stepped(plain, dequantized(model, params))
  np.testing.assert_allclose(stepped(model, params), expected, atol=2e-5 * float(jnp.abs(expected).max()))
  lowered = jax.jit(lambda p: forward(model, p)[0]).lower(abstract(model)).as_text()
  arguments = lowered[lowered.index("@main(") : lowered.index(") -> ", lowered.index("@main("))]
  assert arguments.count("xi8>") == len(weights)
  floats = {s.shape for n, s in model.params.items() if s.dtype == jnp.float32}
  for name in weights:
    shape = model.params[name].shape
    assert shape in floats or f"tensor<{'x'.join(map(str, shape))}xf32>" not in arguments


@pytest.mark.slow
@pytest.mark.mesh
def test_weights_in_eight_bits_are_split_like_plain_ones():
  """On a mesh, too, experts compute from what is stored."""
  keys = {key: value for key, value in WAYS["mesh"].items() if key != "devices"}
  config = tiny(**EXPERTS | keys)
  plain = program(config, 8).model
  model = changed(plain, weight_format=Int8())
  gate = "groups/0/layers/0/feed_forward/experts/gate/weight"
  assert any(model.params[gate].sharding.spec)
  assert model.params[gate].sharding == plain.params[gate].sharding
  whole, scale = model.params[gate].sharding.spec, model.params[f"{gate}_scale"].sharding.spec
  assert (*whole[:2], *whole[3:]) == (*scale, *(None,) * (3 - len(scale))), "layers, experts and outputs"
  alone = changed(program(tiny(**EXPERTS)).model, weight_format=Int8())
  batch = random_batch(config, rows=8)

  def logits(model):
    shardings = jax.tree.map(lambda a: a.sharding, (model.params, model.buffers))
    params, _ = jax.jit(model.init, out_shardings=shardings)(0)
    assert params[gate].dtype == jnp.int8

    @jax.jit
    def run(params):
      decoder = model.bind(params)
      return decoder.logits(decoder.hidden(batch.inputs, batch.positions)[0])

    return np.asarray(run(params))

  expected = logits(alone)
  np.testing.assert_allclose(logits(model), expected, atol=1e-4 * np.abs(expected).max())


def test_the_page_runs():
  page = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
  section = page.split("## The matmul seam")[1].split("\n## ")[0]
  names = {"__name__": "page"}
  for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
    exec(block, names)
  plain = program(tiny()).model
  model = names["with_lora"](plain)
  assert "groups/0/layers/0/mixer/query/matmul/lora/down" in model.params
  assert model.buffers.keys() == plain.params.keys()
  measured = changed(plain, matmul=(names["Amax"](),))
  for one in (model, measured):
    logits, _ = jax.eval_shape(partial(forward, one), abstract(one))
    assert logits.shape == (1, 24, 128)
  after = jax.eval_shape(measured.end_update, measured.params, measured.buffers | measured.statistics)
  assert after.keys() == measured.buffers.keys()
