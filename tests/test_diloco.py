"""Replicas that train apart are two runs of half the batch, joined by Nesterov's rule written out."""

import jax
import numpy as np
import pytest

from maxtext import ConfigError
from tests.support import program, random_batch, tiny

pytestmark = pytest.mark.mesh

STEPS, PERIOD, OUTER, MOMENTUM = 5, 2, 0.7, 0.9
RUN = {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps_fraction": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize(
  "keys",
  [
    {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    {"ici_fsdp_parallelism": 4, "reduce_scatter_gradients": True},
  ],
  ids=["fsdp 2 x tensor 2", "fsdp 4, reduce-scatter"],
)
def test_two_replicas_are_two_runs(keys):
  keys = {"ici_diloco_parallelism": 2, **keys}
  rule = {"diloco_sync_period": PERIOD, "diloco_outer_lr": OUTER, "diloco_outer_momentum": MOMENTUM}
  both = program(tiny(**RUN, **keys, **rule, enable_diloco=True, per_device_batch_size=1), 8)
  one = program(tiny(**RUN, per_device_batch_size=4))
  batches = [random_batch(both.config, rows=8, seed=i) for i in range(STEPS)]

  state, found = both.init(), []
  for batch in batches:
    state, metrics = both.step(state, jax.device_put(batch, both.batch.inputs.sharding))
    found.append(float(metrics["loss"]))

  outer = {name: np.asarray(p, np.float64) for name, p in one.init().params.items()}
  velocity, replicas, expected = dict.fromkeys(outer, 0.0), [one.init(), one.init()], []
  for number, batch in enumerate(batches, 1):
    halves = [jax.tree.map(lambda x, half=half: x[4 * half : 4 * half + 4], batch) for half in (0, 1)]
    pairs = [one.step(replica, half) for replica, half in zip(replicas, halves, strict=True)]
    replicas = [pair[0] for pair in pairs]
    expected.append(np.mean([float(pair[1]["loss"]) for pair in pairs]))
    if number % PERIOD == 0:
      for name, old in outer.items():
        gradient = old - np.mean([np.asarray(r.params[name], np.float64) for r in replicas], axis=0)
        velocity[name] = MOMENTUM * velocity[name] + gradient
        outer[name] = old - OUTER * (gradient + MOMENTUM * velocity[name])
      replicas = [
        type(r)(r.step, {n: jax.numpy.asarray(p, np.float32) for n, p in outer.items()}, r.buffers, r.opt_state)
        for r in replicas
      ]

  np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
  for name, value in outer.items():
    np.testing.assert_allclose(state.params[name], value, atol=2e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.slow
def test_replicas_agree_on_buffers_when_they_meet():
  """Router biases go their own ways, and are their mean after a meeting; until then the run's are those of the last."""
  experts = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}
  experts |= {"routed_bias": True, "routed_bias_update_rate": 0.01, "base_num_decoder_layers": 1, **RUN}
  rule = {"diloco_sync_period": 2, "enable_diloco": True, "ici_diloco_parallelism": 2}
  both = program(tiny(**experts, **rule, per_device_batch_size=2), 2)
  one = program(tiny(**experts, per_device_batch_size=2))
  (name,) = both.state.buffers
  state, replicas = both.init(), [one.init(), one.init()]
  for number in (1, 2):
    batch = random_batch(both.config, rows=4, seed=number)
    state, _ = both.step(state, jax.device_put(batch, both.batch.inputs.sharding))
    replicas = [
      one.step(r, jax.tree.map(lambda x, i=i: x[i : i + 2], batch))[0] for i, r in zip((0, 2), replicas, strict=True)
    ]
    alone = np.stack([r.buffers[name] for r in replicas])
    assert (alone[0] != alone[1]).any(), "or this shows nothing"
    expected = alone if number == 1 else np.broadcast_to(alone.mean(0), alone.shape)
    np.testing.assert_allclose(state.opt_state.buffers[name], expected, atol=1e-6)
    np.testing.assert_allclose(state.buffers[name], 0 if number == 1 else expected[0], atol=1e-6)


def test_replicas_start_from_parameters_that_are_given():
  p = program(tiny(ici_diloco_parallelism=2, ici_fsdp_parallelism=4, enable_diloco=True, per_device_batch_size=1), 8)
  state = p.init()
  other = {name: value + 1 for name, value in state.params.items()}
  state = p.start_from(state, other, state.buffers)
  for name, value in state.params.items():
    np.testing.assert_array_equal(state.opt_state.params[name], np.stack([value, value]))


def test_what_has_no_place_is_refused():
  with pytest.raises(ConfigError, match=r"diloco_outer_lr=0\.5 has no effect without enable_diloco=true"):
    tiny(diloco_outer_lr=0.5, strict=True)
  with pytest.raises(ConfigError, match=r"ici_diloco_parallelism=2 is not supported: .* needs enable_diloco=true"):
    tiny(ici_diloco_parallelism=2)
  with pytest.raises(ConfigError, match="shard_optimizer_over_data"):
    tiny(enable_diloco=True, ici_diloco_parallelism=2, shard_optimizer_over_data=True)
