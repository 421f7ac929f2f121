"""Where the figures of a step go."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

Figures = Mapping[str, float]


class Sink(Protocol):
  """Receives the figures of every finished step."""

  def write(self, step: int, figures: Figures) -> None:
    """Takes one step."""
    ...

  def close(self) -> None:
    """Called once, however the run ends."""
    ...


class Console:
  """A line per step: the first ten, then one in `period`, and the last."""

  def __init__(self, period: int, steps: int, out: TextIO = sys.stdout) -> None:
    self._period, self._steps, self._out = max(period, 1), steps, out

  def write(self, step: int, figures: Figures) -> None:
    if step < 10 or (step + 1) % self._period == 0 or step + 1 == self._steps:
      print(
        f"step {step + 1:>{len(str(self._steps))}}/{self._steps}  loss {figures['loss']:.4f}  "
        f"grad norm {figures['grad_norm']:.3g}  lr {figures['learning_rate']:.3g}  "
        f"{figures['seconds']:.3f} s  {figures['tokens_per_second']:,.0f} tokens/s",
        file=self._out,
        flush=True,
      )

  def close(self) -> None:
    pass


class JsonLines:
  """One JSON object per step, appended to a file."""

  def __init__(self, path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()

  def write(self, step: int, figures: Figures) -> None:
    self._file.write(json.dumps({"step": step, **figures}) + "\n")

  def close(self) -> None:
    self._file.close()
