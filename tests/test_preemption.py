"""A run that is given notice: it saves, says how long that took, and says so when it took too long."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from etils import epath

import maxtext
from maxtext.checkpoint.location import steps_in
from maxtext.distributed import interrupt
from maxtext.training.callbacks import save
from maxtext.training.callbacks.base import Callback
from tests.flags import flags
from tests.support import TINY, tiny

KEYS = {"base_num_decoder_layers": 1, "per_device_batch_size": 2, "enable_tensorboard": False, "run_name": "run",
        "ici_fsdp_parallelism": 8}  # fmt: skip


class Notice(Callback):
  """SIGTERM, some seconds after a step."""

  def __init__(self, step: int, seconds: float) -> None:
    self._step, self._seconds = step, seconds

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    if step == self._step:
      threading.Timer(self._seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()


def train_until_told(folder, notice, **keys):
  config = tiny(**KEYS | {"enable_checkpointing": True, "steps": 10**6} | keys, base_output_directory=str(folder))
  with pytest.raises(SystemExit) as ended:
    maxtext.train(config, callbacks=[notice])
  assert ended.value.code == 143
  (step,) = steps_in(epath.Path(folder / "run" / "checkpoints"))
  return step


def test_an_evaluation_does_not_hold_up_the_save(tmp_path, capsys):
  """It has a million batches, of which the notice interrupts one of the first."""
  step = train_until_told(tmp_path, Notice(1, 1.0), eval_interval=2, eval_steps=10**6)
  assert step == 2
  assert re.search(r"maxtext: step 2 was saved \d+\.\d s after SIGTERM\.\n", capsys.readouterr().out)
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_save_that_takes_too_long_says_so(tmp_path, capsys, monkeypatch):
  for module in (interrupt, save):
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.001)
  train_until_told(tmp_path, Notice(2, 0), checkpoint_period=10**6)
  said = capsys.readouterr().out
  assert re.search(r"maxtext: 0\.001 s after the signal step \d+ is not saved yet, and none was saved by this", said)
  assert "was saved" in said


def told_after(line: str, keys: dict) -> tuple[int, str]:
  """Exit code and output of two processes that get SIGTERM once one of them has printed that."""
  words = [
    "launch",
    "--processes",
    "2",
    "--",
    "train",
    *(f"{key}={value}" for key, value in (TINY | KEYS | keys).items()),
  ]
  command, env, said = [sys.executable, "-m", "maxtext.cli", *words], os.environ | flags(), []
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
    for text in process.stdout:
      said.append(text)
      if line in text:
        break
    process.send_signal(signal.SIGTERM)
    try:
      said.append(process.communicate(timeout=60)[0])
    finally:
      process.kill()
  return process.returncode, "".join(said)


@pytest.mark.slow
@pytest.mark.mesh
def test_processes_with_nothing_to_save_end_at_once(tmp_path):
  """JAX's preemption service would keep the signal for a step on which nobody asks about it."""
  keys = {"steps": 10**6, "base_output_directory": tmp_path, "ici_fsdp_parallelism": 2}
  assert told_after("] step       2/", keys)[0] == 143


@pytest.mark.slow
@pytest.mark.mesh
def test_a_notice_after_a_resume_is_not_lost(tmp_path):
  """Orbax and the loop would ask JAX's service with other counts: by the step, and by how often it was asked."""
  keys = {"base_output_directory": tmp_path, "ici_fsdp_parallelism": 2, "enable_checkpointing": True, "steps": 10**6,
          "checkpoint_period": 1, "async_checkpointing": False, "max_num_checkpoints_to_keep": 2}  # fmt: skip
  for last in (8, 16):
    code, said = told_after(f"] step{last:>8}/", keys)
    assert code == 143, said
    assert "s after SIGTERM." in said
