"""A run's folder: its configuration, its metrics and its report."""

import errno
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from maxtext.configs import ConfigError
from maxtext.configs.secrets import redact_arguments
from maxtext.observe.growing_file import is_permanent
from maxtext.observe.report import write_report
from maxtext.observe.run_files import NOT_COMPARED
from maxtext.storage.atomic import write_atomically

_LOG = logging.getLogger(__name__)

# What a run writes before its first step has finished.
_START_FILES = {
  "checkpoints", "config.json", "journal", "lease.json", "metrics.jsonl", "rollouts.jsonl", "run.json", "tensorboard",
  "tokenizer",
}  # fmt: skip
_LIBRARIES = ("maxtext", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "libtpu")


@dataclass(frozen=True)
class RunDirectory:
  """`<base>/<name>/` with config.json, run.json, metrics.jsonl and report.html.

  Attributes:
    path: the folder, on a disk.
    store: the run's folder in an object store, if the base is in one. Files there cannot grow, so the run writes to
      ./runs, and keys say what is copied to the store.
  """

  path: Path
  store: epath.Path | None

  @staticmethod
  def of(base: str, name: str) -> "RunDirectory":
    """The folder of a run; an empty base is ./runs."""
    return RunDirectory(_disk(base) / name, epath.Path(base) / name if "://" in base else None)

  def check_writable(self) -> None:
    """Raises `ConfigError` where the folder could not be created or written. Leaves nothing there."""
    try:
      with tempfile.TemporaryFile(dir=nearest_folder(self.path)):
        pass
    except OSError as error:
      if is_permanent(error):
        self._report_not_written(error)

  def make(self) -> None:
    """Creates the folder. A folder that cannot be written is reported here, before anything is computed."""
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      if not os.access(self.path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
      self._report_not_written(error)

  def begin(self, config: Mapping[str, Any] | None, parameters: int | None = None) -> None:
    """Writes run.json and config.json, once the run has started: a start that fails must not replace the files of an
    earlier run.

    Args:
      config: every key with its value and origin, or None to leave it out.
      parameters: how many the model has, or None to leave it out.
    """
    facts: dict[str, Any] = {
      "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
      "command": redact_arguments(sys.argv),
      "python": platform.python_version(),
      "versions": library_versions(),
      "hardware": _hardware(),
    }
    if parameters is not None:
      facts["parameters"] = parameters
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      _replace(self.path / "run.json", _json(facts))
      if config is not None:
        _replace(self.path / "config.json", _json(config))
    except OSError as error:
      self._report_not_written(error)

  def last_config(self) -> Mapping[str, Any]:
    """The config.json of the last start of this run; empty if there is none or it cannot be read."""
    try:
      found = json.loads((self.path / "config.json").read_text())
    except (OSError, ValueError):
      return {}
    return found if isinstance(found, dict) else {}

  def store_config(self, config: Mapping[str, Any]) -> None:
    """Writes the configuration into the store too."""
    assert self.store is not None
    (self.store / "config.json").write_text(_json(config))

  @property
  def metrics(self) -> Path:
    """The file with the metrics of every step."""
    return self.path / "metrics.jsonl"

  def finish(self) -> Path:
    """Writes the report; returns its path."""
    return write_report([self.path], self.path / "report.html")

  @contextmanager
  def removed_if_unused(self) -> Iterator[None]:
    """Inside it, a start that fails before its first step leaves nothing behind: neither the folder, if it was not
    there before, nor folders above it that were created for it. An empty folder is removed in any case."""
    absent = [path for path in (self.path, *self.path.parents) if not path.exists()]

    def discard(failed: bool = True) -> None:
      if failed and self.path in absent and self._is_without_results():
        shutil.rmtree(self.path, ignore_errors=True)
      for path in absent or [self.path]:
        with suppress(OSError):
          path.rmdir()

    _DISCARDS.append(discard)
    failed = True
    try:
      yield
      failed = False
    finally:
      _DISCARDS.remove(discard)
      discard(failed)

  def _is_without_results(self) -> bool:
    """Whether the folder has no finished step, no checkpoint, and no file that a start does not write."""
    try:
      names = {path.name for path in self.path.iterdir()}
      saved = any((self.path / "checkpoints").iterdir()) if "checkpoints" in names else False
      return names <= _START_FILES and not saved and not ("metrics.jsonl" in names and self.metrics.stat().st_size)
    except OSError:
      return False

  def _report_not_written(self, error: OSError) -> None:
    if is_permanent(error):
      raise ConfigError(
        f"base_output_directory={self.path.parent} cannot be written: {error.strerror}. Name one that you can write to."
      ) from None
    _LOG.warning(f"maxtext: run.json and config.json cannot be written to {self.path}: {error.strerror}.")


def nearest_folder(path: Path) -> Path:
  """The folder, or the nearest one above it that is there."""
  path = path.absolute()
  return next(there for there in (path, *path.parents) if there.exists())


def discard_starting_runs() -> None:
  """Removes what runs of this process without a finished step have written, before it ends without unwinding."""
  for discard in _DISCARDS:
    discard()


_DISCARDS: list[Callable[[], None]] = []


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """The differences between two config.json files, as 'key old -> new', without the keys of storage and logging."""
  values = json.loads(_json({key: entry["value"] for key, entry in now.items() if key not in NOT_COMPARED}))
  old = {key: entry["value"] for key, entry in before.items() if isinstance(entry, dict) and "value" in entry}
  changed = {key: (old[key], value) for key, value in values.items() if key in old and old[key] != value}
  return [f"{key} {_short(was)} -> {_short(value)}" for key, (was, value) in changed.items()]


def library_versions() -> dict[str, str]:
  """The installed versions of the libraries that decide what a run computes and saves."""
  return {library: version for library in _LIBRARIES if (version := _version(library))}


def new_run_name(base: str, config_name: str) -> str:
  """A new name for a run without one. No run under this base has it, since a run of the same name would be resumed."""
  name = f"{config_name}-{time.strftime('%Y%m%d-%H%M%S')}"
  names = (name, *(f"{name}-{i}" for i in range(2, 1000)))
  runs = (RunDirectory.of(base, name) for name in names)
  return next(run.path.name for run in runs if not run.path.exists() and not (run.store and run.store.exists()))


def _hardware() -> dict[str, Any]:
  """The devices of all processes."""
  import jax

  devices = jax.devices()
  return {"devices": len(devices), "kind": devices[0].device_kind, "processes": jax.process_count()}


def _disk(base: str) -> Path:
  return Path("runs" if "://" in base else base or "runs").expanduser()


def _short(value: Any) -> str:
  text = value if isinstance(value, str) and value else json.dumps(value)
  return text if len(text) <= 60 else f"{text[:57]}..."


def _replace(path: Path, text: str) -> None:
  """Replaces a file atomically; on a full disk the old file stays."""
  write_atomically(path, text.encode(), durable=False, unfinished=path.with_name(f".{path.name}.new"))


def _json(value: Mapping[str, Any]) -> str:
  return json.dumps(value, indent=1, default=str) + "\n"


def _version(library: str) -> str | None:
  try:
    return importlib.metadata.version(library)
  except importlib.metadata.PackageNotFoundError:
    return None
