"""`record_internal_nn_metrics`: the root mean square of each layer's activations, by its number, and nothing else."""

import jax
import numpy as np
import pytest
from flax import nnx

from maxtext.layers.context import Context
from tests.support import program, tiny

KEYS = {"decoder_block": "gemma2", "base_num_decoder_layers": 4, "sliding_window_size": 8}  # a cycle of two layers


def metrics_of(made):
  return {name: float(value) for name, value in made.step(made.init(), next(made.feed()).batch)[1].items()}


def rms(x, real):
  return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64))[np.broadcast_to(real, x.shape[:2])])))


@pytest.fixture(scope="module")
def measured():
  made = program(tiny(**KEYS, record_internal_nn_metrics=1))
  return made, metrics_of(made)


def test_every_layer_has_its_own_by_its_number(measured):
  made, metrics = measured
  state, batch = made.init(), next(made.feed()).batch
  decoder = made.model.bind(state.params | state.buffers)
  context = Context.of(batch.positions, batch.segments, made.model.spec.ropes, decoder.execution.numerics.dtype)
  x = decoder.embed(batch.inputs, batch.positions)
  real = np.ones(x.shape[:2], bool) if batch.segments is None else np.asarray(batch.segments) > 0
  number = 0
  for stack in decoder.groups:
    for repeat in range(stack.repeats):
      for layer in stack.layers:
        graph, weights = nnx.split(layer)
        one = nnx.merge(graph, jax.tree.map(lambda w, r=repeat: w[r], weights))
        x, _, _ = one(x, None, context, None, 0)
        assert metrics[f"activation_rms_residual_{number:03}"] == pytest.approx(rms(x, real), rel=1e-4)
        number += 1
  assert number == 4
  names = {name for name in metrics if name.startswith("activation_rms")}
  wanted = {f"activation_rms_{what}_{n:03}" for what in ("mixer", "feed_forward", "residual") for n in range(4)}
  assert names == wanted
  assert all(metrics[name] > 0 for name in names)


def test_the_step_is_the_same_without_them(measured):
  _, metrics = measured
  plain = metrics_of(program(tiny(**KEYS)))
  assert plain == {name: value for name, value in metrics.items() if not name.startswith("activation_rms")}


@pytest.mark.parametrize(
  ("keys", "tolerance"),
  [
    ({"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_data_parallelism": 2}, 1e-4),
    # Micro-batches of a pipeline are measured one by one.
    ({"ici_pipeline_parallelism": 2, "ici_data_parallelism": 4, "num_layers_per_pipeline_stage": 2}, 1e-2),
  ],
  ids=["mesh", "pipeline"],
)
def test_a_mesh_measures_what_one_device_does(keys, tolerance):
  def own(made):
    return {name: value for name, value in metrics_of(made).items() if name.startswith("activation_rms")}

  common = KEYS | {"record_internal_nn_metrics": 1}
  found = own(program(tiny(**common, **keys, per_device_batch_size=1), 8))
  assert found == pytest.approx(own(program(tiny(**common, per_device_batch_size=8))), rel=tolerance)
