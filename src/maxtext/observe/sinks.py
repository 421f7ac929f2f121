"""Where the figures of a step go."""

import json
import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from etils import epath

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


_COLUMNS = {
  "loss": "loss {:.4f}",
  "eval_loss": "eval loss {:.4f}",
  "grad_norm": "grad norm {:.3g}",
  "learning_rate": "lr {:.3g}",
  "seconds": "{:.3f} s",
  "tokens_per_second": "{:,.0f} tokens/s",
  "mfu": "MFU {:.1%}",
}


class Console:
  """A line per step: the first ten, then one in `period`, and the last. On a terminal, a bar with the time left."""

  def __init__(self, period: int, steps: range, out: TextIO | None = None) -> None:
    self._period, self._steps, self._out = period, steps, out or sys.stdout
    self._bar = _progress_bar(steps) if self._out.isatty() else None

  def write(self, step: int, figures: Figures) -> None:
    last = self._steps.stop
    if step <= self._steps.start + 10 or step % self._period == 0 or step == last or "eval_loss" in figures:
      measured = [text.format(figures[name]) for name, text in _COLUMNS.items() if name in figures]
      self._line("  ".join([f"step {step:>{len(str(last))}}/{last}", *measured]))
    if self._bar is not None:
      self._bar.update(self._bar.task_ids[0], completed=step)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.stop()

  def _line(self, text: str) -> None:
    if self._bar is not None:
      self._bar.console.print(text, highlight=False)
    else:
      print(text, file=self._out, flush=True)


class JsonLines:
  """One JSON object per step, appended to a file; what is not a number is null.

  A run that goes on after step `after` writes the later ones again, so those that are there go.
  """

  def __init__(self, path: str | Path, after: int = 0) -> None:
    try:
      Path(path).parent.mkdir(parents=True, exist_ok=True)
      _forget_later(Path(path), after)
      self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()
    except OSError as error:
      raise ConfigError(f"metrics_file={path} cannot be written: {error.strerror}.") from None

  def write(self, step: int, figures: Figures) -> None:
    self._file.write(_line(step, figures))

  def close(self) -> None:
    self._file.close()


class StoredLines:
  """The same lines in a folder of an object store, where files cannot grow: one for every `period` steps."""

  def __init__(self, folder: epath.Path, period: int, after: int = 0) -> None:
    self._folder, self._period, self._lines = folder, period, list[str]()
    for path in folder.glob("*.jsonl") if folder.exists() else ():
      lines = path.read_text().splitlines(keepends=True)
      kept = _until(lines, after)
      if not kept:
        path.unlink()
      elif len(kept) < len(lines):
        path.write_text("".join(kept))

  def write(self, step: int, figures: Figures) -> None:
    self._lines.append(_line(step, figures))
    if step % self._period == 0:
      self._store()

  def close(self) -> None:
    if self._lines:
      self._store()

  def _store(self) -> None:
    first = json.loads(self._lines[0])["step"]
    try:
      (self._folder / f"from-step-{first:09}.jsonl").write_text("".join(self._lines))
    except Exception as error:  # gcsfs has many: figures are not worth a run, and the next bring these along
      print(f"maxtext: figures from step {first} could not be stored: {error}", flush=True)
    else:
      self._lines = []


class TensorBoard:
  """Event files that `tensorboard --logdir` shows. The library is slow to load, so that is done beside compiling."""

  def __init__(self, folder: Path) -> None:
    self._writer: Any = None
    self._loading = threading.Thread(target=self._load, args=(str(folder),))
    self._loading.start()

  def _load(self, folder: str) -> None:
    from tensorboardX import SummaryWriter

    self._writer = SummaryWriter(folder)

  def write(self, step: int, figures: Figures) -> None:
    self._loading.join()
    for name, value in figures.items():
      self._writer.add_scalar(name, value, step)

  def close(self) -> None:
    self._loading.join()
    self._writer.close()


class Prometheus:
  """The last figures at http://<host>:<port>/metrics, for a monitor that comes by."""

  def __init__(self, port: int) -> None:
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    self._registry, self._gauge, self._gauges = CollectorRegistry(), Gauge, {}  # type: ignore[var-annotated]
    try:
      self._server, _ = start_http_server(port, registry=self._registry)
    except OSError as error:
      raise ConfigError(f"prometheus_port={port} cannot be listened on: {error.strerror}.") from None

  def write(self, step: int, figures: Figures) -> None:
    for name, value in {"step": step, **figures}.items():
      if name not in self._gauges:
        self._gauges[name] = self._gauge(f"maxtext_{name}", f"{name} of the last step", registry=self._registry)
      self._gauges[name].set(value)

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()


def _line(step: int, figures: Figures) -> str:
  finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
  return json.dumps({"step": step, **finite}) + "\n"


def _until(lines: list[str], after: int) -> list[str]:
  """Without the lines of steps after that one, and a last line that a killed process left half-written."""
  return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= after]


def _forget_later(path: Path, after: int) -> None:
  if not path.exists():
    return
  lines = path.read_text().splitlines(keepends=True)
  kept = _until(lines, after)
  if len(kept) < len(lines):
    shorter = path.with_name(f"{path.name}.tmp")
    shorter.write_text("".join(kept))
    shorter.replace(path)


def _progress_bar(steps: range) -> Any:
  from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

  bar = Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
  bar.add_task("", total=steps.stop, completed=steps.start)
  bar.start()
  return bar
