"""Files that a compiler or a tracer left in a local folder, brought into the run's, or into a bucket."""

from pathlib import Path

from etils import epath

from maxtext.training.callbacks.base import Callback


class Dump(Callback):
  """Brings files whose names hold a text from `source` to `target`, after a step, or at the end where that is -1."""

  def __init__(self, source: Path, target: epath.Path, holding: str, step: int, delete: bool) -> None:
    self._source, self._target, self._holding = source, target, holding
    self._step, self._delete, self._done = step, delete, False

  def on_step(self, step: int, metrics: dict[str, float]) -> None:
    if step == self._step:
      self.close()

  def close(self) -> None:
    if self._done:
      return
    self._done = True
    found = [path for path in self._source.rglob("*") if self._holding in path.name and path.is_file()]
    for path in found:
      target = self._target / path.relative_to(self._source)
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_bytes(path.read_bytes())
      if self._delete:
        path.unlink()
