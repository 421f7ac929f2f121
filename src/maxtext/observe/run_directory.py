"""A run's folder: what it was, what it did, and a page to look at."""

import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError
from maxtext.observe.report import write_report

_LIBRARIES = ("maxtext", "jax", "jaxlib", "flax", "optax", "numpy", "libtpu")


@dataclass(frozen=True)
class RunDirectory:
  """`<base>/<name>/` with config.json, run.json, metrics.jsonl and report.html."""

  path: Path

  @staticmethod
  def create(base: str, name: str, config: Mapping[str, Any] | None) -> "RunDirectory":
    """Makes the folder and writes down what the run is; an empty base is ./runs.

    Args:
      config: every key with its value and origin, or None to leave it out.
    """
    run = RunDirectory(Path(base or "runs") / name)
    facts = {
      "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
      "command": sys.argv,
      "python": platform.python_version(),
      "versions": {library: version for library in _LIBRARIES if (version := _version(library))},
    }
    try:
      run.path.mkdir(parents=True, exist_ok=True)
      (run.path / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
      if config is not None:
        (run.path / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    except OSError as error:
      raise ConfigError(f"base_output_directory={base or 'runs'} cannot be written: {error.strerror}.") from None
    return run

  @property
  def metrics(self) -> Path:
    """Figures of every step."""
    return self.path / "metrics.jsonl"

  def finish(self) -> Path:
    """Draws the report; returns where it is."""
    return write_report([self.path], self.path / "report.html")


def readable_name(base: str, model: str) -> str:
  """A name for a run that was given none, and that no run under this base has: a run of the same name would go on."""
  name = f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"
  names = (name, *(f"{name}-{i}" for i in range(2, 1000)))
  return next(name for name in names if not (Path(base or "runs") / name).exists())


def _version(library: str) -> str | None:
  try:
    return importlib.metadata.version(library)
  except importlib.metadata.PackageNotFoundError:
    return None
