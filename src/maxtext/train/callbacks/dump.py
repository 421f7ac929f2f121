"""Files that a compiler or a tracer left in a local folder, brought into the run's."""

import shutil
from pathlib import Path

from maxtext.train.callbacks.base import Callback


class Dump(Callback):
  """Brings files whose names hold a text from `source` to `target`, after a step, or at the end where that is -1."""

  def __init__(self, source: str, target: Path, holding: str, step: int, delete: bool) -> None:
    self._source, self._target, self._holding = Path(source), target, holding
    self._step, self._bring, self._done = step, shutil.move if delete else shutil.copy2, False

  def on_step(self, step: int, figures: dict[str, float]) -> None:
    if step == self._step:
      self.close()

  def close(self) -> None:
    if self._done:
      return
    self._done = True
    self._target.mkdir(parents=True, exist_ok=True)
    for path in self._source.glob(f"*{self._holding}*"):
      self._bring(path, self._target / path.name)
