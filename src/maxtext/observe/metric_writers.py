"""Metric writers: console, JSON lines, object stores, TensorBoard and Prometheus."""

import json
import logging
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
from maxtext.logs import ON_STDERR
from maxtext.observe.growing_file import GrowingFile, is_permanent
from maxtext.observe.metric_lines import format_line, lines_up_to, truncate_after

_LOG = logging.getLogger(__name__)

Metrics = Mapping[str, float]

_MAX_PENDING_LINES = 100_000  # kept while an object store fails


class MetricWriter(Protocol):
  """Receives the metrics of every finished step; steps count from 1."""

  def write(self, step: int, metrics: Metrics) -> None:
    """Writes the metrics of one step."""
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


class ConsoleWriter:
  """Writes a line for the first ten steps, every `period`-th and the last. On a terminal, also a progress bar."""

  def __init__(self, period: int, steps: range, out: TextIO | None = None) -> None:
    self._period, self._steps, self._out = period, steps, out or sys.stdout
    self._bar = _progress_bar(steps) if self._out.isatty() else None

  def write(self, step: int, metrics: Metrics) -> None:
    last = self._steps.stop
    if step <= self._steps.start + 10 or step % self._period == 0 or step == last or "eval_loss" in metrics:
      measured = [text.format(metrics[name]) for name, text in _COLUMNS.items() if name in metrics]
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
      except BrokenPipeError:  # the reader has closed the output, which ends a command
        raise
      except OSError:  # a file on a full disk
        pass


class FaultTolerantWriter:
  """A writer whose failures do not end a run. The first failure is logged, and every step tries again."""

  def __init__(self, writer: MetricWriter, name: str) -> None:
    self._writer, self._name, self._warned = writer, name, False

  def write(self, step: int, metrics: Metrics) -> None:
    try:
      self._writer.write(step, metrics)
    except Exception as error:  # of disks, sockets and object stores: a run does not fail for its metrics
      if not self._warned:
        self._warned = True
        warn(f"{self._name} cannot be written: {reason(error)}. The run continues, and every step tries again.")

  def close(self) -> None:
    try:
      self._writer.close()
    except Exception as error:
      warn(f"{self._name} misses the last metrics: {reason(error)}.")


class JsonLinesWriter:
  """Appends one JSON object per step to a file; values that are not finite are null.

  A run that resumes after step `after` writes later steps again, so their old lines are removed. The first line has
  `started`, so that readers know where the run was started again.
  """

  def __init__(self, path: str | Path, after: int = 0) -> None:
    self._started: float | None = time.time()
    self._file = GrowingFile(Path(path), lambda path: truncate_after(path, after))
    try:
      self._file.append(b"")
    except OSError as error:
      if is_permanent(error):
        raise ConfigError(f"metrics_file={path} cannot be written: {error.strerror}.") from None

  def write(self, step: int, metrics: Metrics) -> None:
    line, self._started = format_line(step, metrics, self._started), None
    self._file.append(line.encode())

  def close(self) -> None:
    self._file.close()


class ObjectStoreWriter:
  """Writes the same lines to a folder of an object store, where files cannot grow: a file for every `period` steps.

  A store may be slow, so a thread writes to it. The run waits for it only at its end, at most `patience` seconds. Lines
  that could not be written go into the next file.
  """

  def __init__(self, folder: epath.Path, period: int, after: int = 0, patience: float = 30.0) -> None:
    self._folder, self._period, self._after, self._patience = folder, period, after, patience
    self._lines: list[str] = []
    self._error: Exception | None = None
    self._flush_due, self._closing = True, False
    self._changed = threading.Condition()
    self._thread = threading.Thread(target=self._serve, daemon=True)
    self._thread.start()

  def write(self, step: int, metrics: Metrics) -> None:
    with self._changed:
      if len(self._lines) < _MAX_PENDING_LINES:
        self._lines.append(format_line(step, metrics))
      self._flush_due |= step % self._period == 0
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
        self._changed.wait_for(lambda: self._flush_due or self._closing)
        self._flush_due, last, lines = False, self._closing, list(self._lines)
      try:
        if not cut:
          self._remove_after()
          cut = True
        if lines:
          first = json.loads(lines[0])["step"]
          (self._folder / f"from-step-{first:09}.jsonl").write_text("".join(lines))
      except Exception as error:  # gcsfs raises many kinds
        self._error = error
      else:
        with self._changed:
          del self._lines[: len(lines)]
      if last:
        return

  def _remove_after(self) -> None:
    """Removes the lines of steps that a resumed run will write again."""
    for path in self._folder.glob("*.jsonl") if self._folder.exists() else ():
      text = path.read_bytes().decode(errors="replace")
      kept = lines_up_to(text, self._after)
      if not kept:
        path.unlink()
      elif kept != text:
        path.write_text(kept)


class TensorBoardWriter:
  """Writes event files for `tensorboard --logdir`. The library is slow to import, so a thread does it meanwhile.

  Only the message classes of the library are used: its own writer hangs after a full disk.
  """

  def __init__(self, folder: Path) -> None:
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    self._file, self._started = GrowingFile(folder / name), False
    self._loading = threading.Thread(target=_load_tensorboard, daemon=True)
    self._loading.start()

  def write(self, step: int, metrics: Metrics) -> None:
    self._loading.join()
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    data, now = b"", time.time()
    if not self._started:
      data, self._started = _framed_record(Event(wall_time=now, file_version="brain.Event:2").SerializeToString()), True
    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    self._file.append(
      data + _framed_record(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())
    )

  def close(self) -> None:
    self._loading.join()
    self._file.close()


PROMETHEUS_ADDRESS = "MAXTEXT_PROMETHEUS_ADDRESS"


class PrometheusWriter:
  """Serves the latest metrics at http://<host>:<port>/metrics, as soon as the port is free.

  It listens on `MAXTEXT_PROMETHEUS_ADDRESS` from the environment. Without it, a run on one machine listens on the
  loopback address, and a run on several machines on all addresses, since its monitor is elsewhere.
  """

  def __init__(self, port: int) -> None:
    from prometheus_client import CollectorRegistry, Gauge

    self._address = os.environ.get(PROMETHEUS_ADDRESS) or ("127.0.0.1" if _on_one_machine() else "0.0.0.0")

    self._port = port
    self._server: Any = None
    self._registry, self._gauge, self._gauges = CollectorRegistry(), Gauge, {}  # type: ignore[var-annotated]

  def write(self, step: int, metrics: Metrics) -> None:
    for name, value in {"step": step, **metrics}.items():
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
  """The message of an error, in one line."""
  text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
  return " ".join(text.split()) or type(error).__name__


def _on_one_machine() -> bool:
  """Whether all processes of the run are on this machine: there is one, or the coordinator is on a loopback address."""
  import jax

  return jax.process_count() == 1 or os.environ.get("JAX_COORDINATOR_ADDRESS", "").startswith(("127.", "localhost:"))


def warn(message: str, *, on_stderr: bool = False) -> None:
  """Logs a warning. A console that cannot be written, such as a closed pipe, does not end the run."""
  with suppress(OSError):
    _LOG.warning(f"maxtext: {message}", extra=ON_STDERR if on_stderr else None)


def _load_tensorboard() -> None:
  with suppress(ImportError):  # the next import of it raises
    import tensorboardX.proto.event_pb2  # noqa: F401


def _framed_record(data: bytes) -> bytes:
  """A TFRecord: length, its checksum, the data, its checksum."""
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
