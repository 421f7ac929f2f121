"""Where the figures of a step go."""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from etils import epath

from maxtext.configs import ConfigError
from maxtext.observe.figure_lines import cut_after, format_line, lines_until
from maxtext.observe.growing_file import GrowingFile, is_mistake

Figures = Mapping[str, float]

_MOST_LINES = 100_000  # that wait for an object store


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
  "step_time_seconds": "{:.3f} s",
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
      try:
        print(text, file=self._out, flush=True)
      except BrokenPipeError:  # nobody reads any more: that ends a command
        raise
      except OSError:  # a file on a full disk
        pass


class Guarded:
  """A sink whose failures do not end a run: the first is said in one line, and every step tries again."""

  def __init__(self, sink: Sink, name: str) -> None:
    self._sink, self._name, self._said = sink, name, False

  def write(self, step: int, figures: Figures) -> None:
    try:
      self._sink.write(step, figures)
    except Exception as error:  # of disks, sockets and object stores: figures are not worth a run
      if not self._said:
        self._said = True
        say(f"{self._name} cannot be written: {reason(error)}. The run goes on, and every step tries again.")

  def close(self) -> None:
    try:
      self._sink.close()
    except Exception as error:
      say(f"{self._name} misses the last figures: {reason(error)}.")


class JsonLines:
  """One JSON object per step, appended to a file; what is not a number is null.

  A run that goes on after step `after` writes the later ones again, so those that are there go.
  """

  def __init__(self, path: str | Path, after: int = 0) -> None:
    self._file = GrowingFile(Path(path), lambda path: cut_after(path, after))
    try:
      self._file.append(b"")
    except OSError as error:
      if is_mistake(error):
        raise ConfigError(f"metrics_file={path} cannot be written: {error.strerror}.") from None

  def write(self, step: int, figures: Figures) -> None:
    self._file.append(format_line(step, figures).encode())

  def close(self) -> None:
    self._file.close()


class StoredLines:
  """The same lines in a folder of an object store, where files cannot grow: one for every `period` steps.

  A store may take its time, so a thread of its own talks to it and the run never waits but at its end, for `patience`
  seconds. What the store does not take goes into the next file.
  """

  def __init__(self, folder: epath.Path, period: int, after: int = 0, patience: float = 30.0) -> None:
    self._folder, self._period, self._after, self._patience = folder, period, after, patience
    self._lines: list[str] = []
    self._error: Exception | None = None
    self._due, self._closing = True, False
    self._changed = threading.Condition()
    self._thread = threading.Thread(target=self._serve, daemon=True)
    self._thread.start()

  def write(self, step: int, figures: Figures) -> None:
    with self._changed:
      if len(self._lines) < _MOST_LINES:
        self._lines.append(format_line(step, figures))
      self._due |= step % self._period == 0
      self._changed.notify()
      error, self._error = self._error, None
    if error is not None:
      raise error

  def close(self) -> None:
    with self._changed:
      self._closing = True
      self._changed.notify()
    self._thread.join(self._patience)
    if self._lines:
      raise self._error or TimeoutError(f"the store did not answer for {self._patience:g} seconds")

  def _serve(self) -> None:
    cut = False
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._due or self._closing)
        self._due, last, lines = False, self._closing, list(self._lines)
      try:
        if not cut:
          self._cut_after()
          cut = True
        if lines:
          first = json.loads(lines[0])["step"]
          (self._folder / f"from-step-{first:09}.jsonl").write_text("".join(lines))
      except Exception as error:  # gcsfs has many
        self._error = error
      else:
        with self._changed:
          del self._lines[: len(lines)]
      if last:
        return

  def _cut_after(self) -> None:
    """Removes what a run that went back to an earlier step will write again."""
    for path in self._folder.glob("*.jsonl") if self._folder.exists() else ():
      text = path.read_bytes().decode(errors="replace")
      kept = lines_until(text, self._after)
      if not kept:
        path.unlink()
      elif kept != text:
        path.write_text(kept)


class TensorBoard:
  """Event files that `tensorboard --logdir` shows. The library is slow to load, so that is done beside compiling.

  Only its messages are taken from the library: its writer's thread dies on a full disk, and all wait for it then.
  """

  def __init__(self, folder: Path) -> None:
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    self._file, self._begun = GrowingFile(folder / name), False
    self._loading = threading.Thread(target=_load_tensorboard, daemon=True)
    self._loading.start()

  def write(self, step: int, figures: Figures) -> None:
    self._loading.join()
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    data, now = b"", time.time()
    if not self._begun:
      data, self._begun = _record(Event(wall_time=now, file_version="brain.Event:2").SerializeToString()), True
    values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
    self._file.append(
      data + _record(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())
    )

  def close(self) -> None:
    self._loading.join()
    self._file.close()


PROMETHEUS_ADDRESS = "MAXTEXT_PROMETHEUS_ADDRESS"


class Prometheus:
  """The last figures at http://<host>:<port>/metrics, for a monitor that comes by; once the port is free.

  It listens where `MAXTEXT_PROMETHEUS_ADDRESS` in the environment says. Else a run on one machine shows itself to that
  machine alone, and one on several to all, since its monitor is elsewhere.
  """

  def __init__(self, port: int) -> None:
    from prometheus_client import CollectorRegistry, Gauge

    self._address = os.environ.get(PROMETHEUS_ADDRESS) or ("127.0.0.1" if _on_one_machine() else "0.0.0.0")

    self._port = port
    self._server: Any = None
    self._registry, self._gauge, self._gauges = CollectorRegistry(), Gauge, {}  # type: ignore[var-annotated]

  def write(self, step: int, figures: Figures) -> None:
    for name, value in {"step": step, **figures}.items():
      if name not in self._gauges:
        self._gauges[name] = self._gauge(f"maxtext_{name}", f"{name} of the last step", registry=self._registry)
      self._gauges[name].set(value)
    if self._server is None:
      from prometheus_client import start_http_server

      self._server, _ = start_http_server(self._port, self._address, registry=self._registry)

  def close(self) -> None:
    if self._server is not None:
      self._server.shutdown()
      self._server.server_close()


def reason(error: Exception) -> str:
  """What an error says, in a line."""
  said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
  return " ".join(said.split()) or type(error).__name__


def _on_one_machine() -> bool:
  """Whether all processes of the run are here: there is one, or they meet at an address that nobody else reaches."""
  import jax

  return jax.process_count() == 1 or os.environ.get("JAX_COORDINATOR_ADDRESS", "").startswith(("127.", "localhost:"))


def say(what: str, out: TextIO | None = None) -> None:
  """A line of the run's own; the console may be a file on a full disk, and ends nothing by that."""
  with suppress(OSError):
    print(f"maxtext: {what}", file=out, flush=True)


def _load_tensorboard() -> None:
  with suppress(ImportError):  # who needs it next says so
    import tensorboardX.proto.event_pb2  # noqa: F401


def _record(data: bytes) -> bytes:
  """Framed as TensorFlow's records are: length, its checksum, the data, its checksum."""
  from tensorboardX.crc32c import crc32c

  def checksum(part: bytes) -> bytes:
    crc = crc32c(part) & 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

  length = struct.pack("<Q", len(data))
  return length + checksum(length) + data + checksum(data)


def _progress_bar(steps: range) -> Any:
  from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

  bar = Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
  bar.add_task("", total=steps.stop, completed=steps.start)
  bar.start()
  return bar
