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

from etils import epath

from maxtext.configs import ConfigError
from maxtext.observe.report import write_report

_LIBRARIES = ("maxtext", "jax", "jaxlib", "flax", "optax", "numpy", "libtpu")


@dataclass(frozen=True)
class RunDirectory:
  """`<base>/<name>/` with config.json, run.json, metrics.jsonl and report.html.

  Attributes:
    path: the folder, on a disk.
    store: the run's folder in an object store, where the base is in one. Files there cannot grow, so what a run writes
      is in ./runs all the same, and keys say what is brought to the store.
  """

  path: Path
  store: epath.Path | None

  @staticmethod
  def of(base: str, name: str) -> "RunDirectory":
    """Where a run is, or will be; an empty base is ./runs."""
    return RunDirectory(_disk(base) / name, epath.Path(base) / name if "://" in base else None)

  def begin(self, config: Mapping[str, Any] | None) -> None:
    """Makes the folder and writes down what the run is.

    Args:
      config: every key with its value and origin, or None to leave it out.
    """
    facts = {
      "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
      "command": sys.argv,
      "python": platform.python_version(),
      "versions": {library: version for library in _LIBRARIES if (version := _version(library))},
    }
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      (self.path / "run.json").write_text(_json(facts))
      if config is not None:
        (self.path / "config.json").write_text(_json(config))
    except OSError as error:
      raise ConfigError(f"base_output_directory={self.path.parent} cannot be written: {error.strerror}.") from None

  def store_config(self, config: Mapping[str, Any]) -> None:
    """Writes the configuration into the store too."""
    assert self.store is not None
    (self.store / "config.json").write_text(_json(config))

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
  runs = (RunDirectory.of(base, name) for name in names)
  return next(run.path.name for run in runs if not run.path.exists() and not (run.store and run.store.exists()))


def _disk(base: str) -> Path:
  return Path("runs" if "://" in base else base or "runs").expanduser()


def _json(value: Mapping[str, Any]) -> str:
  return json.dumps(value, indent=1, default=str) + "\n"


def _version(library: str) -> str | None:
  try:
    return importlib.metadata.version(library)
  except importlib.metadata.PackageNotFoundError:
    return None
