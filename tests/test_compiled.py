"""A step compiled ahead is the step, and no other."""

import time

import numpy as np
import pytest

from maxtext import ConfigError, train
from maxtext.training import compiled
from tests.support import History, program, tiny

# XLA cannot save a program for CPUs that it has read from a compilation cache, so nothing may have compiled it before.
NEVER_COMPILED = {"gradient_clipping_threshold": 1 + time.time() % 1}


@pytest.fixture(scope="module")
def step_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("compiled") / "step.zip"
  p = program(run(), 8)
  lowered = p.lower()
  compiled.save(p, lowered, lowered.compile(), path)
  return path


def run(**changes):
  return tiny(per_device_batch_size=1, steps=3, **NEVER_COMPILED, **changes)


def test_a_run_takes_it(step_file):
  plain, ahead = History(), History()
  train(run(), callbacks=[plain])
  train(run(compiled_trainstep_file=str(step_file)), callbacks=[ahead])
  assert len(ahead.losses) == 3
  np.testing.assert_array_equal(ahead.losses, plain.losses)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"adam_b1": 0.5}, "adam_b1=0.9 there, 0.5 here"),
    ({"ici_tensor_parallelism": 2}, "ici_tensor_parallelism=1 there"),
  ],
)
def test_another_step_is_refused(step_file, changes, message):
  with pytest.raises(ConfigError) as error:
    compiled.load(program(run(**changes), 8), step_file)
  assert message in str(error.value)


def test_another_file_is_refused(tmp_path):
  (tmp_path / "step.zip").write_text("no zip")
  with pytest.raises(ConfigError, match="cannot be read"):
    compiled.load(program(run(), 8), tmp_path / "step.zip")
