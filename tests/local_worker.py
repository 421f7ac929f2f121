"""One process of a run with local checkpoints, for tests to kill: it does so itself, so that the step is known.

python -m tests.local_worker STEP FOLDERS key=value ...     ends by SIGKILL after STEP, once FOLDERS (a,b) are there
"""

import os
import signal
import sys
import time
from pathlib import Path

import maxtext
from maxtext.configs.loader import parse_assignments, resolve
from maxtext.train.callbacks.base import Callback


class KilledAfter(Callback):
  def __init__(self, step: int, folders: list[Path]) -> None:
    self._step, self._folders = step, folders

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    if step == self._step:
      while not all(folder.exists() for folder in self._folders):
        time.sleep(0.01)
      os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
  config = resolve(None, os.environ, parse_assignments(sys.argv[3:])).config
  maxtext.train(config, [KilledAfter(int(sys.argv[1]), [Path(folder) for folder in sys.argv[2].split(",")])])
