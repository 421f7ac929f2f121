"""Reads the files of a run's folder, also while the run writes them. Imports no JAX.

Nothing in a folder is trusted: files may be missing, cut off in the middle of a line, replaced, or removed meanwhile.
"""

import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxtext.configs import ConfigError
from maxtext.configs.secrets import redact_arguments, redact_value
from maxtext.configs.types import DerivedValues
from maxtext.observe.evaluation_records import EVALUATIONS, EvaluationRecord, read_evaluations
from maxtext.observe.goodput_journal import GoodputSummary, read_goodput
from maxtext.observe.metric_lines import STARTED, parse_line

NOT_COMPARED = {"run_name", "base_output_directory", "jax_cache_dir", "log_config", *DerivedValues.model_fields}
"""Keys of storage and logging, and those that follow from other keys: runs are not compared by them."""

_RUN_FILES = ("metrics.jsonl", "run.json", "config.json")
_SPEEDS = {"tokens_per_second", "mfu", "tflops_per_device", "step_time_seconds", "data_wait_seconds"}
_TAIL_BYTES = 256  # of the file's text before the position that was read up to
_MAX_METRICS = 200
_MAX_STEP = 2**53  # beyond it a script cannot count
_MAX_SAMPLES, _MAX_SAMPLE_BYTES = 200, 2**21


@dataclass
class Series:
  """The values of one metric.

  Attributes:
    steps: the steps where the metric is a finite number, ascending.
    values: of these steps.
    not_finite: the steps where it was written as NaN, as an infinity or as null.
  """

  steps: list[int] = field(default_factory=list)
  values: list[float] = field(default_factory=list)
  not_finite: list[int] = field(default_factory=list)

  def without(self, steps: Iterable[int]) -> "Series":
    """A copy without the values of some steps."""
    copy = Series(self.steps.copy(), self.values.copy(), self.not_finite)
    for step in steps:
      i = bisect_left(copy.steps, step)
      if i < len(copy.steps) and copy.steps[i] == step:
        del copy.steps[i], copy.values[i]
    return copy

  def truncate(self, step: int) -> None:
    """Removes this step and later ones."""
    end = bisect_left(self.steps, step)
    del self.steps[end:], self.values[end:], self.not_finite[bisect_left(self.not_finite, step) :]


class MetricsFile:
  """The metrics of a run, which `update` reads as the file grows.

  A line whose step is not after the one before it means that the run went back to an earlier step: it replaces the
  lines from that step on.

  Attributes:
    series: by the metric's name.
    starts: the first step after each start of the run.
    steps: how many steps there are.
    last_step: the last step; 0 if there is none.
  """

  def __init__(self, path: Path) -> None:
    self._path = path
    self._position, self._tail = 0, b""
    self._reset()

  def update(self) -> bool:
    """Reads complete lines that are new; returns whether anything changed. Raises `OSError` if it cannot be read."""
    if not self._path.is_file():  # a pipe would block
      raise FileNotFoundError(2, os.strerror(2))
    reset = False
    with self._path.open("rb") as file:
      file.seek(max(0, self._position - len(self._tail)))
      if file.read(len(self._tail)) != self._tail:  # a resumed run has removed lines, or the file is another one
        self._reset()
        file.seek(0)
        reset = True
      data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    self._position += len(data)
    self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
    for line in data.splitlines():
      row = parse_line(line.decode(errors="replace"))
      if row is not None and 0 <= (row["step"] or 0) <= _MAX_STEP:
        self._add(int(row.pop("step") or 0), row)
    return reset or bool(data)

  def _reset(self) -> None:
    self.series: dict[str, Series] = {}
    self.starts: list[int] = []
    self._steps: list[int] = []
    self._position, self._tail = 0, b""

  @property
  def steps(self) -> int:
    return len(self._steps)

  @property
  def last_step(self) -> int:
    return self._steps[-1] if self._steps else 0

  def _add(self, step: int, row: Mapping[str, float | None]) -> None:
    restarted = not self._steps or step <= self._steps[-1] or row.get(STARTED) is not None
    if self._steps and step <= self._steps[-1]:
      for known in self.series.values():
        known.truncate(step)
      for steps in (self._steps, self.starts):
        del steps[bisect_left(steps, step) :]
    self._steps.append(step)
    if restarted:
      self.starts.append(step)
    for name, value in row.items():
      series = self.series.get(name)
      if series is None:
        if name == STARTED or len(self.series) >= _MAX_METRICS:
          continue
        series = self.series[name] = Series()
      if (number := _finite(value)) is None:
        series.not_finite.append(step)
      else:
        series.steps.append(step)
        series.values.append(number)


@dataclass(frozen=True)
class SampleRecord:
  """A text that the model generated during the run."""

  step: int
  prompt: str
  text: str
  note: str = ""  # how it was rewarded


class RunFiles:
  """A run's folder. `update` reads it; what has gone or cannot be read keeps its last state.

  Attributes:
    name: of the folder.
    metrics: of every step.
    facts: of run.json; empty if it cannot be read.
    config: {key: {"value", "from"}} of config.json; empty if it cannot be read.
    samples: the last of samples.jsonl, in the order of the file.
    rollouts: the last of rollouts.jsonl, likewise.
    evaluations: the last of evaluations.jsonl, likewise.
    problem: why the metrics cannot be read; empty if they can.
    modified: when the metrics last changed, in seconds since the epoch; 0 if there are none.
  """

  def __init__(self, folder: Path) -> None:
    self._folder = folder
    self._stamps: dict[str, tuple[int, int, int]] = {}
    self.name = folder.resolve().name
    self.metrics = MetricsFile(folder / "metrics.jsonl")
    self.facts: dict[str, Any] = {}
    self.config: dict[str, dict[str, Any]] = {}
    self.samples: list[SampleRecord] = []
    self.rollouts: list[SampleRecord] = []
    self.evaluations: list[EvaluationRecord] = []
    self.problem, self.modified = "", 0.0

  @property
  def parent(self) -> str:
    """The name of the folder around it."""
    return self._folder.resolve().parent.name

  def check(self) -> None:
    """Raises `ConfigError` if this is not a run's folder."""
    if not any((self._folder / name).is_file() for name in _RUN_FILES):
      reason = "it has no metrics.jsonl" if self._folder.is_dir() else "it does not exist"
      raise ConfigError(f"{self._folder} is not a run's folder: {reason}.")

  def update(self) -> bool:
    """Reads what is new; returns whether anything changed."""
    problem, changed = "", False
    try:
      changed = self.metrics.update()
      self.modified = (self._folder / "metrics.jsonl").stat().st_mtime
    except OSError as error:
      there = self._folder.is_dir()
      problem = (error.strerror or str(error)) if there else "The folder has been removed"
      problem = "" if there and isinstance(error, FileNotFoundError) and not self.metrics.steps else problem
    changed |= problem != self.problem
    self.problem = problem
    if self._is_new("run.json"):
      self.facts, changed = _read_object(self._folder / "run.json") or self.facts, True
    if self._is_new("config.json"):
      self.config, changed = _config(_read_object(self._folder / "config.json")) or self.config, True
    if self._is_new("samples.jsonl"):
      self.samples, changed = _read_samples(self._folder / "samples.jsonl"), True
    if self._is_new("rollouts.jsonl"):
      self.rollouts, changed = _read_samples(self._folder / "rollouts.jsonl"), True
    if self._is_new(EVALUATIONS):
      self.evaluations, changed = read_evaluations(self._folder), True
    return changed

  @property
  def command(self) -> list[str]:
    """The arguments of the command, without secrets."""
    found = self.facts.get("command")
    return redact_arguments(str(word) for word in found) if isinstance(found, list) else []

  def value(self, key: str) -> Any:
    """A key's value, or None if it is not known."""
    return self.config[key]["value"] if key in self.config else None

  def goodput(self) -> GoodputSummary | None:
    """Where the time went, by the journal; None if there is none."""
    return read_goodput(self._folder)

  @property
  def steps_asked(self) -> int | None:
    """How many steps the run is to do, or None if that is not known."""
    steps = self.value("steps")
    steps = self.value("learning_rate_schedule_steps") if steps == -1 else steps
    return steps if isinstance(steps, int) and steps > 0 else None

  def settled(self, metric: str) -> Series:
    """A metric; speeds and times without the first steps after starts, which compile."""
    series = self.metrics.series.get(metric, Series())
    return series.without(self.metrics.starts) if metric in _SPEEDS else series

  def _is_new(self, name: str) -> bool:
    """Whether a file is there and differs from the one that was seen last."""
    path = self._folder / name
    try:
      stat = path.stat()
    except OSError:
      return False
    stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
    if self._stamps.get(name) == stamp or not path.is_file():
      return False
    self._stamps[name] = stamp
    return True


def _finite(value: float | None) -> float | None:
  try:
    return number if value is not None and math.isfinite(number := float(value)) else None
  except OverflowError:  # an integer of hundreds of digits
    return None


def _read_object(path: Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_bytes())
  except (OSError, ValueError, RecursionError):
    return {}
  return found if isinstance(found, dict) else {}


def _config(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Entries of the right form; secrets are redacted once more, for runs of other versions."""
  return {
    key: {"value": redact_value(key, entry["value"]), "from": str(entry.get("from", ""))}
    for key, entry in found.items()
    if isinstance(entry, dict) and "value" in entry
  }


def _read_samples(path: Path) -> list[SampleRecord]:
  try:
    with path.open("rb") as file:
      file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_SAMPLE_BYTES))
      lines = file.read().splitlines()
  except OSError:
    return []
  samples: list[SampleRecord] = []
  for line in reversed(lines):  # the last ones count
    if (sample := _sample(line)) is not None:
      samples.append(sample)
    if len(samples) == _MAX_SAMPLES:
      break
  return samples[::-1]


def _sample(line: bytes) -> SampleRecord | None:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not isinstance(row.get("text"), str):
    return None
  prompt = row.get("prompt")
  figures = [f"{name} {row[name]:.3g}" for name in ("reward", "advantage") if isinstance(row.get(name), float)]
  return SampleRecord(row["step"], prompt if isinstance(prompt, str) else "", row["text"], ", ".join(figures))
