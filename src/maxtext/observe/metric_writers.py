"""Metric writers: console, JSON lines, object stores, TensorBoard and Prometheus."""

import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

from etils import epath

from maxtext.configs import ConfigError
from maxtext.logs import ON_STDERR
from maxtext.observe.growing_file import GrowingFile, is_permanent
from maxtext.observe.metric_lines import format_line, lines_up_to, truncate_after
from maxtext.status_line import StatusLine, fit

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
  "reward": "reward {:.3f}",
  "eval_pass_rate": "pass rate {:.3f}",
  "grad_norm": "grad norm {:.3g}",
  "learning_rate": "lr {:.3g}",
  "step_time_seconds": "{:.3f} s",
  "tokens_per_second": "{:,.0f} tokens/s",
  "mfu": "MFU {:.1%}",
}


_EVALUATED = ("eval_loss", "eval_pass_rate")
_EARLY_STEPS = (1, 2, 5, 10)  # with lines of their own on a terminal, where the status line has the others


class ConsoleWriter:
  """Writes a line for the first ten steps, every `period`-th and the last.

  On a terminal the status line shows every step, with the time left. There, lines have only what fits.

  Args:
    period: steps from one line to the next.
    steps: of this start of the run.
    out: where lines go; None is stdout.
    status: the status line of the run, if it has one.
    memory: bytes in use and bytes there are, of a device; None where that is not known.
  """

  def __init__(
    self,
    period: int,
    steps: range,
    out: TextIO | None = None,
    status: StatusLine | None = None,
    memory: Callable[[], tuple[int, int] | None] = lambda: None,
  ) -> None:
    self._period, self._steps, self._out = period, steps, out or sys.stdout
    self._status = status if status is not None and status.is_shown else None
    self._memory, self._left = memory, TimeLeft(steps.stop)

  def write(self, step: int, metrics: Metrics) -> None:
    last = self._steps.stop
    if self._status is not None:
      self._left.update(step, time.monotonic())
      parts = status_parts(step, last, metrics, self._memory(), self._left.seconds)
      self._status.show(lambda width: fill(parts, step / max(1, last), width))
    evaluated = not metrics.keys().isdisjoint(_EVALUATED)
    if self._is_early(step - self._steps.start) or step % self._period == 0 or step == last or evaluated:
      measured = [text.format(metrics[name]) for name, text in _COLUMNS.items() if name in metrics]
      columns = [f"step {step:>{len(str(last))}}/{last}", *measured]
      self._line("  ".join(columns) if self._status is None else fit(list(enumerate(columns)), self._status.width))
    if self._status is not None and step == last:
      self._status.phase("ending the run")

  def close(self) -> None:
    pass

  def _is_early(self, step: int) -> bool:
    return step <= 10 if self._status is None else step in _EARLY_STEPS

  def _line(self, text: str) -> None:
    try:
      print(text, file=self._out, flush=True)
    except BrokenPipeError:  # the reader has closed the output, which ends a command
      raise
    except OSError:  # a file on a full disk
      pass


class TimeLeft:
  """The time until the last step, by the recent time from step to step. The first step, which compiles, is left out."""

  def __init__(self, last: int) -> None:
    self._last, self._before = last, (0, 0.0)
    self._step_seconds: float | None = None
    self.seconds: float | None = None  # None until two steps have been seen

  def update(self, step: int, now: float) -> None:
    """A step has finished at this time."""
    before, then = self._before
    self._before = step, now
    if not before or step <= before:
      return
    taken = (now - then) / (step - before)
    mean = taken if self._step_seconds is None else self._step_seconds
    self._step_seconds = mean + 0.1 * (taken - mean)
    self.seconds = (self._last - step) * self._step_seconds


def status_parts(
  step: int, last: int, metrics: Metrics, memory: tuple[int, int] | None, seconds_left: float | None
) -> list[tuple[int, str]]:
  """The parts of a run's status line, each with its importance."""
  rate, mfu = metrics.get("tokens_per_second"), metrics.get("mfu")
  return [
    (0, f"step {step}/{last}"),
    (1, next((f"{name} {metrics[name]:.3f}" for name in ("reward", "loss") if name in metrics), "")),
    (3, "" if rate is None else f"{_compact(rate)} tok/s"),
    (4, "" if mfu is None else f"MFU {mfu:.0%}"),
    (5, "" if memory is None else f"{memory[0] / 1e9:.0f}/{memory[1] / 1e9:.0f}GB"),
    (2, "" if seconds_left is None else f"{short_duration(seconds_left)} left"),
  ]


def fill(parts: Sequence[tuple[int, str]], share: float, width: int) -> str:
  """The parts that fit, and a bar of the share that is done where there is room for one."""
  text = fit(parts, width)
  room = min(_LONGEST_BAR, width - len(text) - 4)
  if room < _SHORTEST_BAR:
    return text
  done = round(min(1.0, share) * room)
  return f"[{'=' * done}{' ' * (room - done)}]  {text}"


_SHORTEST_BAR, _LONGEST_BAR = 8, 30


def short_duration(seconds: float) -> str:
  """A duration as 0:09, 59:59, 1h03m or 2d03h, so that the status line fits in 70 columns."""
  whole = max(0, round(seconds))
  if whole < 3600:
    return f"{whole // 60}:{whole % 60:02}"
  if whole < 86400:
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
  return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def _compact(value: float) -> str:
  """A number of at least 0 with three digits."""
  for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if value >= size:
      return f"{value / size:.3g}{unit}"
  return f"{value:.3g}"


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


class BackgroundWriter(ABC):
  """A metric writer with a thread that hands metrics on, so that a target which is slow or away delays no step.

  The run waits for it only at its end, at most `patience` seconds. A subclass has its own state before it calls
  `__init__`, which starts the thread.
  """

  silence: ClassVar[str]
  """What is said of a target that takes nothing, before the number of seconds."""

  def __init__(self, patience: float) -> None:
    self._patience = patience
    self._error: Exception | None = None  # the last one of the thread, for the next step to raise
    self._closing, self._changed = False, threading.Condition()
    self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)
    self._thread.start()

  def write(self, step: int, metrics: Metrics) -> None:
    with self._changed:
      self._take(step, metrics)
      self._changed.notify()
      error, self._error = self._error, None
    if error is not None:
      raise error

  def close(self) -> None:
    with self._changed:
      self._closing = True
      self._changed.notify()
    self._thread.join(self._patience)
    if self._has_left():
      raise self._error or TimeoutError(f"{self.silence} for {self._patience:g} seconds")

  @abstractmethod
  def _take(self, step: int, metrics: Metrics) -> None:
    """Keeps the metrics of a step for the thread."""

  @abstractmethod
  def _has_left(self) -> bool:
    """Whether metrics were not handed on."""

  @abstractmethod
  def _serve(self) -> None:
    """The thread: hands on what was taken, until the writer is closed."""


class ObjectStoreWriter(BackgroundWriter):
  """Writes the same lines to a folder of an object store, where files cannot grow: a file for every `period` steps.
  Lines that could not be written go into the next file."""

  silence = "the store did not answer"

  def __init__(self, folder: epath.Path, period: int, after: int = 0, patience: float = 30.0) -> None:
    self._folder, self._period, self._after = folder, period, after
    self._lines: list[str] = []
    self._flush_due = True
    super().__init__(patience)

  def _take(self, step: int, metrics: Metrics) -> None:
    if len(self._lines) < _MAX_PENDING_LINES:
      self._lines.append(format_line(step, metrics))
    self._flush_due |= step % self._period == 0

  def _has_left(self) -> bool:
    return bool(self._lines)

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
    from tensorboardX.proto.summary_pb2 import Summary

    self._append(step, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes texts by their tags; TensorBoard shows them as Markdown."""
    self._loading.join()
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.proto.tensor_pb2 import TensorProto
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensors = {
      tag: TensorProto(dtype="DT_STRING", string_val=[text.encode(errors="replace")], tensor_shape=shape)
      for tag, text in texts.items()
    }
    self._append(step, [Summary.Value(tag=tag, metadata=metadata, tensor=tensor) for tag, tensor in tensors.items()])

  def _append(self, step: int, values: list[Any]) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    data, now = b"", time.time()
    if not self._started:
      data, self._started = _framed_record(Event(wall_time=now, file_version="brain.Event:2").SerializeToString()), True
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
