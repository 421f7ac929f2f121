"""Where the figures of a step go."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

from maxtext.configs import ConfigError

Figures = Mapping[str, float]


class Sink(Protocol):
  """Receives the figures of every finished step; steps count from 1."""

  def write(self, step: int, figures: Figures) -> None:
    """Takes one step."""
    ...

  def close(self) -> None:
    """Called once, however the run ends."""
    ...


class Console:
  """A line per step: the first ten, then one in `period`, and the last."""

  def __init__(self, period: int, steps: int, out: TextIO = sys.stdout) -> None:
    self._period, self._steps, self._out = period, steps, out

  def write(self, step: int, figures: Figures) -> None:
    if step <= 10 or step % self._period == 0 or step == self._steps:
      print(
        f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {figures['loss']:.4f}  "
        f"grad norm {figures['grad_norm']:.3g}  lr {figures['learning_rate']:.3g}  "
        f"{figures['seconds']:.3f} s  {figures['tokens_per_second']:,.0f} tokens/s",
        file=self._out,
        flush=True,
      )

  def close(self) -> None:
    pass


class JsonLines:
  """One JSON object per step, appended to a file; what is not a number is null."""

  def __init__(self, path: str) -> None:
    try:
      Path(path).parent.mkdir(parents=True, exist_ok=True)
      self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()
    except OSError as error:
      raise ConfigError(f"metrics_file={path} cannot be written: {error.strerror}.") from None

  def write(self, step: int, figures: Figures) -> None:
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    self._file.write(json.dumps({"step": step, **finite}) + "\n")

  def close(self) -> None:
    self._file.close()
