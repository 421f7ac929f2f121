"""The Python API: what `import maxtext` offers, and that its functions leave the process as they found it."""

import inspect
import json
import logging
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import maxtext
from maxtext import ConfigError
from maxtext.configs.errors import RunError
from maxtext.data.batch import Batch
from maxtext.distributed.interrupt import Interrupt
from maxtext.training.objectives.base import Objective
from tests.support import History, tiny

WRITTEN = {"enable_checkpointing": True, "enable_tensorboard": False, "steps": 4, "base_num_decoder_layers": 1}


def config(folder, name="run", **changes):
  return tiny(
    **WRITTEN | {"base_output_directory": str(folder), "run_name": name, "per_device_batch_size": 1} | changes
  )


def test_every_name_is_there_and_described():
  for name in maxtext.__all__:
    value = getattr(maxtext, name)
    assert name in dir(maxtext)
    if callable(value) and not isinstance(value, str):
      assert inspect.getdoc(value), name
      assert value.__name__ == name, "an error message or help() shows the name that the user wrote"


def test_functions_stay_functions_when_their_packages_are_imported():
  """And neither the import of the package nor its cheap names bring JAX."""
  code = """
import sys, maxtext
maxtext.load_config("small-llama"), maxtext.ConfigKeys, maxtext.__version__
assert "jax" not in sys.modules
import maxtext.planner.plan, maxtext.training.evaluation, maxtext.weights.convert
for name in ("plan", "evaluate", "convert", "train", "load_config"):
  assert type(getattr(maxtext, name)).__name__ == "function", name
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr


def test_evaluate_gives_what_the_run_measured(tmp_path):
  c = config(tmp_path, eval_interval=2, eval_steps=2)
  maxtext.train(c)
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  measured = {line["step"]: line["eval_loss"] for line in map(json.loads, lines) if "eval_loss" in line}
  assert measured.keys() == {2, 4}
  before = sorted(tmp_path.rglob("*"))
  found = maxtext.evaluate(tmp_path / "run")
  assert (found["loss"], found["tokens"]) == (measured[4], 2 * 8 * 32), "the same program on the same data"
  assert maxtext.evaluate(c) == found
  assert maxtext.evaluate(tmp_path / "run" / "checkpoints" / "4") == found
  assert maxtext.evaluate(tmp_path / "run", eval_steps=1, strict=True)["tokens"] == 8 * 32
  assert sorted(tmp_path.rglob("*")) == before, "it writes nothing"


def test_convert_goes_both_ways_and_evaluates_alike(tmp_path):
  """A custom optimizer, whose state is in the checkpoint, is in nobody's way."""
  c = config(tmp_path, steps=1)
  maxtext.train(c, optimizer=optax.lion(1e-3))
  calls = []
  out = maxtext.convert(tmp_path / "run", tmp_path / "hf", progress=lambda *done: calls.append(done))
  assert (out / "config.json").exists()
  assert calls[-1][0] == calls[-1][1]
  back = maxtext.convert(out, tmp_path / "parameters")
  keys = {"dataset_type": "synthetic", "max_target_length": 32, "per_device_batch_size": 1, "dtype": "float32"}
  losses = [
    maxtext.evaluate(tmp_path / "run", eval_steps=2)["loss"],
    maxtext.evaluate(out, eval_steps=2, **keys)["loss"],
    maxtext.evaluate(back, eval_steps=2, **keys)["loss"],
  ]
  np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
  with pytest.raises(ConfigError, match="an evaluation of synthetic data never ends; set eval_steps"):
    maxtext.evaluate(c)


def test_mistakes_are_named(tmp_path):
  with pytest.raises(ConfigError, match="run_name=None has no checkpoint, and load_parameters_path is not set"):
    maxtext.evaluate(tiny(eval_steps=1, eval_interval=1))
  with pytest.raises(ConfigError, match=r"run_name=gone has no checkpoint in .*gone/checkpoints"):
    maxtext.evaluate(tiny(eval_steps=1, eval_interval=1, run_name="gone", base_output_directory=str(tmp_path)))
  with pytest.raises(ConfigError, match="steps: a configuration is complete; give these keys to load_config"):
    maxtext.evaluate(tiny(), steps=3)
  with pytest.raises(ConfigError, match="nothing is no checkpoint, and no run's folder with one in it"):
    maxtext.evaluate(tmp_path / "nothing")
  with pytest.raises(ConfigError, match="to='torch' is neither 'maxtext', 'huggingface' nor 'peft'"):
    maxtext.convert(tmp_path, tmp_path / "out", to="torch")
  with pytest.raises(ConfigError, match="shard_gigabytes=0 must be a number above 0"):
    maxtext.convert(tmp_path, tmp_path / "out", shard_gigabytes=0)
  with pytest.raises(ConfigError, match="compile_topology"):
    maxtext.plan(tiny())


def process_state():
  logger = logging.getLogger("maxtext")
  handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  jax_settings = {name: value for name, value in jax.config.values.items() if "min_entry_size" not in name}
  return handlers, list(logger.handlers), logger.level, logger.propagate, jax_settings, threading.active_count()


def test_train_leaves_the_process_as_it_was(tmp_path):
  """Twice in one process, with a folder of compiled programs of its own, in a thread too."""
  maxtext.train(config(tmp_path, "warm", steps=1))  # whatever libraries start once
  before = process_state()
  histories = [History(), History(), History()]
  cached = {"jax_cache_dir": str(tmp_path / "compiled")}
  maxtext.train(config(tmp_path, "first", **cached), callbacks=[histories[0]])
  assert process_state() == before
  maxtext.train(config(tmp_path, "second", **cached), callbacks=[histories[1]])
  assert process_state() == before
  failed = []

  def run():
    try:
      maxtext.train(config(tmp_path, "third"), callbacks=[histories[2]])
    except BaseException as error:
      failed.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert failed == []
  assert process_state() == before
  assert list((tmp_path / "compiled").iterdir()), "its own folder was used"
  first, second, third = (history.losses.tolist() for history in histories)
  assert len(first) == 4
  assert first == second == third


class Boom(maxtext.Callback):
  def on_step(self, step, metrics):
    if step == 2:
      raise RuntimeError("boom")


def test_a_callback_that_raises_ends_the_run_and_the_next_call_resumes(tmp_path):
  before = process_state()
  c = config(tmp_path)
  with pytest.raises(RuntimeError, match="boom"):
    maxtext.train(c, callbacks=[Boom()])
  assert process_state()[:5] == before[:5]
  history = History()
  state = maxtext.train(c, callbacks=[history])
  assert int(state.step) == 4


class NotANumber(Objective):
  def __call__(self, models, batch, context):
    hidden, *_ = models.decoder.hidden(batch.inputs, batch.positions, batch.segments)
    return hidden.sum().astype(jnp.float32) * jnp.nan, {}

  def weight(self, batch):
    return batch.weights.sum()


def test_a_loss_that_is_not_a_number_ends_the_run_by_name(tmp_path):
  before = process_state()
  with pytest.raises(RunError, match="the loss is not a number at step 1; abort_on_nan_loss=false would continue"):
    maxtext.train(config(tmp_path), objective=NotANumber())
  assert process_state()[:5] == before[:5]


LENGTH = 32


def tokens(number):
  return np.random.default_rng(number).integers(0, 128, (8, LENGTH + 1))


def generator(count=100):
  for number in range(count):
    yield tokens(number)


def test_data_is_any_iterable_or_function(tmp_path):
  """Arrays of tokens, whole batches, a generator and a function give one run, and a resumed one skips what was used."""
  histories = [History() for _ in range(4)]
  maxtext.train(config(tmp_path, "a"), data=generator(), callbacks=histories[:1])
  maxtext.train(config(tmp_path, "b"), data=generator, callbacks=histories[1:2])

  def whole():
    for array in generator():
      positions = np.broadcast_to(np.arange(LENGTH), (8, LENGTH))
      ones = np.ones((8, LENGTH), np.int32)
      yield Batch(array[:, :-1], array[:, 1:], positions, ones, ones)

  maxtext.train(config(tmp_path, "c"), data=list(whole())[:4], callbacks=histories[2:3])
  keys = {"learning_rate_schedule_steps": 4}
  maxtext.train(config(tmp_path, "d", steps=2, **keys), data=generator, callbacks=histories[3:])
  maxtext.train(config(tmp_path, "d", steps=4, **keys), data=generator, callbacks=histories[3:])
  losses = [history.losses.tolist() for history in histories]
  assert len(losses[0]) == 4
  assert losses[0] == losses[1] == losses[2] == losses[3]


def test_data_that_ends_early_ends_the_run_and_is_said(tmp_path, capsys):
  state = maxtext.train(config(tmp_path), data=generator(2))
  assert int(state.step) == 2
  assert "data: ended after 2 batches." in capsys.readouterr().out
  assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
  assert int(maxtext.train(config(tmp_path), data=generator).step) == 4


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (3, "data is a int: it must be an iterable over batches, a function that returns one, or an object with"),
    ("text", "data is a str: it must be"),
    (np.zeros((8, 33), int), "data is a ndarray: it must be"),
    ([tokens(0)[:, 1:]], r"data: batch 0 is an array \[8, 32\]; tokens are \[8, 33\]"),
    ([tokens(0).astype(float)], "data: batch 0: inputs is float64, declared as int32"),
    ([{"tokens": tokens(0)}], "data: batch 0 has tokens, and the objective declares inputs, targets, positions"),
    ([], "data: there is no batch. A generator that was read before has ended"),
    ([None], "data: batch 0 has nothing, and the objective declares"),
  ],
)
def test_wrong_data_is_named(data, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    maxtext.train(config(tmp_path), data=data)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"config": "small-llama"}, r"config is a str: make a configuration with maxtext.load_config\(...\)"),
    ({"objective": NotANumber}, "objective is the class NotANumber: it must be an instance"),
    ({"optimizer": "adam"}, "optimizer is a str: it must be an optax.GradientTransformation"),
    ({"optimizer": optax.adam}, "optimizer is a function: it must be"),
    ({"callbacks": [Boom]}, "callbacks has the class Boom: each must be an instance"),
    ({"callbacks": Boom()}, "callbacks is a Boom: it must be a list"),
  ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(arguments, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    maxtext.train(**{"config": config(tmp_path)} | arguments)
  assert list(tmp_path.iterdir()) == []


def test_another_optimizer_does_not_resume_a_run(tmp_path):
  maxtext.train(config(tmp_path, steps=1), optimizer=optax.adam(1e-3))
  with pytest.raises(ConfigError, match="opt_state"):
    maxtext.train(config(tmp_path), optimizer=optax.sgd(1e-3, momentum=0.9))
  with pytest.raises(ConfigError, match="opt_state"):
    maxtext.train(config(tmp_path), optimizer=optax.adafactor(1e-3))
  assert int(maxtext.train(config(tmp_path, steps=2), optimizer=optax.adam(1e-4)).step) == 2


def test_a_second_interrupt_leaves_an_interactive_session_alive(monkeypatch):
  """A command exits at once; that would end the kernel of a notebook with everything in it."""
  monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
  interrupt = Interrupt()
  interrupt.signal = signal.SIGINT
  with pytest.raises(KeyboardInterrupt):
    interrupt._received(signal.SIGINT, None)
