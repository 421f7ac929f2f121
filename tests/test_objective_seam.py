"""An objective from outside the package: a batch of its own, a frozen model, an optimizer and data of its own."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import maxtext
from maxtext import ConfigError
from maxtext.data.indexed import IndexedBatches
from maxtext.mesh.devices import make_mesh
from maxtext.training.objectives.base import BATCH, LENGTH, Field, FrozenModel, Objective, StepContext, token_field
from maxtext.training.program import Program
from tests.support import TINY, History, program, tiny

KEYS = {
  "base_num_decoder_layers": 1, "max_target_length": 16, "steps": 4, "gradient_clipping_threshold": 0.0,
}  # fmt: skip
EIGHT = {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 2, "ici_tensor_parallelism": 2}


class Preference(Objective):
  """DPO on pairs of rows, with a draw and a schedule to see the key and the step."""

  def __init__(self, beta=0.5, teacher=None, noise=0.0):
    self.beta, self.teacher, self.noise = beta, teacher, noise

  def batch(self, rows, length):
    pair = {"tokens": token_field(rows, length), "targets": token_field(rows, length)}
    pair |= {"mask": token_field(rows, length, jnp.float32), "positions": token_field(rows, length)}
    return {"chosen": pair, "rejected": pair, "margin": Field((rows,), jnp.float32, (BATCH,))}

  @property
  def frozen(self):
    return {"reference": FrozenModel(self.teacher)}

  def __call__(self, models, batch, context):
    def log_probs(decoder, side):
      logits = decoder.logits(decoder.hidden(side["tokens"], side["positions"], None)[0]).astype(jnp.float32)
      taken = jnp.take_along_axis(jax.nn.log_softmax(logits), side["targets"][..., None], -1)[..., 0]
      return (taken * side["mask"]).sum(1)

    policy, reference = models.decoder, models.frozen["reference"]
    margins = {s: log_probs(policy, batch[s]) - log_probs(reference, batch[s]) for s in ("chosen", "rejected")}
    reward = self.beta * (margins["chosen"] - margins["rejected"])
    draw = self.noise * jax.random.normal(context.key("noise"), reward.shape) if self.noise else 0.0
    loss = -jax.nn.log_sigmoid(reward + draw - batch["margin"] * context.step)
    return loss.sum(), {"reward": reward.sum()}

  def weight(self, batch):
    return jnp.float32(len(batch["margin"]))

  def tokens(self, batch):
    return batch["chosen"]["mask"].sum() + batch["rejected"]["mask"].sum()


def pairs(number, rows=8, length=16):
  """Of batch number n; also where an outside caller would read files."""
  rng = np.random.default_rng(number)

  def side():
    tokens = rng.integers(0, TINY["vocab_size"], (rows, length + 1))
    mask = (rng.uniform(size=(rows, length)) < 0.7).astype(np.float32)
    positions = np.broadcast_to(np.arange(length), (rows, length))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask, "positions": positions}

  return {"chosen": side(), "rejected": side(), "margin": rng.uniform(0, 0.1, rows)}


DATA = IndexedBatches(pairs, lambda number: pairs(1000 + number) if number < 2 else None)


def trained(objective=None, **changes):
  """On the devices of the test run: eight, or one where the mesh is not said."""
  history = History()
  config = tiny(**(KEYS | {"per_device_batch_size": 1, "ici_fsdp_parallelism": 8} | changes))
  state = maxtext.train(
    config, objective=objective or Preference(), optimizer=optax.sgd(0.1), data=DATA, callbacks=[history]
  )
  return state, history


def run(objective, devices, **changes):
  """The losses and the last state of a few steps on so many devices, and the frozen parameters before and after."""
  config = tiny(**(KEYS | {"per_device_batch_size": 8 / devices} | changes))
  p = Program.of(config, make_mesh(config, jax.devices()[:devices]), objective, optax.sgd(0.1), DATA)
  state, frozen, found = p.init(), p.init_frozen(), []
  before = jax.device_get(frozen)
  for _, fed in zip(range(3), p.feed(), strict=False):
    state, metrics = p.step(state, fed.batch, frozen)
    found.append(float(metrics["loss"]))
  return np.array(found), jax.device_get(state.params), before, jax.device_get(frozen)


def same(a, b):
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module")
def alone():
  return run(Preference(noise=0.3), 1)


def test_with_the_reference_at_the_policy_the_first_loss_is_that_of_chance():
  losses, params, before, after = run(Preference(), 1)
  assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
  assert losses[1] != pytest.approx(np.log(2), abs=1e-4)
  assert same(before, after)
  initial = program(tiny(**KEYS)).init()
  assert same(before["reference"], jax.device_get(initial.params)), "the reference is where the run starts"
  assert not same(params, before["reference"])


@pytest.mark.mesh
@pytest.mark.slow
def test_a_mesh_of_eight_and_accumulation_give_what_one_device_does(alone):
  """The draw and the reordered tokens too: a key knows no mesh."""
  losses, params, *_ = run(Preference(noise=0.3), 8, **EIGHT)
  np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
  for name, value in params.items():
    np.testing.assert_allclose(value, alone[1][name], atol=2e-5, err_msg=name)
  plain = run(Preference(), 1)
  for devices, mesh in ((1, {}), (8, EIGHT)):
    twice = run(Preference(), devices, gradient_accumulation_steps=2, per_device_batch_size=4 / devices, **mesh)
    np.testing.assert_allclose(twice[0], plain[0], rtol=1e-5)
    for name, value in twice[1].items():
      np.testing.assert_allclose(value, plain[1][name], atol=2e-5, err_msg=name)


class Ordered(Preference):
  """Reports in which order it sees the tokens of a row."""

  def __call__(self, models, batch, context):
    loss, _ = super().__call__(models, batch, context)
    positions = batch["chosen"]["positions"]
    return loss, {"order": (positions * jnp.arange(positions.shape[1]) ** 2).sum().astype(jnp.float32)}


@pytest.mark.mesh
def test_fields_with_a_length_come_in_context_parallel_order():
  config = tiny(**(KEYS | EIGHT | {"per_device_batch_size": 1}))
  p = Program.of(config, make_mesh(config, jax.devices()[:8]), Ordered(), optax.sgd(0.1), DATA)
  _, metrics = p.step(p.init(), next(p.feed()).batch, p.init_frozen())
  positions = p.model.execution.kernels.attention.order.apply(pairs(0)["chosen"]["positions"])
  assert positions[0].tolist() != sorted(positions[0])
  assert float(metrics["order"]) == (positions * np.arange(16) ** 2).sum() / 8


def test_keys_are_a_function_of_seed_step_part_and_path():
  def draw(seed=0, step=3, part=0, path="a"):
    return np.asarray(jax.random.key_data(jax.jit(lambda s, p: StepContext(s, seed, p).key(path))(step, part)))

  first = draw()
  assert np.array_equal(first, draw())
  for other in (draw(seed=1), draw(step=4), draw(part=1), draw(path="b")):
    assert not np.array_equal(first, other)


class Draws(Preference):
  """Reports what it draws."""

  def __call__(self, models, batch, context):
    loss, _ = super().__call__(models, batch, context)
    return loss, {"drawn": jax.random.normal(context.key("a"))}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_micro_batch_has_its_own_key(accumulation):
  config = tiny(**(KEYS | {"gradient_accumulation_steps": accumulation, "per_device_batch_size": 8 / accumulation}))
  p = Program.of(config, make_mesh(config, jax.devices()[:1]), Draws(), optax.sgd(0.1), DATA)
  _, metrics = p.step(p.init(), next(p.feed()).batch, p.init_frozen())
  seed = config.init_weights_seed
  expected = [float(jax.random.normal(StepContext(0, seed, part).key("a"))) for part in range(accumulation)]
  assert float(metrics["drawn"]) == pytest.approx(sum(expected) / 8)


@pytest.mark.mesh
@pytest.mark.slow
def test_a_run_from_outside_is_resumed_exactly_and_saves_nothing_frozen(tmp_path):
  keys = {"enable_checkpointing": True, "base_output_directory": str(tmp_path), "checkpoint_period": 2,
          "async_checkpointing": False, "eval_interval": 2, "eval_steps": 2}  # fmt: skip
  objective = Preference(noise=0.3)
  whole, history = trained(objective, **keys, run_name="whole", steps=6)
  trained(objective, **keys, run_name="halved", steps=4)
  resumed, rest = trained(objective, **keys, run_name="halved", steps=6)
  assert same(jax.device_get(whole), jax.device_get(resumed))
  assert [f["loss"] for f in rest.figures] == [f["loss"] for f in history.figures[4:]]
  assert [f.get("eval_loss") for f in rest.figures] == [f.get("eval_loss") for f in history.figures[4:]]
  assert rest.figures[-1]["eval_loss"] > 0
  assert "learning_rate" not in rest.figures[-1]
  assert rest.figures[-1]["tokens"] == sum(pairs(5)[side]["mask"].sum() for side in ("chosen", "rejected"))
  assert "reference" not in str(jax.tree.structure(resumed))
  names = {str(path) for path in (tmp_path / "halved" / "checkpoints" / "6").rglob("*")}
  assert names
  assert not [name for name in names if "reference" in name or "frozen" in name]


def test_a_frozen_model_of_another_configuration():
  teacher = tiny(**(KEYS | {"base_num_decoder_layers": 2, "base_emb_dim": 32, "init_weights_seed": 7}))
  losses, _, before, after = run(Preference(teacher=teacher), 1)
  assert same(before, after)
  assert same(before["reference"], jax.device_get(program(teacher).init().params))
  assert losses[0] != pytest.approx(np.log(2), abs=1e-4)


class Plain(Objective):
  def __call__(self, models, batch, context):
    raise AssertionError("never traced")


def declares(batch):
  return type("Odd", (Plain,), {"batch": lambda self, rows, length: batch(rows, length)})()


@pytest.mark.parametrize(
  ("batch", "data", "words"),
  [
    (lambda rows, length: {"x": token_field(rows, length)}, None, "give maxtext.train the argument data"),
    (lambda rows, length: {"x": token_field(2 * rows, length)}, DATA, "must have the 8 rows of the batch"),
    (lambda rows, length: {"x": Field((rows, 2), jnp.int32, (BATCH,))}, DATA, "one logical axis for each dimension"),
    (lambda rows, length: {"x": Field((rows, 2), jnp.int32, (BATCH, "embd"))}, DATA, "'embd' is neither 'length'"),
    (lambda rows, length: {"x": Field((rows, 2, length), jnp.int32, (BATCH, None, LENGTH))}, DATA, "second dimension"),
  ],
)  # fmt: skip
def test_a_batch_that_cannot_be_is_an_error_with_the_fix(batch, data, words):
  config = tiny(**KEYS)
  with pytest.raises(ConfigError, match=words):
    Program.of(config, make_mesh(config, jax.devices()[:1]), declares(batch), data=data)


def test_the_objective_of_the_page_trains(monkeypatch):
  page = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
  section = page.split("## An objective of your own")[1].split("\n## ")[0]
  (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
  trained = []
  monkeypatch.setattr(maxtext, "train", lambda config, objective: trained.append((config, objective)))
  exec(block, {"__name__": "page"})
  ((config, objective),) = trained
  assert config.steps == 3
  history = History()
  monkeypatch.undo()
  maxtext.train(tiny(**KEYS), objective=objective, callbacks=[history])
  assert len(history.figures) == 4
  assert all(0 < -figures["log_likelihood"] < figures["loss"] + 1 for figures in history.figures)
