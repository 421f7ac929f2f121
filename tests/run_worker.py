"""One process of a run to which something happens at a known step, because it does it to itself.

python -m tests.run_worker killed STEP FOLDERS key=value ...     is killed after STEP, once FOLDERS (a,b) are there
python -m tests.run_worker limited STEP FOLDER key=value ...     process 1 cannot write STEP, after FOLDER is there
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax

import maxtext
from maxtext.configs.loader import parse_assignments, resolve
from maxtext.training.callbacks.base import Callback


def wait_for(folders: str) -> None:
  while not all(Path(folder).exists() for folder in folders.split(",")):
    time.sleep(0.01)


class Killed(Callback):
  def __init__(self, step: int, folders: str) -> None:
    self._step, self._folders = step, folders

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    if step == self._step:
      wait_for(self._folders)
      os.kill(os.getpid(), signal.SIGKILL)


class Limited(Callback):
  def __init__(self, step: int, folder: str) -> None:
    self._step, self._folder = step, folder

  def due(self, step: int) -> bool:
    return jax.process_index() == 1

  def on_update(self, step, state, position, figures) -> bool:
    if step == self._step - 1:
      wait_for(self._folder)
      resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return False


if __name__ == "__main__":
  kind, step, folders, *words = sys.argv[1:]
  callback = {"killed": Killed, "limited": Limited}[kind](int(step), folders)
  maxtext.train(resolve(None, os.environ, parse_assignments(words)).config, callbacks=[callback])
