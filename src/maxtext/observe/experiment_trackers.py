"""Weights & Biases and MLflow, where a team has the curves of all its runs. Their libraries are imported when asked.

Both are told as little as they need; addresses and keys come from the environment variables and files that they
document.
"""

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from maxtext.configs import ConfigError
from maxtext.observe.metric_writers import BackgroundWriter, Metrics

_LOG = logging.getLogger(__name__)

_MAX_PENDING = 100_000  # steps kept while a tracker does not answer
_RETRY_SECONDS = 10.0
_CONNECT_SECONDS = 25.0  # for which W&B's library would hold up the end of the process
_MLFLOW_BATCH = 1000  # metrics in one call, by its interface
_LONGEST_PARAMETER = 6000  # characters of a value, by MLflow's interface


class TrackedStep(NamedTuple):
  """The metrics of a step, and when it finished, in seconds since the epoch."""

  step: int
  metrics: Metrics
  time: float


class Tracker(Protocol):
  """A run in a tracker."""

  @property
  def place(self) -> str:
    """Where people find it."""
    ...

  def log(self, steps: Sequence[TrackedStep]) -> None: ...

  def close(self) -> None: ...


class TrackerWriter(BackgroundWriter):
  """Connects to a tracker at the first metrics, and again after a failure. `library` is slow to import, so that begins
  at once: beside compiling, and not beside the first steps."""

  silence = "no answer"

  def __init__(self, name: str, library: str, connect: Callable[[], Tracker], patience: float = 30.0) -> None:
    self._name, self._library, self._connect = name, library, connect
    self._pending: deque[TrackedStep] = deque(maxlen=_MAX_PENDING)
    super().__init__(patience)

  def _take(self, step: int, metrics: Metrics) -> None:
    self._pending.append(TrackedStep(step, dict(metrics), time.time()))

  def _has_left(self) -> bool:
    return self._thread.is_alive() or bool(self._pending)

  def _serve(self) -> None:
    with suppress(Exception):  # the next import of it raises
      import_module(self._library)
    tracker: Tracker | None = None
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._pending or self._closing)
        steps = list(self._pending)
      if not steps:
        break
      try:
        if tracker is None:
          tracker = self._connect()
          _LOG.info(f"maxtext: metrics also go to {self._name}: {tracker.place}")
        tracker.log(steps)
      except Exception as error:  # of any library below the tracker's
        with self._changed:
          self._error = error
          if not self._changed.wait_for(lambda: self._closing, _RETRY_SECONDS):
            continue
        time.sleep(_RETRY_SECONDS / 10)
      else:
        with self._changed:
          while self._pending and steps and self._pending[0] is steps[0]:
            self._pending.popleft()
            steps.pop(0)
    if tracker is not None:
      try:
        tracker.close()
      except Exception as error:
        self._error = error


def check_trackers(wandb_project: str, mlflow_experiment: str) -> None:
  """Raises where a tracker has not been told who and where it is; W&B's library would ask in the terminal."""
  if wandb_project and os.environ.get("WANDB_MODE", "online") == "online" and not _has_wandb_login():
    raise ConfigError(
      f"wandb_project={wandb_project}, but there is no API key of Weights & Biases: run `wandb login`, set "
      "WANDB_API_KEY, or set WANDB_MODE=offline and send the run later with `wandb sync`."
    )
  if mlflow_experiment and not os.environ.get("MLFLOW_TRACKING_URI"):
    raise ConfigError(
      f"mlflow_experiment={mlflow_experiment}, but MLFLOW_TRACKING_URI is not set: write the address there, "
      "such as http://127.0.0.1:5000 of `mlflow server`."
    )


def _has_wandb_login() -> bool:
  if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
    return True
  host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
  with suppress(OSError, NetrcParseError):
    return netrc(os.environ.get("NETRC")).authenticators(host) is not None
  return False


class WandbTracker:
  """A run of Weights & Biases. Every start of a run goes on with the same one, whose id the run's folder keeps.

  Args:
    project: its name.
    name: of the run.
    folder: of the run, in which the library keeps its files.
    config: keys and values.
  """

  def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
    import wandb

    identity = folder / "wandb_run_id"
    if not identity.exists():
      identity.write_text(secrets.token_hex(8))
    settings = wandb.Settings(
      silent=True, console="off", disable_git=True, disable_code=True, init_timeout=_CONNECT_SECONDS
    )
    self._run = wandb.init(
      project=project, name=name, id=identity.read_text().strip(), resume="allow", dir=folder, config=dict(config),
      settings=settings,
    )  # fmt: skip
    # A resumed run repeats steps, which the library's own count of steps would leave out.
    self._run.define_metric("*", step_metric="step")

  @property
  def place(self) -> str:
    return str(Path(self._run.dir).parent if self._run.offline else self._run.url)

  def log(self, steps: Sequence[TrackedStep]) -> None:
    for step, metrics, when in steps:
      self._run.log({**metrics, "step": step, "time": when})

  def close(self) -> None:
    self._run.finish()


class MlflowTracker:
  """A run of MLflow. Every start of a run goes on with the same one, whose id the run's folder keeps.

  Args:
    experiment: its name.
    name: of the run.
    folder: of the run.
    config: keys and values, the parameters of a new run.
  """

  def __init__(self, experiment: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    identity, self._client = folder / "mlflow_run_id", MlflowClient()
    if identity.exists():
      self._id = identity.read_text().strip()
      self._client.update_run(self._id, status="RUNNING")
    else:
      found = self._client.get_experiment_by_name(experiment)
      number = self._client.create_experiment(experiment) if found is None else found.experiment_id
      self._id = self._client.create_run(number, run_name=name).info.run_id
      parameters = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in config.items()]
      for start in range(0, len(parameters), 100):  # in one call, by its interface
        self._client.log_batch(self._id, params=parameters[start : start + 100])
      identity.write_text(self._id)

  @property
  def place(self) -> str:
    return f"{os.environ['MLFLOW_TRACKING_URI']}, run {self._id}"

  def log(self, steps: Sequence[TrackedStep]) -> None:
    from mlflow.entities import Metric

    metrics = [
      Metric(name, float(value), int(when * 1000), step)
      for step, values, when in steps
      for name, value in values.items()
    ]
    for start in range(0, len(metrics), _MLFLOW_BATCH):
      self._client.log_batch(self._id, metrics=metrics[start : start + _MLFLOW_BATCH])

  def close(self) -> None:
    self._client.set_terminated(self._id)
