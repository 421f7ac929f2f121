"""Dropout: masks depend on seed, step, layer and token, and on nothing else; only training has them."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxtext
from maxtext import ConfigError
from maxtext.layers.context import Context
from maxtext.layers.dropout import dropout, token_keys
from maxtext.layers.param_factory import ParamFactory
from maxtext.layers.stack import Stack
from maxtext.training.objectives.base import StepContext
from maxtext.training.objectives.language_modeling import LanguageModeling
from maxtext.training.step import gradients
from tests.support import History, losses, program, random_batch, tiny

RATE = 0.3
RUN = {"base_num_decoder_layers": 4, "dropout_rate": RATE, "steps": 3, "learning_rate": 1e-3}
SLOW = pytest.mark.slow
ONE_DEVICE = {
  "unrolled": {"scan_layers": False},
  "remat in turn": {"remat_policy": "full,minimal"},
  "remat in turn, unrolled": {"remat_policy": "full,minimal", "scan_layers": False},
}
MESHES = {
  "fsdp 2 x tensor 2 x context 2, reordered": {"fsdp": 2, "tensor": 2, "context": 2},
  "data 2 x sequence 2 x fsdp_transpose 2": {"data": 2, "sequence": 2, "fsdp_transpose": 2, "fsdp": 1},
  "context 4 x data 2, striped": {"context": 4, "data": 2, "fsdp": 1, "context_parallel_reorder_strategy": "striped"},
  "data 2 x fsdp 2 x tensor 2, explicit": {"data": 2, "fsdp": 2, "tensor": 2, "shard_mode": "explicit"},
  "pipeline 2 x fsdp 4, twice round": {"pipeline": 2, "fsdp": 4},
  "pipeline 2 x tensor 4, a layer after it": {
    "pipeline": 2, "tensor": 4, "fsdp": 1, "pipeline_parallel_layers": 2, "num_layers_per_pipeline_stage": 1,
  },
}  # fmt: skip
IMPLICIT = [name for name in MESHES if "explicit" not in name]
# Where the masks of `test_a_mesh_draws_the_same_masks` are the same, so is what they train.
IN_GATE = ("fsdp 2 x tensor 2 x context 2, reordered",)


def axes_of(mesh):
  return {k if "_" in k and k != "fsdp_transpose" else f"ici_{k}_parallelism": v for k, v in mesh.items()}


def on_meshes(names, gate):
  return [
    pytest.param(axes_of(MESHES[name]), id=name, marks=[pytest.mark.mesh] + [pytest.mark.nightly] * (name not in gate))
    for name in names
  ]


@dataclass(frozen=True)
class Probe:
  def build(self, factory, width, execution):
    return ProbeLayer(factory, width)


class ProbeLayer(nnx.Module):
  """Appends its mask to x, as the last binary digit."""

  def __init__(self, make, width):
    self.scale = make("scale", (width,), ("norm",), fill=2.0)

  def __call__(self, x, layer_input, context, cache, repeat):
    mask = dropout(jnp.ones_like(x), context.dropout_keys, RATE) > 0
    return x * self.scale[...] + mask, {}, cache


def masks(config, devices=1, seed=0):
  """The masks of four layers [4,B,S,E], in the order of the text."""
  execution = program(config, devices).model.execution
  pipeline = execution.pipelines[0] if execution.pipelines else None
  stack = Stack(ParamFactory(0, jnp.float32), (Probe(),), 4, 48, execution, pipeline)
  rows, length, order = 8, config.max_target_length, execution.kernels.attention.order

  @jax.jit
  def run(key):
    keys = token_keys(key, rows, jnp.arange(length) if order is None else order.sequence(length))
    x = execution.sharding.constrain(jnp.zeros((rows, length, 48)), "activation_batch", "activation_norm_length", None)
    positions = jnp.zeros((rows, length), jnp.int32)
    return stack(x, None, Context(positions, None, {}, dropout_keys=keys), None)[0]

  codes = np.asarray(run(jax.random.key(seed))).astype(int)
  codes = codes if order is None else order.undo(codes)
  return np.stack([(codes >> (3 - layer)) & 1 for layer in range(4)])


@pytest.fixture(scope="module")
def plain_masks():
  return masks(tiny(**RUN))


@pytest.mark.parametrize("changes", ONE_DEVICE.values(), ids=ONE_DEVICE.keys())
def test_the_loop_and_remat_draw_the_same_masks(plain_masks, changes):
  np.testing.assert_array_equal(masks(tiny(**RUN, **changes)), plain_masks)


@pytest.mark.parametrize("axes", on_meshes(IMPLICIT, IMPLICIT))
def test_a_mesh_draws_the_same_masks(plain_masks, axes):
  np.testing.assert_array_equal(masks(tiny(**RUN, per_device_batch_size=1, **axes), 8), plain_masks)


def test_masks_are_independent_and_keep_their_share(plain_masks):
  bits = plain_masks.reshape(4, -1)
  share = np.sqrt(RATE * (1 - RATE) / bits.shape[1])
  assert np.abs(bits.mean(1) - (1 - RATE)).max() < 5 * share
  assert np.abs(np.corrcoef(bits) - np.eye(4)).max() < 5 / np.sqrt(bits.shape[1]), "layers have masks of their own"
  tokens = plain_masks[0].reshape(-1, plain_masks.shape[-1])
  assert len(np.unique(tokens, axis=0)) == len(tokens), "tokens have masks of their own"
  assert (masks(tiny(**RUN), seed=1) != plain_masks).mean() == pytest.approx(2 * RATE * (1 - RATE), abs=0.02)


def test_the_mean_survives():
  x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (4, 64, 256)), jnp.float32)
  y = np.asarray(dropout(x, token_keys(jax.random.key(0), 4, jnp.arange(64)), RATE))
  np.testing.assert_allclose(y[y != 0], (x / (1 - RATE))[y != 0], rtol=1e-6)
  assert y.mean() == pytest.approx(float(x.mean()), abs=5 * np.sqrt(RATE / (1 - RATE) / x.size))
  assert (y == 0).mean() == pytest.approx(RATE, abs=0.01)
  np.testing.assert_array_equal(dropout(x, None, RATE), x)


@pytest.fixture(scope="module")
def one_device():
  found = losses(tiny(**RUN))
  assert np.abs(found - losses(tiny(**RUN | {"dropout_rate": 0.0}))).min() > 1e-3
  return found


@pytest.mark.parametrize("axes", on_meshes(MESHES, IN_GATE))
def test_a_mesh_trains_like_one_device(one_device, axes):
  found = losses(tiny(**RUN, per_device_batch_size=1, **axes), devices=8)
  np.testing.assert_allclose(found, one_device, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
  "keys",
  [{"mtp_num_layers": 1}, pytest.param({"mhc_expansion_rate": 2, "sinkhorn_iterations": 2}, marks=pytest.mark.nightly)],
  ids=["multi-token prediction", "hyper-connections"],
)
def test_other_layers_have_it(keys):
  keys = RUN | keys | {"base_num_decoder_layers": 2, "steps": 1}
  on = losses(tiny(**keys))
  np.testing.assert_allclose(on, losses(tiny(**keys, scan_layers=False)), atol=1e-6, rtol=0)
  assert np.abs(on - losses(tiny(**keys | {"dropout_rate": 0.0}))).min() > 1e-3


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_remat_draws_the_same_mask_again(accumulation):
  """The gradient is that of the loss, so the backward pass has the masks of the forward pass, whatever it saves."""

  def found(**changes):
    config = tiny(**RUN, gradient_accumulation_steps=accumulation, **changes)
    model, batch = program(config).model, random_batch(config, rows=4)

    def run(params):
      context = partial(StepContext, 3, 0)
      return gradients(model, LanguageModeling(), params, {}, batch, accumulation=accumulation, context=context)

    return jax.jit(run)(params)

  params = program(tiny(**RUN)).init().params
  saved, recomputed = found(remat_policy="minimal"), found(remat_policy="full")
  assert abs(saved.loss - recomputed.loss) < 1e-6
  for name, grad in recomputed.grads.items():
    scale = float(np.abs(saved.grads[name]).max())
    np.testing.assert_allclose(grad, saved.grads[name], atol=1e-5 * scale, rtol=0, err_msg=name)
  slope, size = sum(float((g * g).sum()) for g in recomputed.grads.values()), 1e-3
  one_way, other_way = (
    {name: p + sign * size * recomputed.grads[name] / np.sqrt(slope) for name, p in params.items()} for sign in (1, -1)
  )
  config = tiny(**RUN)
  model, batch = program(config).model, random_batch(config, rows=4)

  @jax.jit
  def loss(params):
    context = partial(StepContext, 3, 0)
    return gradients(model, LanguageModeling(), params, {}, batch, accumulation=accumulation, context=context).loss

  assert float(loss(one_way) - loss(other_way)) / (2 * size) == pytest.approx(np.sqrt(slope), rel=1e-2)


def test_steps_seeds_and_micro_batches_have_masks_of_their_own():
  config = tiny(**RUN)
  model, batch = program(config).model, random_batch(config, rows=4)
  params = program(config).init().params

  @partial(jax.jit, static_argnums=1)
  def loss(step, seed, part):
    return gradients(
      model, LanguageModeling(), params, {}, batch, context=lambda number: StepContext(step, seed, part)
    ).loss

  first = float(loss(0, 0, 0))
  assert first == float(loss(0, 0, 0))
  for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
    assert abs(first - float(loss(*other))) > 1e-4


def test_evaluation_has_none_and_off_is_the_same_program():
  keys = RUN | {"eval_interval": 2, "eval_steps": 2}
  off, on = program(tiny(**keys | {"dropout_rate": 0.0})), program(tiny(**keys))
  state = off.init()
  assert off.evaluate(state) == on.evaluate(state)
  text = off.lower().as_text()
  assert program(tiny(**keys, enable_dropout=False)).lower().as_text() == text
  assert on.lower().as_text() != text


@SLOW
def test_a_resumed_run_draws_the_same_masks(tmp_path):
  def trained(name, steps):
    config = tiny(
      **RUN | {"steps": steps, "enable_checkpointing": True, "checkpoint_period": 2, "run_name": name},
      base_output_directory=str(tmp_path), async_checkpointing=False, per_device_batch_size=1,
      learning_rate_schedule_steps=4,
    )  # fmt: skip
    history = History()
    maxtext.train(config, callbacks=[history])
    return history.losses

  whole = trained("whole", 4)
  trained("halved", 2)
  rest = trained("halved", 4)
  np.testing.assert_array_equal(rest, whole[2:])


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"dropout_rate": 1.0}, "dropout_rate=1.0 leaves nothing of the activations: it must be below 1"),
    ({"dropout_rate": 0.1, "enable_diloco": True, "ici_diloco_parallelism": 2}, "would draw the same masks"),
  ],
)
def test_what_cannot_be_is_an_error(keys, message):
  with pytest.raises(ConfigError, match=message):
    tiny(**keys)
