"""The contracts that later work stands on: one Linear, one Stack, one batch, hidden apart from logits, caches."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxtext.layers.context import Context
from maxtext.layers.kv_cache import CacheSpec, update_cache
from maxtext.layers.matmul import Matmul
from maxtext.layers.param_factory import Buffer, ParamFactory
from maxtext.layers.stack import Stack
from maxtext.models.model import Model
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.state import initial_state
from maxtext.training.step import make_train_step
from tests.support import program, random_batch, tiny


@dataclass(frozen=True)
class Lora(Matmul):
  """y = x W + x A B, with B zero at first."""

  rank: int = 4
  name: str = "lora"

  def variables(self, make, site, inputs, outputs):
    down = make("down", (*inputs.values(), self.rank), (*inputs, None), std=0.1)
    up = make("up", (self.rank, *outputs.values()), (None, *outputs))
    return {"down": down, "up": up}

  def __call__(self, call, own, next_, x, weight):
    down, up = own["down"][...], own["up"][...]
    return next_(call, x, weight) + jnp.tensordot(jnp.tensordot(x, down, down.ndim - 1), up, 1)


@dataclass(frozen=True)
class FakeQuantization(Matmul):
  """Weights rounded to a few levels, gradients straight through; a buffer counts its calls, as amax histories would."""

  levels: int = 7
  name: str = "quantization"

  def variables(self, make, site, inputs, outputs):
    return {"calls": make("calls", (1,), (None,), kind=Buffer, dtype=jnp.int32, combine="equal")}

  def __call__(self, call, own, next_, x, weight):
    own["calls"].set_value(own["calls"][...] + 1)
    step = jnp.abs(weight).max() / self.levels
    rounded = jnp.round(weight / step) * step
    return next_(call, x, weight + jax.lax.stop_gradient(rounded - weight))


def through(model: Model, *implementations, **kwargs) -> Model:
  return Model.of(model.spec, model.execution.replace(matmul=implementations), **kwargs)


def train(model: Model, batch, steps=15, accumulation=1):
  """The real step with Adam; returns the losses and the last state."""
  optimizer = optax.adam(3e-3)
  step = jax.jit(make_train_step(model, LanguageModeling(), optimizer, lambda step: 3e-3, accumulation=accumulation))
  state, losses = jax.jit(lambda: initial_state(model, optimizer, 0))(), []
  for _ in range(steps):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
  return losses, state


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lora_trains_inside_linear(scan):
  config = tiny(scan_layers=scan)
  plain = program(config).model
  model = through(plain, Lora(), trained=lambda path: "/lora/" in path)
  query = "groups/0/layers/0/mixer/query/matmul/lora/down"
  assert model.params[query].shape == (2, 48, 4)
  assert model.buffers.keys() == plain.params.keys(), "nothing is renamed, and what is not trained is carried along"

  batch = random_batch(config)
  losses, state = train(model, batch)
  start, _ = train(plain, batch, steps=1)
  assert losses[0] == pytest.approx(start[0], abs=1e-5), "it starts as the plain model"
  assert losses[-1] < losses[0] - 0.2
  base, _ = jax.jit(plain.init)(0)
  assert all((state.buffers[n] == base[n]).all() for n in base)
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert len(moments) == 2 * len(model.params), "the optimizer keeps nothing for what is not trained"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("scan", "accumulation"), [(True, 1), pytest.param(False, 1, marks=pytest.mark.slow), (True, 2)]
)
def test_fake_quantization_trains_inside_linear(scan, accumulation):
  config = tiny(scan_layers=scan)
  plain = program(config).model
  model = through(plain, FakeQuantization())
  assert model.params.keys() == plain.params.keys(), "what no gradient touches is no parameter"
  batch = random_batch(config)
  losses, state = train(model, batch, accumulation=accumulation)
  exact, _ = train(plain, batch, steps=1)
  assert abs(losses[0] - exact[0]) > 1e-4, "rounding must be felt"
  assert losses[-1] < losses[0] - 0.2
  assert len(state.buffers) == 8
  for name, calls in state.buffers.items():
    np.testing.assert_array_equal(calls, np.full(calls.shape, 15 * accumulation), err_msg=name)


@dataclass(frozen=True)
class Probe:
  """A layer that shows what a stack handed to it."""

  def build(self, factory: ParamFactory, width, execution):
    return ProbeLayer(factory, width)


class ProbeLayer(nnx.Module):
  def __init__(self, make, width):
    self.scale = make("scale", (width,), ("norm",), std=1.0)

  def __call__(self, x, layer_input, context, cache, repeat):
    x = x * self.scale[...] + layer_input + context.positions[..., None]
    seen = jnp.zeros(())
    if cache is not None:
      cache, layer, _ = update_cache(cache, repeat, context, {"sum": x})
      seen = layer["sum"].sum()
    return x, {"repeat": repeat, "norm": jnp.abs(x).sum(), "seen": seen}, cache

  def cache_specs(self, batch, length):
    return {"sum": CacheSpec((batch, length, 3), (None, None, None), jnp.float32)}


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("scan", [True, False])
def test_stack_passes_inputs_reports_and_cache(scan, turns):
  R, C, B, S, E = 4, 2, 2, 3, 3
  execution = program(tiny()).model.execution.replace(scan_layers=scan)
  execution = execution.replace(remat=execution.remat * turns)
  stack = Stack(ParamFactory(0, jnp.float32), (Probe(),) * C, R, E, execution)
  rng = np.random.default_rng(0)
  x = rng.standard_normal((B, S, E)).astype(np.float32)
  inputs = [rng.standard_normal((R, B, S, E)).astype(np.float32) for _ in range(C)]
  positions = np.broadcast_to(np.arange(S), (B, S))
  cache = [{n: jnp.zeros(s.shape) for n, s in layer.items()} for layer in stack.cache_specs(B, S + 2)]

  for kept in (None, cache):
    out, reports, new = stack(x, inputs, Context(positions, None, {}), kept)
    expected, sums = x, np.zeros((C, R, B, S, E))
    for r in range(R):
      for c in range(C):
        expected = expected * np.asarray(stack.layers[c].scale[r]) + inputs[c][r] + positions[..., None]
        sums[c, r] = expected
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for c in range(C):
      np.testing.assert_array_equal(reports[c]["repeat"], np.arange(R))
      np.testing.assert_allclose(reports[c]["norm"], np.abs(sums[c]).sum((1, 2, 3)), rtol=1e-5)
      if kept is not None:
        np.testing.assert_allclose(new[c]["sum"][:, :, :S], sums[c], atol=1e-5)
        np.testing.assert_allclose(reports[c]["seen"], sums[c].sum((1, 2, 3)), rtol=1e-4)
        assert not new[c]["sum"][:, :, S:].any()


def test_layer_inputs_join_the_residual_of_their_layer():
  config = tiny()
  model = program(config).model
  params, _ = jax.jit(model.init)(0)
  batch = random_batch(config)
  extra = np.zeros((2, 2, 32, 48), np.float32)  # [layer, row, position, width]

  @jax.jit
  def hidden(extra):
    return model.bind(params).hidden(batch.inputs, batch.positions, layer_inputs=[[extra]])[0]

  without = jax.jit(lambda: model.bind(params).hidden(batch.inputs, batch.positions)[0])()
  np.testing.assert_array_equal(hidden(extra), without)
  extra[1, 0, 10] = 1.0
  changed = np.abs(np.asarray(hidden(extra) - without)).max(-1)
  assert not changed[0, :10].any()
  assert not changed[1].any()
  assert (changed[0, 10:] > 0).all()


def test_a_cache_lives_where_its_activations_do():
  p = program(tiny(ici_fsdp_parallelism=4, ici_tensor_parallelism=2, per_device_batch_size=1), devices=8)
  params, _ = jax.jit(p.model.init)(0)
  cache = jax.jit(lambda params: p.model.bind(params).init_cache(batch=8, length=16))(params)
  keys = cache[0][0]["key"]
  assert keys.shape == (2, 8, 2, 16, 8)
  assert keys.addressable_shards[0].data.shape == (2, 2, 1, 16, 8)


@pytest.mark.parametrize("changes", [{}, {"attention_type": "local_sliding", "sliding_window_size": 5}])
def test_prefill_and_decode_equal_the_forward_pass(changes):
  config = tiny(max_target_length=16, **changes)
  model = program(config).model
  params, _ = jax.jit(model.init)(0)
  batch = random_batch(config)

  @jax.jit
  def forward(tokens, positions):
    decoder = model.bind(params)
    return decoder.logits(decoder.hidden(tokens, positions)[0])

  @jax.jit
  def cached(tokens, positions, cache):
    decoder = model.bind(params)
    hidden, _, cache = decoder.hidden(tokens, positions, cache=cache)
    return decoder.logits(hidden), cache

  expected = forward(batch.inputs, batch.positions)
  cache = model.bind(params).init_cache(batch=2, length=20)
  prefill = 7
  logits, cache = cached(batch.inputs[:, :prefill], batch.positions[:, :prefill], cache)
  np.testing.assert_allclose(logits, expected[:, :prefill], atol=1e-5)
  for s in range(prefill, 16):
    logits, cache = cached(batch.inputs[:, s : s + 1], batch.positions[:, s : s + 1], cache)
    np.testing.assert_allclose(logits[:, 0], expected[:, s], atol=1e-5)


@pytest.mark.parametrize("kernel", ["dot_product", "chunked"])
def test_documents_in_a_row_do_not_see_each_other(kernel):
  config = tiny(attention=kernel, max_target_length=256)
  model = program(config).model
  params, _ = jax.jit(model.init)(0)
  segments = np.ones((2, 256), np.int32)
  segments[:, 130:] = 2
  positions = np.broadcast_to(np.concatenate([np.arange(130), np.arange(126)]), (2, 256))
  batch = random_batch(config, segments=segments)

  @jax.jit
  def forward(tokens):
    decoder = model.bind(params)
    return decoder.logits(decoder.hidden(tokens, positions, segments)[0])

  changed = np.array(batch.inputs)
  changed[:, 5] = (changed[:, 5] + 1) % config.vocab_size
  before, after = forward(batch.inputs), forward(changed)
  np.testing.assert_array_equal(before[:, 130:], after[:, 130:])
  assert float(jnp.abs(before[:, 5:130] - after[:, 5:130]).max()) > 1e-3
  alone = program(tiny(max_target_length=126)).model.bind(params)
  hidden, _, _ = alone.hidden(batch.inputs[:, 130:], positions[:, 130:])
  np.testing.assert_allclose(before[:, 130:], alone.logits(hidden), atol=1e-4)
